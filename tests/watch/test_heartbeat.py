"""Records in a store, and the count of silence; the ranks are threads of one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from types import SimpleNamespace

import pytest
import torch

from fp8_megatron.watch import heartbeat as heartbeat_module
from fp8_megatron.watch.heartbeat import Heartbeat, Pace, RankStatus, Sighting

#: Slow enough that a busy machine is not taken for a silent rank.
PACE = Pace(interval=0.1, dead_after=1.0, patience=3.0)
Start = Callable[[int], Heartbeat]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a rank of three."""
    store = torch.distributed.HashStore()
    with ExitStack() as stack:

        def start(rank: int) -> Heartbeat:
            heartbeat = Heartbeat(store, rank, 3, PACE, RankStatus(host=f"host{rank}", process=100 + rank))
            return stack.enter_context(closing(heartbeat))

        yield start


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def test_rank_0_reads_all_and_the_others_read_rank_0(start: Start) -> None:
    ranks = [start(rank) for rank in range(3)]
    ranks[2].note(RankStatus("host2", 102, iteration=7, doing="training", patient=False))
    wait_until(lambda: ranks[0].others()[2].status is not None and ranks[0].others()[2].status.iteration == 7)
    assert set(ranks[0].others()) == {1, 2}
    assert set(ranks[1].others()) == {0}
    ranks[1].watch_everyone()
    wait_until(lambda: ranks[1].others()[2].status is not None)
    assert set(ranks[1].others()) == {0, 2}


def test_silence_grows_only_for_the_rank_that_is_silent(start: Start) -> None:
    ranks = [start(rank) for rank in range(3)]
    wait_until(lambda: all(seen.status for seen in ranks[0].others().values()))
    ranks[1].close()
    wait_until(lambda: ranks[0].others()[1].silence > PACE.dead_after)
    assert ranks[0].others()[2].silence < PACE.dead_after / 2


def test_sleep_of_the_whole_machine_is_no_silence(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader wakes first, an hour later: the others get the time to speak."""
    reader, speaker = start(0), start(1)
    wait_until(lambda: reader.others()[1].status is not None)
    speaker.close()
    wait_until(lambda: reader.others()[1].silence > 0.0)
    now = time.monotonic
    monkeypatch.setattr(heartbeat_module, "time", _Clock(lambda: now() + 3600.0))
    time.sleep(3 * PACE.interval)
    assert reader.others()[1].silence < PACE.dead_after


class _Clock:
    def __init__(self, monotonic: Callable[[], float]) -> None:
        self.monotonic = monotonic


def test_a_store_that_is_gone_is_noticed() -> None:
    server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = torch.distributed.TCPStore("127.0.0.1", server.port, is_master=False)
    with closing(Heartbeat(client, 1, 2, PACE, RankStatus("host1", 101))) as heartbeat:
        heartbeat.tick(10.0)
        assert 0.0 < heartbeat.store_silence <= 2 * PACE.interval
        wait_until(lambda: heartbeat.store_silence == 0.0)
        assert not heartbeat.store_error
        del server
        wait_until(lambda: bool(heartbeat.store_error))


def test_close_waits_for_a_connection_to_a_store_that_is_gone(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch tries twice for as long as the store's timeout, and pauses between. Python must not end meanwhile."""
    heartbeat, begun = start(1), threading.Event()

    def connect(store: torch.distributed.Store) -> torch.distributed.Store:
        begun.set()
        time.sleep(2.5 * PACE.suspect_after)
        raise RuntimeError("timed out")

    def refuse(*_: object) -> None:
        raise RuntimeError("gone")

    monkeypatch.setattr(heartbeat_module, "_clone", connect)
    monkeypatch.setattr(heartbeat, "_store", SimpleNamespace(set=refuse, check=refuse, multi_get=refuse))
    wait_until(lambda: heartbeat.tick(PACE.interval) or begun.is_set())
    heartbeat.close()
    assert not heartbeat._thread.is_alive()


@pytest.mark.parametrize("timeout_seconds", [1.0, 30.0, 600.0, 7200.0])
def test_death_is_noticed_before_a_collective_times_out(timeout_seconds: float) -> None:
    pace = Pace.for_timeout(timeout_seconds)
    assert 2 * pace.interval < pace.suspect_after < pace.dead_after <= 30.0
    assert pace.dead_after < pace.patience < timeout_seconds


def test_patience_is_for_those_who_asked() -> None:
    at_work, saving = (Sighting(RankStatus("host", 1, patient=patient)) for patient in (False, True))
    assert at_work.limit(PACE) == PACE.dead_after
    assert saving.limit(PACE) == PACE.patience
