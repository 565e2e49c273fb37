"""Tasks in threads: results in order, and no more under way than the bound says."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from fp8_megatron.checkpoint.concurrency import in_order


@pytest.mark.parametrize("limit_bytes", [0, 5, 25, 1000])
def test_results_are_in_order_and_bounded(limit_bytes: int) -> None:
    """The first task is the last to be done; one more than the bound admits has been drawn at most."""
    gate, held, largest = threading.Event(), 0, 0

    def tasks() -> Iterator[tuple[int, Future[int]]]:
        nonlocal held, largest
        for number in range(20):
            held += 10
            largest = max(largest, held)
            if held > limit_bytes:
                gate.set()
            yield 10, threads.submit(lambda number=number: gate.wait() and number)
        gate.set()

    results = []
    with ThreadPoolExecutor(4) as threads:
        for result in in_order(tasks(), limit_bytes=limit_bytes):
            results.append(result)
            held -= 10
    assert results == list(range(20))
    assert largest <= limit_bytes + 20


def test_what_a_task_raised_is_raised() -> None:
    def fail() -> None:
        raise OSError("no space")

    with ThreadPoolExecutor(2) as threads, pytest.raises(OSError, match="no space"):
        list(in_order(((1, threads.submit(action)) for action in (int, fail, int)), limit_bytes=2))
