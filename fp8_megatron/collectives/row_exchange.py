"""Rows of a matrix between tensor-parallel ranks, part by part, so that a GEMM works on one part while another travels.

Under sequence parallelism a rank holds its part of the rows (tokens). A GEMM needs all rows (all-gather), or leaves a
summand of all rows on every rank (reduce-scatter). The rows are independent, so the GEMM runs part by part: for
gathered rows it starts with the rank's own part, for a sum with the other ranks' parts. Parts in flight overlap with a
GEMM.

Where the ranks share memory (`share_memory`) their copy engines carry the parts, and no multiprocessor waits for
another rank. Otherwise one NCCL or gloo collective carries all rows as one part.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..device.group import Group
from ..graphs import exchanges
from ..kernels import ops
from .all_gather import all_gather_into
from .transport import copy_engine
from .transport.peer_link import Link, PeerLink
from .transport.stream_ops import StreamBarrier

#: Writes rows [rows, N] of a rank's matrix into a tensor. One rank is told to add the terms that the sum has once.
WriteRows = Callable[[slice, Tensor, bool], None]
#: Memory of this many bytes that the ranks map, by rank; all ranks call it in the same order.
Allocate = Callable[[int], Sequence[Tensor]]

#: Buffers that exchanges of a kind take in turn.
_NUM_BUFFERS = 2
_GATHERS, _SUMS = 0, 1
#: Channels of unrecorded exchanges. A recorded exchange uses the channel of its kind plus this offset.
_NUM_CHANNELS = 2


class Work(Protocol):
    """What the current stream (on a CPU: the host) can wait for."""

    def wait(self) -> object:
        """May be called again."""


@dataclass(frozen=True, eq=False)
class Rows:
    """A matrix [T, K] whose rows may still be on their way; `whole` is their memory, read through `parts` or `wait`.

    Attributes:
        arrivals: (rows, their values, the work to wait for first), in the order of use.
        complete: the work to wait for before reading `whole`.
    """

    whole: Tensor
    arrivals: Sequence[tuple[slice, Tensor, Work | None]]
    complete: Sequence[Work] = ()

    @staticmethod
    def local(whole: Tensor) -> Rows:
        """Rows that are all present."""
        return Rows(whole, [(slice(0, whole.shape[0]), whole, None)])

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Each part once it is there (on CUDA the current stream waits, not the host).

        After the last part, this rank's own rows have been sent and their memory may be reused.
        """
        for rows, part, work in self.arrivals:
            if work is not None:
                work.wait()
            yield rows, part
        self.wait()

    def wait(self) -> Tensor:
        """[T, K], after all rows have arrived."""
        for work in self.complete:
            work.wait()
        return self.whole


@dataclass(frozen=True, eq=False)
class RowSum:
    """A sum over ranks in flight; `wait` or `summands` is called once, before the next sum of the group starts."""

    arrive: Callable[[], Tensor]

    def wait(self, addend: Tensor | None = None) -> Tensor:
        """This rank's part [T/d, N] of the sum, plus `addend`: contiguous, of that shape and dtype."""
        return _sum(self.arrive(), addend)

    def summands(self) -> Tensor:
        """This rank's part of every rank's matrix [d, T/d, N], to be read before the next sum of the group starts. [1,
        T/d, N] if the transport has summed them.
        """
        return self.arrive()


def gather_rows(shard: Tensor, group: Group) -> Rows:
    """Start to gather every rank's FP8 `shard` [n, K], contiguous, as the rows [d · n, K] in rank order.

    Called by every rank of `group` with a shard of one shape and one (shared) scale. The rows may lie in reused memory:
    wait for and read all of them before the next gather of the group starts.
    """
    exchange = _exchanges.get(group.group_name)
    if exchange is not None:
        return exchange.gather(shard)
    whole = shard.new_empty((shard.shape[0] * group.size(), *shard.shape[1:]))
    work = all_gather_into(whole, shard, group)
    return Rows(whole, [(slice(0, whole.shape[0]), whole, work)], [work])


def sum_rows(
    write: WriteRows, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, group: Group
) -> RowSum:
    """Start the sum of every rank's matrix [T, N]; rank r gets rows [r · T/d, (r + 1) · T/d) of it.

    Called by every rank of `group` with one shape and dtype. A matrix is rounded to `dtype` once. If ranks share
    memory, the sum is FP32 in rank order; otherwise the backend decides.

    Args:
        write: called before this returns, for some or all rows of this rank's matrix, with the tensor to write them to.

    Returns:
        A handle; wait for it before the next sum of the group starts.
    """
    exchange = _exchanges.get(group.group_name)
    if exchange is not None:
        return exchange.sum(write, shape, dtype, device)
    matrix = torch.empty(shape, dtype=dtype, device=device)
    write(slice(0, shape[0]), matrix, group.rank() == 0)
    parts = matrix.new_empty((1, shape[0] // group.size(), shape[1]))
    work = torch.distributed.reduce_scatter_tensor(parts[0], matrix, group=group, async_op=True)

    def arrive() -> Tensor:
        work.wait()
        return parts

    return RowSum(arrive)


def share_memory(group: Group, device: torch.device) -> None:
    """Let copy engines carry the rows of `group` from here on. Called by all its ranks, which are on one node."""
    nbytes = (2 * _NUM_CHANNELS + 1) * 4 * group.size()
    counters = [own.view(torch.int32).view(-1, group.size()) for own in copy_engine.mapped(nbytes, group, device)]
    allocate = partial(copy_engine.mapped, group=group, device=device)
    link = PeerLink(group, [own[: 2 * _NUM_CHANNELS].view(-1) for own in counters])
    exchange = RowExchange(group.rank(), group.size(), allocate, link)
    register(group, exchange)
    exchanges.register(
        f"rows of {group.group_name}",
        exchanges.Recordable(
            begin=exchange.begin_recording,
            end=exchange.end_recording,
            places=counters[group.rank()][_NUM_CHANNELS : 2 * _NUM_CHANNELS],
            meet=StreamBarrier([own[-1] for own in counters], group.rank()),
        ),
    )


def register(group: Group, exchange: RowExchange) -> None:
    """Make `gather_rows` and `sum_rows` of `group` use `exchange`."""
    _exchanges[group.group_name] = exchange


class RowExchange:
    """`gather_rows` and `sum_rows` of one group over its ranks' shared memory.

    A part is sent into the reader's buffer and announced there; the reader's stream waits where it reads. No rank asks
    whether a buffer is free, because each kind has two buffers. A rank starts exchange n + 2 of a kind after it has
    every rank's part of n + 1; a rank that sent its part of n + 1 had read all of n.

    Args:
        rank, num_ranks: of the group.
    """

    def __init__(self, rank: int, num_ranks: int, allocate: Allocate, link: Link) -> None:
        self._rank, self._num_ranks, self._link = rank, num_ranks, link
        self._gathers, self._sums = _Ring(allocate, _GATHERS), _Ring(allocate, _SUMS)
        # At each step every rank sends to one rank and receives from one.
        self._readers = [(rank - step) % num_ranks for step in range(1, num_ranks)]
        self._sources = [(rank + step) % num_ranks for step in range(1, num_ranks)]

    def gather(self, shard: Tensor) -> Rows:
        """See `gather_rows`."""
        link, own = self._link, self._rank
        number, memories = self._gathers.next((self._num_ranks, *shard.shape), shard.dtype)
        link.start()
        for reader in self._readers:
            link.copy(shard, memories[reader].parts[own])
            link.tell(reader, self._gathers.channel, number)
        whole, parts = memories[own]
        link.copy(shard, parts[own])
        sent = link.sent("gather_rows", number % _NUM_BUFFERS)
        arrivals = self._arrivals(self._gathers, number)
        rows = _rows(self._num_ranks, shard.shape[0])
        taken: list[tuple[slice, Tensor, Work | None]] = [(rows[own], shard, None)]
        for source, arrival in zip(self._sources, arrivals, strict=True):
            taken.append((rows[source], parts[source], arrival))
        return Rows(whole, taken, [*arrivals, sent])

    def sum(self, write: WriteRows, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> RowSum:
        """See `sum_rows`."""
        link, own = self._link, self._rank
        part_shape = (shape[0] // self._num_ranks, shape[1])
        rows = _rows(self._num_ranks, part_shape[0])
        # By reader, then by source.
        number, memories = self._sums.next((self._num_ranks, *part_shape), dtype)
        summands = []
        for reader in self._readers:
            summand = torch.empty(part_shape, dtype=dtype, device=device)
            write(rows[reader], summand, False)
            link.start()
            link.copy(summand, memories[reader].parts[own])
            link.tell(reader, self._sums.channel, number)
            summands.append(summand)
        sent = link.sent("sum_rows", number % _NUM_BUFFERS)
        received, parts = memories[own]
        write(rows[own], parts[own], True)
        arrivals = self._arrivals(self._sums, number)

        def arrive() -> Tensor:
            for arrival in arrivals:
                arrival.wait()
            sent.wait()
            summands.clear()  # this stream may reuse their memory
            return received.view(self._num_ranks, *part_shape)

        return RowSum(arrive)

    def begin_recording(self) -> None:
        """Number exchanges from 1, in separate channels. All earlier exchanges have been waited for."""
        self._gathers.begin_recording()
        self._sums.begin_recording()

    def end_recording(self) -> None:
        """Continue with the numbers from before the recording."""
        self._gathers.end_recording()
        self._sums.end_recording()

    def _arrivals(self, ring: _Ring, number: int) -> list[_PartArrival]:
        """What the other ranks send to this rank, in the order of sending."""
        ring.pending = [_PartArrival(self._link, source, ring.channel, number) for source in self._sources]
        return ring.pending


def _sum(parts: Tensor, addend: Tensor | None) -> Tensor:
    """The sum [n, N] of `parts` [d, n, N], in FP32 and in their order, rounded once; plus `addend`."""
    if len(parts) == 1:
        return parts[0] if addend is None else parts[0].add_(addend)
    if len(parts) == 2 and addend is None:
        return parts[0] + parts[1]  # the same result, with less host time
    total = torch.empty_like(parts[0])
    flat = None if addend is None else addend.view(-1)
    ops.accumulate_rows_(parts.view(-1), None, total.view(-1), factor=1.0, add=False, addend=flat)
    return total


class _PartArrival:
    """A part that another rank sends. The first wait queues a wait on the stream; later ones do nothing."""

    def __init__(self, link: Link, source: int, channel: int, number: int) -> None:
        self._link, self._source, self._channel, self._number = link, source, channel, number
        self.is_over = False

    def wait(self) -> None:
        if not self.is_over:
            self._link.wait(self._source, self._channel, self._number)
            self.is_over = True


class _Memory(NamedTuple):
    """A rank's buffer as rows [d · n, …], and its parts [n, …] by rank."""

    whole: Tensor
    parts: tuple[Tensor, ...]


class _Ring:
    """Numbered exchanges of one kind, and the buffers they use in turn. Buffers are made when first needed, and remade
    when too small.
    """

    def __init__(self, allocate: Allocate, channel: int) -> None:
        self._allocate = allocate
        self._buffers: list[Sequence[Tensor]] = []
        #: Never freed: a graph keeps their addresses even after larger buffers replace them.
        self._recorded_buffers: list[Sequence[Tensor]] = []
        self._nbytes = self._number = self._number_before = 0
        self.channel = channel
        self.pending: list[_PartArrival] = []
        #: Cached, because making views costs the host more than sending.
        self._views: dict[tuple[int, tuple[int, ...], torch.dtype], list[_Memory]] = {}

    def begin_recording(self) -> None:
        """See `RowExchange.begin_recording`."""
        self._assert_over()
        self._number_before, self._number = self._number, 0
        self.channel += _NUM_CHANNELS
        self._recorded_buffers += self._buffers

    def end_recording(self) -> None:
        """See `RowExchange.end_recording`."""
        self._number = self._number_before
        self.channel -= _NUM_CHANNELS

    def _assert_over(self) -> None:
        assert all(arrival.is_over for arrival in self.pending), "the exchange before was not waited for"

    def next(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, list[_Memory]]:
        """The number of the next exchange, and by rank its memory for parts of this shape [d, n, …]."""
        self._assert_over()
        self._number += 1
        key = (self._number % _NUM_BUFFERS, shape, dtype)
        memories = self._views.get(key)
        if memories is None:
            memories = self._views[key] = self._make(*key)
        return self._number, memories

    def _make(self, turn: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[_Memory]:
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > self._nbytes:
            self._buffers = [self._allocate(nbytes) for _ in range(_NUM_BUFFERS)]
            self._nbytes = nbytes
            self._views.clear()
        tensors = [buffer[:nbytes].view(dtype).view(shape) for buffer in self._buffers[turn]]
        return [_Memory(tensor.flatten(0, 1), tensor.unbind()) for tensor in tensors]


@functools.cache
def _rows(num_ranks: int, count: int) -> list[slice]:
    """The rows of each rank."""
    return [slice(rank * count, (rank + 1) * count) for rank in range(num_ranks)]


_exchanges: dict[str, RowExchange] = {}
