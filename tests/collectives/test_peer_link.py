"""Operations that a link asks of the driver. A fake driver does them immediately and notes what it would wait for."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

from fp8_megatron.collectives.transport import copy_engine, peer_link, recording, stream_ops
from fp8_megatron.collectives.transport.peer_link import PeerLink
from fp8_megatron.collectives.transport.recording import Recordable

from .test_copy_engine import Member

SENDING, COMPUTE = 77, 5


class Driver:
    """Streams and events are numbers."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.waits: list[tuple[int, int]] = []
        self.status = 0

    def cuMemcpyDtoDAsync_v2(self, target: int, source: int, nbytes: int, stream: int) -> int:
        self.calls.append(("copy", stream))
        ctypes.memmove(target, source, nbytes)
        return self.status

    def cuStreamWriteValue32_v2(self, stream: int, address: int, value: int, flags: int) -> int:
        self.calls.append(("write", stream))
        assert flags == 0, "with the barrier that makes the copies seen"
        ctypes.c_uint32.from_address(address).value = value
        return self.status

    def cuStreamWaitValue32_v2(self, stream: int, address: int, value: int, flags: int) -> int:
        self.calls.append(("wait", stream))
        assert flags == 0, "until it is reached, in cyclic order"
        self.waits.append((address, value))
        return self.status

    def cuEventRecord(self, event: int, stream: int) -> int:
        self.calls.append(("record", stream))
        return self.status

    def cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> int:
        self.calls.append(("wait_event", stream))
        return self.status


class Event:
    cuda_event = 9

    def record(self, stream: object) -> None:
        pass

    def query(self) -> bool:
        return False


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(stream_ops, "_driver", lambda: driver)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: COMPUTE, raising=False)
    monkeypatch.setattr(peer_link, "stream_of", lambda *_: SimpleNamespace(cuda_stream=SENDING))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(copy_engine, "_latest", {})
    return driver


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_reader_waits_for_the_number_that_the_sender_writes_after_its_bytes(driver: Driver, num_ranks: int) -> None:
    counters = [torch.zeros(2 * num_ranks, dtype=torch.int32) for _ in range(num_ranks)]
    links = [PeerLink(Member(rank, num_ranks), counters) for rank in range(num_ranks)]  # type: ignore[arg-type]
    sender, reader, channel = links[1], 0, 1
    source, target = torch.randn(6, 4).bfloat16(), torch.zeros(6, 4, dtype=torch.bfloat16)
    sender.start()
    sender.copy(source, target)
    sender.tell(reader, channel, 2**32 - 1)
    assert driver.calls == [
        ("record", COMPUTE),
        ("wait_event", SENDING),
        ("copy", SENDING),
        ("write", SENDING),
    ]
    assert torch.equal(source, target)
    links[reader].wait(1, channel, 2**32 - 1)
    ((address, value),) = driver.waits
    assert driver.calls[-1] == ("wait", COMPUTE)
    assert ctypes.c_uint32.from_address(address).value == value == 2**32 - 1
    assert [int((each != 0).sum()) for each in counters] == [1] + [0] * (num_ranks - 1)


def test_the_watch_sees_the_last_exchange_of_each_kind(driver: Driver) -> None:
    counters = [torch.zeros(4, dtype=torch.int32) for _ in range(2)]
    link = PeerLink(Member(0, 2), counters)  # type: ignore[arg-type]
    works = [link.sent("gather_rows", turn % 2) for turn in range(5)]
    assert set(copy_engine._latest.values()) == set(works[-2:])
    oldest = copy_engine.unfinished()
    assert oldest is works[-2] and oldest.name == "gather_rows"


def test_what_is_recorded_is_not_remembered(driver: Driver, recordables: dict[str, Recordable]) -> None:
    """Its event belongs to a graph: asking whether it is over would be an error."""
    counters = [torch.zeros(8, dtype=torch.int32) for _ in range(2)]
    link = PeerLink(Member(0, 2), counters)  # type: ignore[arg-type]
    usual = link.sent("gather_rows", 0)
    with recording.recording():
        recorded = link.sent("gather_rows", 0)
    assert recorded.event is not usual.event
    assert copy_engine._latest == {("gather_rows", 0): usual}
    assert link.sent("gather_rows", 0).event is usual.event


def test_a_refusal_names_the_call(driver: Driver) -> None:
    counters = [torch.zeros(4, dtype=torch.int32) for _ in range(2)]
    link = PeerLink(Member(0, 2), counters)  # type: ignore[arg-type]
    driver.status = 719
    with pytest.raises(RuntimeError, match="cuStreamWriteValue32 failed with CUDA driver error 719"):
        link.tell(1, 0, 1)
