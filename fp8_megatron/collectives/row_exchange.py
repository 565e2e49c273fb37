"""Rows of a matrix between tensor-parallel ranks, part by part, so that a GEMM works on one part as another travels.

Under sequence parallelism a rank holds its part of the rows (tokens). A GEMM needs all of them (all-gather), or leaves
on every rank a summand of all of them (reduce-scatter). Its rows do not depend on each other, so it goes part by part:
of gathered rows the rank's own first, of a sum the other ranks' first, and what is on its way has a GEMM beside it.

Where the ranks share memory (`share_memory`) their copy engines carry the parts, and no multiprocessor waits for
another rank. Elsewhere one NCCL or gloo collective carries all rows, which are then one part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from ..kernels import ops
from . import copy_engine
from .all_gather import all_gather_into
from .peer_signals import PeerSignals, Signals
from .side_stream import side_stream
from .traffic import count_all_gather

Group = torch.distributed.ProcessGroup
#: Writes rows [rows, N] of a rank's matrix into a tensor.
WriteRows = Callable[[slice, Tensor], None]
#: Memory of so many bytes that the ranks map, by rank; called by all of them in one order.
Allocate = Callable[[int], Sequence[Tensor]]

#: Of the stream that sends: its copies wait for no gradient's.
_PRIORITY = -2
#: Buffers that exchanges of a kind take in turn.
_NUM_BUFFERS = 2
_GATHERS, _SUMS = 0, 1


class Work(Protocol):
    """What the current stream (on a CPU: the host) can wait for."""

    def wait(self) -> object:
        """Once more does no harm."""


@dataclass(frozen=True, eq=False)
class Rows:
    """A matrix [T, K] whose rows may still be on their way; `whole` is their memory, read through `parts` or `wait`.

    Attributes:
        arrivals: (rows, their values, what to wait for before), in the order to take them.
        complete: what to wait for before `whole`.
    """

    whole: Tensor
    arrivals: Sequence[tuple[slice, Tensor, Work | None]]
    complete: Sequence[Work] = ()

    @staticmethod
    def local(whole: Tensor) -> Rows:
        """All there already."""
        return Rows(whole, [(slice(0, whole.shape[0]), whole, None)])

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Each part once it is there (on CUDA the current stream waits, not the host)."""
        for rows, part, work in self.arrivals:
            if work is not None:
                work.wait()
            yield rows, part

    def wait(self) -> Tensor:
        """[T, K], all there."""
        for work in self.complete:
            work.wait()
        return self.whole


@dataclass(frozen=True, eq=False)
class RowSum:
    """A sum over ranks in flight."""

    finish: Callable[[], Tensor]

    def wait(self) -> Tensor:
        """This rank's part [T/d, N] of the sum; called once."""
        return self.finish()


def gather_rows(shard: Tensor, group: Group) -> Rows:
    """Start to gather every rank's FP8 `shard` [n, K], contiguous, as the rows [d · n, K] in rank order.

    Called by every rank of `group` with a shard of one shape and one (shared) scale. The rows may lie in memory that is
    used again: all of them are waited for, and read, before the next gather of the group starts.
    """
    exchange = _exchanges.get(group.group_name)
    if exchange is not None:
        count_all_gather(shard.nbytes, group.size())
        return exchange.gather(shard)
    whole = shard.new_empty((shard.shape[0] * group.size(), *shard.shape[1:]))
    work = all_gather_into(whole, shard, group)
    return Rows(whole, [(slice(0, whole.shape[0]), whole, work)], [work])


def sum_rows(
    write: WriteRows, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, group: Group
) -> RowSum:
    """Start the sum of every rank's matrix [T, N]; rank r gets rows [r · T/d, (r + 1) · T/d) of it.

    Called by every rank of `group` with one shape and dtype. A matrix is rounded to `dtype` once; where ranks share
    memory the sum is taken in FP32, in rank order, else as the backend takes it.

    Args:
        write: called before this returns, for some rows of this rank's matrix or all, with where to write them.

    Returns:
        A handle; it is waited for before the next sum of the group starts.
    """
    exchange = _exchanges.get(group.group_name)
    if exchange is not None:
        return exchange.sum(write, shape, dtype)
    matrix = torch.empty(shape, dtype=dtype, device=device)
    write(slice(0, shape[0]), matrix)
    part = matrix.new_empty((shape[0] // group.size(), shape[1]))
    work = torch.distributed.reduce_scatter_tensor(part, matrix, group=group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return part

    return RowSum(finish)


def share_memory(group: Group, device: torch.device) -> None:
    """Let copy engines carry the rows of `group` from now on; called by all its ranks, which are on one node."""
    counters = [counters.view(torch.int32) for counters in copy_engine.mapped(2 * 4 * group.size(), group, device)]
    allocate = partial(copy_engine.mapped, group=group, device=device)
    register(group, RowExchange(group, device, allocate, PeerSignals(counters, group.rank())))


def register(group: Group, exchange: RowExchange) -> None:
    """Let `gather_rows` and `sum_rows` of `group` find `exchange`."""
    _exchanges[group.group_name] = exchange


class RowExchange:
    """`gather_rows` and `sum_rows` of one group over its ranks' shared memory.

    A part is pushed into the reader's buffer and announced there; the reader's stream waits where it reads. Nobody asks
    whether a buffer is free, because there are two of each kind: a rank starts exchange n + 2 of a kind when it has
    everybody's part of n + 1, and whoever sent that had read all of n.
    """

    def __init__(self, group: Group, device: torch.device, allocate: Allocate, signals: Signals) -> None:
        self._group, self._device, self._signals = group, device, signals
        self._rank, self._num_ranks = group.rank(), group.size()
        self._buffers = {kind: _Ring(allocate) for kind in (_GATHERS, _SUMS)}
        self._pending: dict[int, list[_Arrival]] = {_GATHERS: [], _SUMS: []}

    def gather(self, shard: Tensor) -> Rows:
        """See `gather_rows`."""
        number, buffers = self._start(_GATHERS, self._num_ranks * shard.nbytes)
        views = [buffer[: self._num_ranks * shard.nbytes].view(shard.dtype) for buffer in buffers]
        wholes = [view.view(self._num_ranks * shard.shape[0], *shard.shape[1:]) for view in views]
        rows = self._rows(wholes[0].shape[0])
        own = rows[self._rank]
        with side_stream(self._device, _PRIORITY):
            for reader in self._readers():
                wholes[reader][own].copy_(shard, non_blocking=True)
                self._signals.raise_(reader, _GATHERS, number)
            wholes[self._rank][own].copy_(shard, non_blocking=True)
            sent = copy_engine.mark("gather_rows, sending", self._group, self._device)
        whole = wholes[self._rank]
        arrivals = self._arrivals(_GATHERS, number, "gather_rows")
        parts: list[tuple[slice, Tensor, Work | None]] = [(own, shard, None)]
        parts += [(rows[source], whole[rows[source]], arrival) for source, arrival in arrivals]
        return Rows(whole, parts, [*(arrival for _, arrival in arrivals), sent])

    def sum(self, write: WriteRows, shape: tuple[int, int], dtype: torch.dtype) -> RowSum:
        """See `sum_rows`."""
        rows, part_shape = self._rows(shape[0]), (shape[0] // self._num_ranks, shape[1])
        number, buffers = self._start(_SUMS, shape[0] * shape[1] * dtype.itemsize)
        # By reader, and there by source.
        parts = [buffer[: shape[0] * shape[1] * dtype.itemsize].view(dtype).view(-1, *part_shape) for buffer in buffers]
        sent = []
        for reader in self._readers():
            part = torch.empty(part_shape, dtype=dtype, device=self._device)
            write(rows[reader], part)
            with side_stream(self._device, _PRIORITY):
                parts[reader][self._rank].copy_(part, non_blocking=True)
                self._signals.raise_(reader, _SUMS, number)
                sent.append((part, copy_engine.mark("sum_rows, sending", self._group, self._device)))
        received = parts[self._rank]
        write(rows[self._rank], received[self._rank])
        arrivals = self._arrivals(_SUMS, number, "sum_rows")

        def finish() -> Tensor:
            for _, arrival in arrivals:
                arrival.wait()
            for _, work in sent:
                work.wait()  # this stream may use the part's memory after it
            total = torch.empty(part_shape, dtype=dtype, device=self._device)
            ops.accumulate_rows_(received.view(-1), None, total.view(-1), factor=1.0, add=False)
            return total

        return RowSum(finish)

    def _start(self, kind: int, nbytes: int) -> tuple[int, Sequence[Tensor]]:
        """The number of an exchange, and its buffers by rank."""
        assert all(arrival.is_over for arrival in self._pending[kind]), "the exchange before was not waited for"
        return self._buffers[kind].next(nbytes)

    def _readers(self) -> list[int]:
        """The other ranks in the order to send to them: at each step every rank sends to one and hears of one."""
        return [(self._rank - step) % self._num_ranks for step in range(1, self._num_ranks)]

    def _arrivals(self, kind: int, number: int, name: str) -> list[tuple[int, _Arrival]]:
        """(source, its part's arrival), in the order in which the others send to this rank."""
        mark = partial(copy_engine.mark, name, self._group, self._device)
        sources = [(self._rank + step) % self._num_ranks for step in range(1, self._num_ranks)]
        arrivals = [_Arrival(partial(self._signals.wait, source, kind, number), mark) for source in sources]
        self._pending[kind] = arrivals
        return list(zip(sources, arrivals, strict=True))

    def _rows(self, total: int) -> list[slice]:
        """The rows of each rank."""
        count = total // self._num_ranks
        return [slice(rank * count, (rank + 1) * count) for rank in range(self._num_ranks)]


class _Arrival:
    """A part that another rank sends: the first wait is the stream's, later ones know."""

    def __init__(self, wait: Callable[[], None], mark: Callable[[], object]) -> None:
        self._wait, self._mark = wait, mark
        self.is_over = False

    def wait(self) -> None:
        if not self.is_over:
            self._wait()
            self._mark()  # a stream that hangs here is named
            self.is_over = True


class _Ring:
    """Numbered exchanges of one kind and the buffers they take in turn, made when first needed, anew when too small."""

    def __init__(self, allocate: Allocate) -> None:
        self._allocate = allocate
        self._buffers: list[Sequence[Tensor]] = []
        self._nbytes = self._number = 0

    def next(self, nbytes: int) -> tuple[int, Sequence[Tensor]]:
        if nbytes > self._nbytes:
            self._buffers = [self._allocate(nbytes) for _ in range(_NUM_BUFFERS)]
            self._nbytes = nbytes
        self._number += 1
        return self._number, self._buffers[self._number % _NUM_BUFFERS]


_exchanges: dict[str, RowExchange] = {}
