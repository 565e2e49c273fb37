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

import torch
from torch import Tensor

from ..kernels import ops
from . import copy_engine
from .copy_engine import CopyWork, PeerMemory
from .traffic import count_all_gather

Group = torch.distributed.ProcessGroup
Work = torch.distributed.Work | CopyWork
#: Writes rows [rows, N] of a rank's summand into a tensor.
WriteRows = Callable[[slice, Tensor], None]

#: Buffers that gathers take in turn: what one gathered is there until two more have started.
_NUM_GATHER_BUFFERS = 3
_NUM_SUM_BUFFERS = 2


@dataclass(frozen=True, eq=False)
class Rows:
    """A matrix [T, K] whose parts may still be on their way; `whole` is their memory, read through `parts` or `wait`.

    Attributes:
        arrivals: (rows, their part of `whole` or the tensor it came from, what to wait for), in order of arrival.
        complete: what to wait for before `whole` is.
    """

    whole: Tensor
    arrivals: Sequence[tuple[slice, Tensor, Work | None]]
    complete: Work | None = None

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
        if self.complete is not None:
            self.complete.wait()
        return self.whole


@dataclass(frozen=True, eq=False)
class RowSum:
    """A sum over ranks in flight: wait once, in the order of the starts."""

    pending: Sequence[Work]
    finish: Callable[[], Tensor]

    def wait(self) -> Tensor:
        """This rank's part [T/d, N] of the sum."""
        for work in self.pending:
            work.wait()
        return self.finish()


def gather_rows(shard: Tensor, group: Group) -> Rows:
    """Start to gather every rank's FP8 `shard` [n, K], contiguous, as the rows [d · n, K] in rank order.

    Called by every rank of `group` with a shard of one shape and one (shared) scale. The rows may lie in memory that is
    used again: they are read before two more gathers of the group start.
    """
    count_all_gather(shard.nbytes, group.size())
    exchange = _exchanges.get(group.group_name)
    if exchange is not None:
        return exchange.gather(shard)
    whole = shard.new_empty((shard.shape[0] * group.size(), *shard.shape[1:]))
    work = torch.distributed.all_gather_into_tensor(
        whole.view(torch.uint8), shard.view(torch.uint8), group=group, async_op=True
    )
    return Rows(whole, [(slice(0, whole.shape[0]), whole, work)], work)


def sum_rows(
    write: WriteRows, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, group: Group
) -> RowSum:
    """Start the sum of every rank's matrix [T, N]; rank r gets rows [r · T/d, (r + 1) · T/d) of it.

    Called by every rank of `group` with one shape and dtype. A matrix is rounded to `dtype` once; where ranks share
    memory the sum is taken in FP32, in rank order, else as the backend takes it.

    Args:
        write: called before this returns, for some rows of this rank's matrix or all, with where to write them.
    """
    exchange = _exchanges.get(group.group_name)
    if exchange is not None:
        return exchange.sum(write, shape, dtype)
    matrix = torch.empty(shape, dtype=dtype, device=device)
    write(slice(0, shape[0]), matrix)
    part = matrix.new_empty((shape[0] // group.size(), shape[1]))
    work = torch.distributed.reduce_scatter_tensor(part, matrix, group=group, async_op=True)
    return RowSum([work], lambda: part)


def share_memory(group: Group, device: torch.device) -> None:
    """Let copy engines carry the rows of `group` from now on; called by all its ranks, which are on one node."""

    def allocate(nbytes: int) -> PeerMemory:
        buffer = copy_engine.allocate(nbytes, group, device, copy_engine.ROW_PRIORITY)
        memory = copy_engine.memory_of(buffer, group)
        assert memory is not None
        return memory

    register(group, RowExchange(group, device, allocate))


def register(group: Group, exchange: RowExchange) -> None:
    """Let `gather_rows` and `sum_rows` of `group` find `exchange`."""
    _exchanges[group.group_name] = exchange


class _Buffer:
    """A buffer that the ranks share, and the first exchange after the last one that the others read from it."""

    def __init__(self, memory: PeerMemory) -> None:
        self.memory = memory
        self.freed_by: CopyWork | None = None


class _Ring:
    """Buffers taken in turn; made when first needed, and anew when larger ones are."""

    def __init__(self, number: int, allocate: Callable[[int], PeerMemory]) -> None:
        self._number, self._allocate = number, allocate
        self._buffers: list[_Buffer] = []
        self._nbytes = self._turn = 0

    def next(self, nbytes: int) -> _Buffer:
        if nbytes > self._nbytes:
            self._buffers = [_Buffer(self._allocate(nbytes)) for _ in range(self._number)]
            self._nbytes = nbytes
        self._turn = (self._turn + 1) % self._number
        return self._buffers[self._turn]


class RowExchange:
    """`gather_rows` and `sum_rows` of one group over its ranks' shared memory.

    Every exchange meets the other ranks before bytes move. So a rank that has passed the meeting of one knows that the
    others have ended all earlier ones: a buffer may be written again once another exchange lies between.

    Args:
        allocate: buffers that all ranks of the group map; called by all of them in one order.
    """

    def __init__(self, group: Group, device: torch.device, allocate: Callable[[int], PeerMemory]) -> None:
        self._rank, self._num_ranks, self._device = group.rank(), group.size(), device
        self._gathered = _Ring(_NUM_GATHER_BUFFERS, allocate)
        self._summands = _Ring(_NUM_SUM_BUFFERS, allocate)
        self._just_read: list[_Buffer] = []

    def gather(self, shard: Tensor) -> Rows:
        """See `gather_rows`."""
        # The copy stream alone writes to it, after the meetings of two later exchanges.
        memory = self._gathered.next(self._num_ranks * shard.nbytes).memory
        shape = (self._num_ranks * shard.shape[0], *shard.shape[1:])
        raw = memory.buffers[self._rank][: self._num_ranks * shard.nbytes]
        whole = raw.view(shard.dtype).view(shape)
        parts = raw.view(self._num_ranks, -1)
        peers = self._others()
        works = copy_engine.start_pulls(
            memory,
            "gather_rows",
            [(peer, parts[peer], parts[peer]) for peer in peers],
            publish=(shard.view(torch.uint8).view(-1), parts[self._rank]),
        )
        self._passed(works[0])
        arrivals: list[tuple[slice, Tensor, Work | None]] = [(self._rows_of(self._rank, shape[0]), shard, None)]
        for peer, work in zip(peers, works, strict=True):
            rows = self._rows_of(peer, shape[0])
            arrivals.append((rows, whole[rows], work))
        return Rows(whole, arrivals, works[-1])

    def sum(self, write: WriteRows, shape: tuple[int, int], dtype: torch.dtype) -> RowSum:
        """See `sum_rows`."""
        num_ranks, own = self._num_ranks, self._rows_of(self._rank, shape[0])
        nbytes = shape[0] * shape[1] * dtype.itemsize
        buffer = self._summands.next(nbytes)
        if buffer.freed_by is not None:
            buffer.freed_by.wait()
        memory = buffer.memory
        summand = memory.buffers[self._rank][:nbytes].view(dtype).view(shape)
        received = torch.empty((num_ranks, shape[0] // num_ranks, shape[1]), dtype=dtype, device=self._device)
        works: list[CopyWork] = []
        for step in range(1, num_ranks):
            # At each step every rank writes for one other and reads from one.
            reader, source = (self._rank - step) % num_ranks, (self._rank + step) % num_ranks
            rows = self._rows_of(reader, shape[0])
            write(rows, summand[rows])
            mine = summand[own].view(-1).view(torch.uint8)
            pull = (source, mine, received[source].view(-1).view(torch.uint8))
            works += copy_engine.start_pulls(memory, "sum_rows", [pull])
        self._passed(works[0])
        self._just_read.append(buffer)
        write(own, received[self._rank])

        def finish() -> Tensor:
            total = received.new_empty(received.shape[1:])
            ops.accumulate_rows_(received.view(-1), None, total.view(-1), factor=1.0, add=False)
            return total

        return RowSum(works, finish)

    def _passed(self, work: CopyWork) -> None:
        """The meeting of `work` tells that earlier exchanges are over."""
        for buffer in self._just_read:
            buffer.freed_by = work
        self._just_read.clear()

    def _others(self) -> list[int]:
        return [(self._rank + step) % self._num_ranks for step in range(1, self._num_ranks)]

    def _rows_of(self, rank: int, total: int) -> slice:
        count = total // self._num_ranks
        return slice(rank * count, (rank + 1) * count)


_exchanges: dict[str, RowExchange] = {}
