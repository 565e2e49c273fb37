"""What ranks that share a sequence send each other in causal attention: keys and values, and their gradients back.

Rank r of n has chunks r and 2n - 1 - r of the sequence's 2n (`data.document_bounds`). A token attends to earlier ones,
so rank r needs of a rank below it the first chunk, and of a rank above it both. `Gathering` fetches exactly these
from all ranks at once; `RingStep` passes whole parts round a ring.

Point-to-point messages travel in one batch, on NCCL as one kernel on a stream of its own. With a `wire` dtype, an FP8
format, `Gathering` and `Returning` send each chunk in it with a scale for each 128 values (`packed`).

Sequences may also be exchanged for heads (arXiv 2309.14509): then the rank has the r-th of n runs of heads, in the
order of the sequence. One all-to-all carries several tensors. FP8 values travel as they are, with one scale of all
ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ..device.group import Group
from ..dtypes import FP8_DTYPES
from .packed import packed_rows, unpacked_rows

_Message = tuple[Tensor, int]


@dataclass
class _Messages:
    """Messages in flight. On a GPU `wait` makes the current stream wait, not the host."""

    works: list[torch.distributed.Work]
    #: What is sent must live until it has left.
    tensors: list[Tensor]

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works, self.tensors = [], []


def _start(sent: Sequence[_Message], received: Sequence[_Message], group: Group) -> _Messages:
    """Start to send tensors to ranks of `group` and to receive into others."""
    operations = [
        torch.distributed.P2POp(operation, tensor, group=group, group_peer=peer)
        for operation, messages in ((torch.distributed.isend, sent), (torch.distributed.irecv, received))
        for tensor, peer in messages
    ]
    return _Messages(torch.distributed.batch_isend_irecv(operations), [tensor for tensor, _ in (*sent, *received)])


class Gathering:
    """The parts of all other ranks that this rank's queries attend to, on their way here.

    Args:
        own: this rank's two chunks [2c, …], contiguous. The caller must not change it before `wait`.
        group: the ranks that share the sequence. All of them call this.
        wire: what chunks are cast to on their way; BF16 then. None: they travel as they are.
    """

    def __init__(self, own: Tensor, group: Group, wire: torch.dtype | None = None) -> None:
        self._chunk, self._wire = (len(own) // 2, *own.shape[1:]), wire
        if wire is not None:
            own = packed_rows(own, prod(self._chunk), wire)
        rank, size, half = group.rank(), group.size(), len(own) // 2
        self._earlier = own.new_empty((rank * half, *own.shape[1:]))
        self._later = own.new_empty(((size - 1 - rank) * 2 * half, *own.shape[1:]))
        below, above = range(rank), range(rank + 1, size)
        # A rank below this one attends to both chunks, a rank above it to the first.
        sent = [*((own, peer) for peer in below), *((own[:half], peer) for peer in above)]
        received = [*zip(_runs(self._earlier, rank), below, strict=True)]
        received += zip(_runs(self._later, size - 1 - rank), above, strict=True)
        self._batch = _start(sent, received, group)

    def wait(self) -> tuple[Tensor, Tensor]:
        """The first chunks of the ranks below [r · c, …], and both chunks of the ranks above [(n - 1 - r) · 2c, …].

        All of this rank's queries attend to the former, those of its second chunk alone to the latter.
        """
        self._batch.wait()
        return _arrived(self._earlier, self._chunk, self._wire), _arrived(self._later, self._chunk, self._wire)


class Returning:
    """Gradients of what `Gathering` brought, on their way back to the ranks that own it.

    Args:
        of_earlier, of_later: gradients of the two results of `Gathering.wait`, contiguous.
        group, wire: as there.
    """

    def __init__(self, of_earlier: Tensor, of_later: Tensor, group: Group, wire: torch.dtype | None = None) -> None:
        rank, size = group.rank(), group.size()
        below, above = range(rank), range(rank + 1, size)
        num_chunks = rank + 2 * (size - 1 - rank)
        self._chunk = ((len(of_earlier) + len(of_later)) // num_chunks, *of_earlier.shape[1:])
        self._wire = wire
        if wire is not None:
            of_earlier, of_later = (packed_rows(x, prod(self._chunk), wire) for x in (of_earlier, of_later))
        half = len(of_earlier) // rank if rank else len(of_later) // (2 * (size - 1))
        trailing = of_earlier.shape[1:]
        self._whole = [of_earlier.new_empty((2 * half, *trailing)) for _ in below]
        self._first = [of_earlier.new_empty((half, *trailing)) for _ in above]
        sent = [*zip(_runs(of_earlier, rank), below, strict=True)]
        sent += zip(_runs(of_later, size - 1 - rank), above, strict=True)
        received = [*zip(self._whole, below, strict=True), *zip(self._first, above, strict=True)]
        self._batch = _start(sent, received, group)

    def wait(self) -> list[Tensor]:
        """Summands of the gradient of this rank's part: of both chunks [2c, …] or of the first one [c, …]."""
        self._batch.wait()
        return [_arrived(x, self._chunk, self._wire) for x in (*self._whole, *self._first)]


class RingStep:
    """A tensor on its way to the next rank of the ring, and that of the rank before on its way here.

    Args:
        sent: contiguous; the caller must not change it before `wait`.
        group: the ring, in rank order. All ranks call this with tensors of one shape.
    """

    def __init__(self, sent: Tensor, group: Group) -> None:
        rank, size = group.rank(), group.size()
        self._received = torch.empty_like(sent)
        self._batch = _start([(sent, (rank + 1) % size)], [(self._received, (rank - 1) % size)], group)

    def wait(self) -> Tensor:
        """The tensor of the rank before."""
        self._batch.wait()
        return self._received


def _arrived(chunks: Tensor, chunk: Sequence[int], wire: torch.dtype | None) -> Tensor:
    """Chunks [c, …] of shape `chunk` behind each other."""
    return chunks if wire is None else unpacked_rows(chunks, chunk, wire)


def _runs(x: Tensor, count: int) -> list[Tensor]:
    """`x` cut into `count` equal runs of rows."""
    return list(x.chunk(count)) if count else []


def gather_sequence(parts: Sequence[Tensor], group: Group) -> list[Tensor]:
    """Whole sequences of this rank's heads. All ranks of `group` call this.

    Args:
        parts: [s / n, b, heads, d] each, of one dtype, with any strides; n divides the heads of each.

    Returns:
        [s, b, heads / n, d] each, views of one tensor.
    """
    size = group.size()
    dtype, parts = parts[0].dtype, _as_copied(parts)
    widths = [x.shape[2] // size for x in parts]
    rows, batch, _, columns = parts[0].shape
    sent = parts[0].new_empty((size, rows, batch, sum(widths), columns))
    for run, x in zip(sent.split(widths, dim=3), parts, strict=True):
        run.copy_(x.unflatten(2, (size, -1)).permute(2, 0, 1, 3, 4))
    first, second = _exchanged(sent, group).chunk(2, dim=1)
    whole = torch.cat([*first, *reversed(second.unbind())])
    return list(whole.view(dtype).split(widths, dim=2))


def scatter_sequence(wholes: Sequence[Tensor], group: Group) -> list[Tensor]:
    """The inverse of `gather_sequence`: all heads of this rank's chunks. All ranks of `group` call this.

    Args:
        wholes: [s, b, heads / n, d] each, of one dtype, with any strides.

    Returns:
        [s / n, b, heads, d] each, contiguous.
    """
    size = group.size()
    dtype, wholes = wholes[0].dtype, _as_copied(wholes)
    widths = [x.shape[2] for x in wholes]
    chunk = wholes[0].shape[0] // (2 * size)
    sent = wholes[0].new_empty((size, 2, chunk, *wholes[0].shape[1:2], sum(widths), wholes[0].shape[3]))
    for run, x in zip(sent.split(widths, dim=4), wholes, strict=True):
        chunks = x.unflatten(0, (2 * size, chunk))
        for rank in range(size):
            run[rank, 0], run[rank, 1] = chunks[rank], chunks[2 * size - 1 - rank]
    received = _exchanged(sent.flatten(1, 2), group)
    return [x.permute(1, 2, 0, 3, 4).flatten(2, 3).contiguous().view(dtype) for x in received.split(widths, dim=3)]


def _as_copied(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """FP8 values as bytes, which every copy and every backend takes."""
    return [x.view(torch.uint8) if x.dtype in FP8_DTYPES else x for x in tensors]


def _exchanged(sent: Tensor, group: Group) -> Tensor:
    """The r-th run of every rank, in rank order, on rank r. `sent` is contiguous."""
    received = torch.empty_like(sent)
    torch.distributed.all_to_all_single(received, sent, group=group)
    return received
