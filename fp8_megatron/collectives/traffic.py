"""Bytes on the wire, counted at the collectives.

A collective says what its rank sends to other ranks. Bytes that stay on the rank do not count. The figures are those of
the bandwidth-optimal algorithms; NCCL and gloo use them for large messages.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum


class TrafficKind(str, Enum):
    """What the bytes were sent for; equal to its value as a string."""

    REDUCE_SCATTER = "reduce_scatter"
    #: The two stages of the hierarchical reduce-scatter.
    REDUCE_SCATTER_INTRA = "reduce_scatter_intra"
    REDUCE_SCATTER_INTER = "reduce_scatter_inter"
    ALL_GATHER = "all_gather"
    SCALE_SYNC = "scale_sync"


@dataclass
class Traffic:
    """What this process sent while the counter was active.

    Attributes:
        sent_bytes: bytes sent to other ranks, by `TrafficKind` (or its value); a kind that was not used counts 0.
    """

    sent_bytes: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def total_bytes(self) -> int:
        """Bytes of all kinds."""
        return sum(self.sent_bytes.values())

    def add(self, kind: TrafficKind, num_bytes: int) -> None:
        """Count `num_bytes` more; any thread may call."""
        with self._lock:
            self.sent_bytes[kind.value] += num_bytes


# Not a ContextVar: gradients are reduced from autograd's threads, which do not inherit the caller's context.
_active: list[Traffic] = []


@contextmanager
def counted_traffic() -> Iterator[Traffic]:
    """Count the bytes that this process sends in the block, on every thread. Counters may nest; each counts its whole
    block.
    """
    traffic = Traffic()
    _active.append(traffic)
    try:
        yield traffic
    finally:
        _active.remove(traffic)


def count_all_to_all(kind: TrafficKind, num_bytes: int, num_ranks: int) -> None:
    """An all-to-all or a reduce-scatter of `num_bytes` per rank: all but the rank's own part, B·(d−1)/d."""
    if _active:
        _count(kind, num_bytes * (num_ranks - 1) // num_ranks)


def count_all_gather(num_bytes: int, num_ranks: int) -> None:
    """An all-gather of `num_bytes` from each rank: b·(d−1)."""
    if _active:
        _count(TrafficKind.ALL_GATHER, num_bytes * (num_ranks - 1))


def count_all_reduce(kind: TrafficKind, num_bytes: int, num_ranks: int) -> None:
    """An all-reduce of `num_bytes`: a reduce-scatter and an all-gather, 2·B·(d−1)/d (rounded down)."""
    if _active:
        _count(kind, 2 * num_bytes * (num_ranks - 1) // num_ranks)


def _count(kind: TrafficKind, num_bytes: int) -> None:
    for traffic in _active:
        traffic.add(kind, num_bytes)
