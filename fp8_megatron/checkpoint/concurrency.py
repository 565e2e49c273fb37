"""Work handed to threads with a bound on the memory that it holds. Files are read and written side by side."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import TypeVar

#: Threads of a rank that read or sum up files.
NUM_READERS = 8

_Result = TypeVar("_Result")


def in_order(tasks: Iterable[tuple[int, Future[_Result]]], *, limit_bytes: int) -> Iterator[_Result]:
    """Results of tasks, in order; the next ones are drawn, and so started, while these are under way.

    Args:
        tasks: (bytes that it holds until its result is taken, the task).
        limit_bytes: of the tasks under way; a single one may hold more.

    Raises:
        Exception: what a task raised, when its turn comes.
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
