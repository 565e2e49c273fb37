"""Pools of worker processes that end with this one, and what may be freed in a forked one. Imports no torch."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Literal, TypeVar


@contextmanager
def freeing_nothing_of_the_parent() -> Iterator[None]:
    """Processes that are forked inside never collect what this process had made before.

    A process group in a cycle, freed in a forked process, waits for threads that are not there.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


_Batch = TypeVar("_Batch")
_Result = TypeVar("_Result")


def process_pool(num_processes: int, *, method: Literal["fork", "spawn"] | None) -> ProcessPoolExecutor:
    """A pool of processes that leave signals to this one, and end when it has ended, by SIGKILL too.

    Args:
        method: how they are started; None: as the system does by default.
    """
    return ProcessPoolExecutor(num_processes, multiprocessing.get_context(method), initializer=_follow_parent)


def _follow_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Without this a process would wait for work forever: its siblings keep the pipe of its queue open."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


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
