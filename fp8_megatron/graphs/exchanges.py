"""Exchanges by growing numbers inside a CUDA graph. A graph is recorded once and launched many times.

Ranks of a node meet by writing the next number into each other's memory and awaiting it (`stream_barrier`,
`peer_link`). A recorded operation always writes the same number. Recorded exchanges therefore have separate places and
count from 0 in each recording. A launch resets the places, meets the other ranks, and meets them again at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Recordable:
    """The exchanges of one group.

    Attributes:
        begin: from here on, count from 0 at the recorded places.
        end: continue as before `begin`.
        places: this rank's recorded places, which the others write to.
        meet: on the current stream, wait for the group's other ranks; called outside a recording.
    """

    begin: Callable[[], None]
    end: Callable[[], None]
    places: Tensor
    meet: Callable[[], None]


_recordables: dict[str, Recordable] = {}
_is_recording = False


def register(name: str, recordable: Recordable) -> None:
    """Make a group's exchanges known to recordings and launches, under the same name on all its ranks."""
    _recordables[name] = recordable


def forget(name: str) -> None:
    """Drop these exchanges; do nothing if there are none."""
    _recordables.pop(name, None)


def is_recording() -> bool:
    """Whether work that this process queues is recorded instead of run."""
    return _is_recording


@contextmanager
def recording() -> Iterator[None]:
    """Record all exchanges of the block. The caller has waited for all earlier exchanges."""
    global _is_recording
    for recordable in _recordables.values():
        recordable.begin()
    _is_recording = True
    try:
        yield
    finally:
        _is_recording = False
        for recordable in _recordables.values():
            recordable.end()


def launch(replay: Callable[[], None]) -> None:
    """Queue recorded work on the current stream; every rank of the groups in it calls this in the same order."""
    for recordable in _recordables.values():
        recordable.places.zero_()  # the last launch is over: every number written there has been awaited
        recordable.meet()
    replay()
    for recordable in _recordables.values():
        recordable.meet()  # before any rank sends into a buffer that another rank's launch may still read
