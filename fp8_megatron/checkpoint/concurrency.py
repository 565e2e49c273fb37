"""Run tasks on threads with a bound on the memory that they hold. Files are read and written in parallel."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import TypeVar

#: Threads of a rank that read files or compute their checksums.
NUM_READERS = 8

_Result = TypeVar("_Result")


def in_order(tasks: Iterable[tuple[int, Future[_Result]]], *, limit_bytes: int) -> Iterator[_Result]:
    """Results of tasks, in order. Later tasks are drawn, and so started, while earlier ones run.

    Args:
        tasks: (bytes that the task holds until its result is taken, the task).
        limit_bytes: for all running tasks together; a single task may hold more.

    Raises:
        Exception: the error of a task, when its turn comes.
    """
    pending: deque[tuple[int, Future[_Result]]] = deque()
    held = 0
    for num_bytes, task in tasks:
        pending.append((num_bytes, task))
        held += num_bytes
        while held > limit_bytes:
            num_bytes, task = pending.popleft()
            yield task.result()
            held -= num_bytes
    for _, task in pending:
        yield task.result()
