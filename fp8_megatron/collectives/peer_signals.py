"""Ranks of a node tell each other, on their streams, how far they are.

A signal is raised by a memory operation of the stream, after all that the stream did before, and awaited by a kernel of
one warp at the place where what it announces is used: at that place the stream has nothing else to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from .stream_barrier import write_on_stream


class Signals(Protocol):
    """Numbers that a rank raises at its peers, one for each channel; they only grow."""

    def raise_(self, peer: int, channel: int, number: int) -> None:
        """After what the current stream has done so far, tell `peer` that this rank has come to `number`."""

    def wait(self, peer: int, channel: int, number: int) -> None:
        """Let the current stream wait until `peer` has come to `number`; what it did before raising it is seen."""


class PeerSignals:
    """`Signals` in memory that the ranks share.

    Args:
        counters: by rank, its int32 [channels · d] zeros; element (c, r) is written by rank r.
        rank: this one.
    """

    def __init__(self, counters: Sequence[Tensor], rank: int) -> None:
        self._num_ranks, self._rank = len(counters), rank
        self._counters = counters
        self._own = list(counters[rank].split(1))
        self._device = counters[rank].device.index

    def raise_(self, peer: int, channel: int, number: int) -> None:
        """See `Signals.raise_`."""
        counters = self._counters[peer]
        element = channel * self._num_ranks + self._rank
        write_on_stream(counters.data_ptr() + element * counters.element_size(), number, self._device)

    def wait(self, peer: int, channel: int, number: int) -> None:
        """See `Signals.wait`."""
        from ..kernels.signal_triton import wait_until_reached  # a CPU machine has no Triton

        wait_until_reached(self._own[channel * self._num_ranks + peer], _as_int32(number))


def _as_int32(number: int) -> int:
    return (number + 2**31) % 2**32 - 2**31
