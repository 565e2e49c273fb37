"""Ranks of a node meet on a stream without a kernel: the GPU's front end writes and awaits counters in memory.

A spinning kernel would take a multiprocessor's registers away from the concurrent GEMM while it waits. A stream's
memory operations (CUDA driver API, "Stream memory operations") wait before anything is launched.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from . import recording
from .stream_ops import WriteThenWait, current_stream


class StreamBarrier:
    """Called by every rank on one of its streams: later work on the stream waits until all ranks have come this far.

    What a rank's stream did before the call is visible to the other ranks' streams after it. Every rank calls one
    barrier on one stream, in the same order. A wait has no timeout: `failures.RankWatch` ends a process whose exchanges
    do not finish.

    Args:
        counters: by rank, its int32 [d] zeros, where element r is written by rank r; mapped into this process.
        rank: this one.

    Raises:
        RuntimeError: the driver refuses.
    """

    def __init__(self, counters: Sequence[Tensor], rank: int) -> None:
        others = [other for other in range(len(counters)) if other != rank]
        size = counters[rank].element_size()
        written = [counters[other].data_ptr() + rank * size for other in others]
        awaited = [counters[rank].data_ptr() + other * size for other in others]
        self._device = counters[rank].device
        self._meet = WriteThenWait(written, awaited)
        self._count = 0
        self._kept_mapped = tuple(counters)

    def __call__(self) -> None:
        """Queue a meeting on the current stream."""
        self._count += 1
        self._meet.queue(self._count, current_stream(self._device))

    def restart(self) -> None:
        """Count from 0 again."""
        self._count = 0


class RecordableBarrier:
    """A `StreamBarrier`, or its counterpart in a CUDA graph that is being recorded (`recording`).

    Args:
        counters: by rank, its int32 [3, d] zeros: for barriers, for recorded barriers, and for launches of these.
        rank: this one.
    """

    def __init__(self, counters: Sequence[Tensor], rank: int) -> None:
        of_kinds = zip(*(own.unbind() for own in counters), strict=True)
        self._usual, self._recorded, launches = (StreamBarrier(places, rank) for places in of_kinds)
        self.recordable = recording.Recordable(
            begin=self._recorded.restart, end=lambda: None, places=counters[rank][1], meet=launches
        )

    def __call__(self) -> None:
        """Queue a meeting on the current stream."""
        (self._recorded if recording.is_recording() else self._usual)()
