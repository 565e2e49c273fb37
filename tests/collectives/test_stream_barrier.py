"""The barrier's memory operations, on a fake driver that does them immediately and notes what it would wait for."""

from __future__ import annotations

import ctypes

import pytest
import torch

from fp8_megatron.collectives.transport import recording, stream_ops
from fp8_megatron.collectives.transport.recording import Recordable
from fp8_megatron.collectives.transport.stream_barrier import RecordableBarrier, StreamBarrier
from fp8_megatron.collectives.transport.stream_ops import _Operation


class Driver:
    """Writes at once; a wait is kept until somebody asks whether it is over."""

    def __init__(self) -> None:
        self.waits: list[tuple[int, int]] = []
        self.status = 0

    def cuStreamBatchMemOp_v2(self, stream: int, count: int, operations: ctypes.Array, flags: int) -> int:
        assert len(operations) == count and flags == 0
        for operation in operations:
            place = ctypes.c_uint32.from_address(operation.address)
            if operation.operation == stream_ops._WRITE_VALUE_32:
                place.value = operation.value
            else:
                self.waits.append((operation.address, operation.value))
        return self.status

    def is_waiting(self) -> bool:
        """Whether a wait's counter is below its value, in cyclic order."""
        behind = [(ctypes.c_uint32.from_address(at).value - value) & 0xFFFFFFFF for at, value in self.waits]
        return any(difference >= 1 << 31 for difference in behind)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(stream_ops, "_driver", lambda: driver)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    return driver


def test_the_structure_is_the_drivers() -> None:
    """CUstreamBatchMemOpParams is a union with six 64-bit words; the members lie as in CUstreamMemOpWaitValueParams."""
    assert ctypes.sizeof(_Operation) == 6 * 8
    offsets = {name: getattr(_Operation, name).offset for name, *_ in _Operation._fields_}
    assert offsets == {"operation": 0, "address": 8, "value": 16, "flags": 24, "alias": 32, "padding": 40}


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_nobody_goes_on_before_the_last_has_come(driver: Driver, num_ranks: int) -> None:
    counters = [torch.zeros(num_ranks, dtype=torch.int32) for _ in range(num_ranks)]
    barriers = [StreamBarrier(counters, rank) for rank in range(num_ranks)]
    for barrier in barriers:
        barrier._count = (1 << 32) - 2  # the counter starts again at zero on the way
    for counter in counters:
        counter.fill_(-2)
    for _ in range(4):
        driver.waits.clear()
        for arrived, barrier in enumerate(barriers, 1):
            barrier()
            assert driver.is_waiting() == (arrived < num_ranks)
        assert len(driver.waits) == num_ranks * (num_ranks - 1)


def test_recorded_meetings_count_from_one_at_places_of_their_own(
    driver: Driver, recordables: dict[str, Recordable]
) -> None:
    counters = [torch.zeros(3, 2, dtype=torch.int32) for _ in range(2)]
    barriers = [RecordableBarrier(counters, rank) for rank in range(2)]
    for rank, barrier in enumerate(barriers):
        recording.register(f"rank {rank}", barrier.recordable)
    for barrier in barriers * 5:
        barrier()
    assert [own.tolist() for own in counters] == [[[0, 5], [0, 0], [0, 0]], [[5, 0], [0, 0], [0, 0]]]
    for _ in range(2):  # two graphs
        with recording.recording():
            for barrier in barriers * 3:
                barrier()
        assert [own[1].tolist() for own in counters] == [[0, 3], [3, 0]]
        for recordable in recordables.values():
            recordable.places.zero_()
    assert [own[1].tolist() for own in counters] == [[0, 0], [0, 0]]
    for barrier in barriers:
        barrier()
    assert [own[0].tolist() for own in counters] == [[0, 6], [6, 0]]
    for recordable in recordables.values():
        recordable.meet()
    assert [own[2].tolist() for own in counters] == [[0, 1], [1, 0]]


def test_a_refusal_is_an_error(driver: Driver) -> None:
    driver.status = 801
    barrier = StreamBarrier([torch.zeros(2, dtype=torch.int32) for _ in range(2)], 0)
    with pytest.raises(RuntimeError, match="cuStreamBatchMemOp failed with CUDA driver error 801"):
        barrier()
