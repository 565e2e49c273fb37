"""An exchange by copy engines has no end of its own: the watch ends a process whose exchange takes too long."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from fp8_megatron.collectives.transport import copy_engine
from fp8_megatron.collectives.transport.copy_engine import CopyWork
from fp8_megatron.watch.failures import RankWatch
from fp8_megatron.watch.heartbeat import RankStatus, Sighting


@pytest.mark.parametrize(("age", "is_overdue"), [(50.0, False), (70.0, True)])
def test_after_the_timeout_of_collectives(monkeypatch: pytest.MonkeyPatch, age: float, is_overdue: bool) -> None:
    work = CopyWork("all_to_all", None, None, time.monotonic() - age)  # type: ignore[arg-type]
    monkeypatch.setattr(copy_engine, "unfinished", lambda: work)
    watch = RankWatch(60.0)
    others = {1: Sighting(status=RankStatus(host="node1", process=5, iteration=12, doing="training"))}
    watch._heartbeat = SimpleNamespace(others=lambda: others)  # type: ignore[assignment]
    told = "".join(cause.text for cause in watch._overdue())
    expected = (
        "all_to_all by copy engines has not ended within --distributed-timeout-minutes; "
        "all other ranks still answer (rank 1 training, it"
    )
    assert (expected in told) == is_overdue


def test_without_exchanges_nothing_is_overdue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_engine, "unfinished", lambda: None)
    assert RankWatch(60.0)._overdue() == []
