"""Batches that go through a pool of processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import TypeVar

_Batch = TypeVar("_Batch")
_Result = TypeVar("_Result")


def results_in_order(
    executor: ProcessPoolExecutor, function: Callable[[_Batch], _Result], batches: Iterable[_Batch], *, most: int
) -> Iterator[_Result]:
    """``function(batch)`` of each batch, in order. The pool is shut down at the end, and where the caller stops.

    Args:
        most: batches at a time between the first call and the last result taken, a bound on memory.

    Raises:
        BrokenProcessPool: a process died.
    """
    pending: deque[Future[_Result]] = deque()
    try:
        for batch in batches:
            pending.append(executor.submit(function, batch))
            if len(pending) >= most:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        executor.shutdown(cancel_futures=True)
