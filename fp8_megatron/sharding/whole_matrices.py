"""Whole matrices of a flat space, for update rules that need them: ranks swap the parts that they hold.

A space is cut evenly over its replicas, across matrices; under torch's ``fully_shard`` each rank has a space of its own
rows. In a turn each rank sends what it has of a matrix to the matrix's owner, and gets its part of the owner's result
back (Dion, arXiv 2504.05295, does so with momentum). Owners are chosen by cost. One rank sends nothing: its matrices
are views of its parts. Exchanges travel while the caller computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .partition import Fragment, ParamSpace, Slot
from .region import Region
from .replicas import Replicas

#: Elements of a turn for each rank. A turn has room for two of the largest matrices for each at least.
_TURN_NUMEL = 1 << 26
#: [b, rows, columns] of a whole matrix; b is 1 but for a plain parameter [M, N, K].
Shape = tuple[int, int, int]


@dataclass(frozen=True)
class WholeMatrix:
    """What one scale belongs to: elements [start, stop) of a space, with their padding.

    Attributes:
        slot: its parameter, which has others too if it is [E, N, K] in FP8.
        owner: the rank that gets it whole.
    """

    slot: Slot
    start: int
    stop: int
    owner: int = 0

    @property
    def numel(self) -> int:
        """Elements of the whole matrix, with its padding."""
        return self.stop - self.start

    @property
    def shape(self) -> Shape:
        rows, columns = self.slot.param.shape[-2:]
        return self.slot.numel // self.slot.num_matrices // (rows * columns), rows, columns

    def parts_of(self, space: ParamSpace, rank: int) -> list[Fragment]:
        """What a rank has of it; where that lies in the rank's shard, and in the whole matrix."""
        return space.parts_of(self.start, self.stop, rank)

    def of(self, flat: Tensor) -> Tensor:
        """The matrix of its elements [numel] (a view)."""
        return flat[: math.prod(self.shape)].view(self.shape)

    def flattened(self, matrix: Tensor) -> Tensor:
        """The elements [numel] of the matrix."""
        return torch.nn.functional.pad(matrix.reshape(-1), (0, self.numel - matrix.numel()))


@dataclass(frozen=True)
class CutMatrix(WholeMatrix):
    """A matrix that ``fully_shard`` has cut along an axis. Its elements are those of one rank after another's; those
    from `start` to `stop` are this rank's, in a space of its own."""

    @property
    def _region(self) -> Region:
        assert self.slot.region is not None
        return self.slot.region

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def shape(self) -> Shape:
        rows, columns = self._region.whole_shape
        return 1, rows, columns

    def parts_of(self, space: ParamSpace, rank: int) -> list[Fragment]:
        inner = self.numel // self._region.axis_numel
        sizes = self._region.part_sizes
        return [Fragment(self.start, sum(sizes[:rank]) * inner, sizes[rank] * inner)]

    def of(self, flat: Tensor) -> Tensor:
        """The matrix of its elements [numel]; a view if ranks have rows, or there is one."""
        if self._region.axis == 0 or self._region.size == 1:
            return flat.view(self.shape)
        _, rows, _ = self.shape
        parts = flat.split([rows * size for size in self._region.part_sizes])
        return torch.cat([part.view(1, rows, -1) for part in parts], dim=2)

    def flattened(self, matrix: Tensor) -> Tensor:
        if self._region.axis == 0:
            return matrix.reshape(-1)
        return torch.cat([part.reshape(-1) for part in matrix.split(self._region.part_sizes, dim=2)])


@dataclass(frozen=True)
class _Piece:
    """What a rank has of a matrix: elements of the matrix from `start`.

    Attributes:
        place: of this rank's pieces, where they are in its parts; of others' pieces, the number of the owned matrix.
    """

    start: int
    place: int
    length: int

    def of_matrix(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.start + self.length]

    def of_parts(self, parts: Tensor) -> Tensor:
        return parts[self.place : self.place + self.length]


class Sent(NamedTuple):
    """An exchange under way.

    Attributes:
        received: what ranks send this one, once `wait` has returned.
        pieces: what this rank sends, kept so long.
    """

    received: Tensor
    pieces: Tensor
    work: torch.distributed.Work | None

    def wait(self) -> Tensor:
        """`received`. On CUDA the stream waits, not the host."""
        if self.work is not None:
            self.work.wait()
        return self.received


@dataclass(frozen=True)
class Turn:
    """Matrices that lie one after another in a space and are whole at one time."""

    space: ParamSpace
    matrices: tuple[WholeMatrix, ...]

    @property
    def ranks(self) -> Replicas:
        """The ranks that have parts of the matrices."""
        return _ranks(self.space)

    @cached_property
    def parts(self) -> list[Fragment]:
        """This rank's parts, in the order of its shard: where they start there, and how far into all of them."""
        first, last = self.matrices[0].start, self.matrices[-1].stop
        found = self.space.parts_of(first, last, self.space.shard_index)
        places = accumulate((part.length for part in found), initial=0)
        return [Fragment(part.shard_start, place, part.length) for part, place in zip(found, places, strict=False)]

    @property
    def numel(self) -> int:
        """Elements of this rank's parts."""
        return sum(part.length for part in self.parts)

    @cached_property
    def owned(self) -> list[WholeMatrix]:
        """The matrices that this rank gets whole."""
        return [matrix for matrix in self.matrices if matrix.owner == self.ranks.rank]

    @cached_property
    def _to_owners(self) -> list[list[_Piece]]:
        """By owner, this rank's pieces of its matrices."""
        return [
            [piece for matrix in self.matrices if matrix.owner == owner for piece in self._pieces(matrix)]
            for owner in range(self.ranks.size)
        ]

    @cached_property
    def _from_holders(self) -> list[list[_Piece]]:
        """By rank, its pieces of the matrices that this one owns."""
        return [
            [
                _Piece(part.slot_start, index, part.length)
                for index, matrix in enumerate(self.owned)
                for part in matrix.parts_of(self.space, rank)
            ]
            for rank in range(self.ranks.size)
        ]

    def _pieces(self, matrix: WholeMatrix) -> list[_Piece]:
        """What this rank has of a matrix. A shard keeps the order of the space inside of each bucket."""
        pieces = []
        for part in matrix.parts_of(self.space, self.ranks.rank):
            home = next(own for own in self.parts if 0 <= part.shard_start - own.shard_start < own.length)
            place = home.slot_start + part.shard_start - home.shard_start
            pieces.append(_Piece(part.slot_start, place, part.length))
        return pieces

    def gather(self, parts: Tensor) -> Sent:
        """Send what this rank has of matrices to their owners, for `gathered`; called by all ranks.

        Args:
            parts: of this rank, [numel].
        """
        pieces = [piece.of_parts(parts) for pieces in self._to_owners for piece in pieces]
        return self._swap(pieces, parts, self._to_owners, self._from_holders)

    def gathered(self, sent: Sent, parts: Tensor) -> list[Tensor]:
        """Each owned matrix [b, rows, columns] from what all ranks have sent; one rank gets views of `parts`."""
        if self.ranks.size == 1:
            first = self.matrices[0].start
            return [matrix.of(parts[matrix.start - first :][: matrix.numel]) for matrix in self.matrices]
        received = sent.wait()
        wholes = [parts.new_zeros(matrix.numel) for matrix in self.owned]
        start = 0
        for pieces in self._from_holders:
            for piece in pieces:
                piece.of_matrix(wholes[piece.place]).copy_(received[start : start + piece.length])
                start += piece.length
        return [matrix.of(flat) for matrix, flat in zip(self.owned, wholes, strict=True)]

    def scatter(self, results: Sequence[Tensor], out: Tensor) -> Sent:
        """Send the ranks their parts of what the owners have made, for `scattered`; called by all ranks.

        Args:
            results: what `gathered` gave for `out`, with its new values.
            out: [numel].
        """
        if self.ranks.size == 1:
            return self._swap([], out, [], [])
        flat = [matrix.flattened(result) for matrix, result in zip(self.owned, results, strict=True)]
        pieces = [piece.of_matrix(flat[piece.place]) for pieces in self._from_holders for piece in pieces]
        return self._swap(pieces, out, self._from_holders, self._to_owners)

    def scattered(self, sent: Sent, out: Tensor) -> None:
        """Write this rank's parts of what all ranks have sent."""
        if self.ranks.size == 1:
            return
        received, start = sent.wait(), 0
        for piece in (piece for pieces in self._to_owners for piece in pieces):
            piece.of_parts(out).copy_(received[start : start + piece.length])
            start += piece.length

    def _swap(
        self, pieces: Sequence[Tensor], like: Tensor, to: Sequence[list[_Piece]], come: Sequence[list[_Piece]]
    ) -> Sent:
        """Send pieces, and receive those of all ranks in their order.

        Args:
            pieces: this rank's, by the rank that they go to.
            like: a tensor of the dtype.
            to, come: the pieces that go to each rank, and that come from each.
        """
        if self.ranks.size == 1:
            return Sent(like, like, None)
        flat = torch.cat(list(pieces)) if pieces else like[:0]
        counts, counts_received = (
            [sum(piece.length for piece in pieces) * like.itemsize for pieces in table] for table in (to, come)
        )
        received = torch.empty(sum(counts_received), dtype=torch.uint8, device=like.device)
        work = torch.distributed.all_to_all_single(
            received, flat.view(torch.uint8), counts_received, counts, group=self.ranks.group, async_op=True
        )
        return Sent(received.view(like.dtype), flat, work)


def matrices_of(space: ParamSpace, slot: Slot) -> list[WholeMatrix]:
    """The matrices of a parameter, without owners."""
    kind, size = WholeMatrix if space.sharing.scaled_with is None else CutMatrix, slot.padded_matrix
    return [kind(slot, start, start + size) for start in range(slot.offset, slot.offset + slot.padded, size)]


def turns(space: ParamSpace, cost: Callable[[Shape], float]) -> list[Turn]:
    """All matrices of a space, in order; the same on all ranks.

    Args:
        cost: of a matrix, for the choice of owners.
    """
    matrices, num_ranks = [matrix for slot in space.slots for matrix in matrices_of(space, slot)], _ranks(space).size
    limit = num_ranks * max(_TURN_NUMEL, 2 * max(matrix.numel for matrix in matrices))
    borders, numel = [0], 0
    for index, matrix in enumerate(matrices):
        numel += matrix.numel
        if numel > limit:
            borders.append(index)
            numel = matrix.numel
    runs = [matrices[first:last] for first, last in pairwise([*borders, len(matrices)])]
    return [Turn(space, _with_owners(run, num_ranks, cost)) for run in runs]


def _ranks(space: ParamSpace) -> Replicas:
    """The ranks that have parts of the matrices of a space."""
    cut = space.sharing.scaled_with
    return space.replicas if cut is None else Replicas.of(cut, space.device)


def _with_owners(run: Sequence[WholeMatrix], num_ranks: int, cost: Callable[[Shape], float]) -> tuple[WholeMatrix, ...]:
    """The most costly matrix first, each to the rank with the least work so far."""
    work, owners = [0.0] * num_ranks, [0] * len(run)
    for index in sorted(range(len(run)), key=lambda index: -cost(run[index].shape)):
        owners[index] = min(range(num_ranks), key=work.__getitem__)
        work[owners[index]] += cost(run[index].shape)
    return tuple(replace(matrix, owner=owner) for matrix, owner in zip(run, owners, strict=True))
