"""Ranks that are started again meet in a part of the store that their last attempt did not write to."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch

from fp8_megatron.device.rendezvous import fresh_store, process_group_arguments

TIMEOUT = timedelta(seconds=20)


def _attempt(store: torch.distributed.Store, late: int | None, world_size: int = 3) -> list[str]:
    """All ranks meet, rank `late` half a second after the others, and exchange keys; what each rank reads."""
    read = [""] * world_size

    def run(rank: int) -> None:
        if rank == late:
            time.sleep(0.5)
        own = fresh_store(store, rank, world_size, TIMEOUT)
        if rank == 0:
            own.set("address", f"{time.monotonic()}")
        read[rank] = own.get("address").decode()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    return read


@pytest.mark.parametrize("late", [None, 0, 2])
def test_a_restarted_rank_reads_nothing_old(late: int | None) -> None:
    store = torch.distributed.HashStore()
    store.set_timeout(TIMEOUT)
    seen = set()
    for _ in range(3):
        read = _attempt(store, late)
        assert len(set(read)) == 1 and read[0] and read[0] not in seen
        seen.add(read[0])


def test_a_rank_that_does_not_come_is_an_error() -> None:
    store = torch.distributed.HashStore()
    store.set("fp8_megatron/attempt/name", "old")
    store.set("fp8_megatron/attempt/old/seen/1", "another word")
    with pytest.raises(torch.distributed.DistError, match="rank 1 has not met rank 0"):
        fresh_store(store, 1, 2, timedelta(seconds=0.3))
    with pytest.raises(torch.distributed.DistError):
        fresh_store(store, 0, 2, timedelta(seconds=0.3))


def test_without_restarts_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    assert process_group_arguments(TIMEOUT) == {}
