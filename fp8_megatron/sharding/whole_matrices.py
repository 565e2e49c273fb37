"""Whole matrices of a flat space, for update rules that need them: replicas swap the parts that they own.

A space is cut evenly over its replicas, across matrices. In a turn each replica sends what it has of a matrix to the
matrix's owner, and gets its part of the owner's result back (Dion, arXiv 2504.05295, does so with momentum). Owners are
chosen by cost. One replica sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from .partition import Fragment, ParamSpace, Slot

#: Elements of a turn for each replica. A turn has room for two of the largest matrices for each at least.
_TURN_NUMEL = 1 << 26


@dataclass(frozen=True)
class WholeMatrix:
    """What one scale belongs to: elements [start, stop) of a space, with their padding.

    Attributes:
        slot: its parameter, which has others too if it is [E, N, K] in FP8.
        owner: the replica that gets it whole.
    """

    slot: Slot
    start: int
    stop: int
    owner: int

    def of(self, flat: Tensor) -> Tensor:
        """[b, rows, columns] of its elements (a view); b is 1 but for the experts of a plain parameter."""
        rows, columns = self.slot.param.shape[-2:]
        return flat[: self.slot.numel // self.slot.num_matrices].view(-1, rows, columns)


@dataclass(frozen=True)
class _Piece:
    """What a replica has of a matrix: elements of the matrix from `start`.

    Attributes:
        place: of this replica's pieces, where they are in its parts; of others' pieces, the number of the owned matrix.
    """

    start: int
    place: int
    length: int

    def of_matrix(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.start + self.length]

    def of_parts(self, parts: Tensor) -> Tensor:
        return parts[self.place : self.place + self.length]


@dataclass(frozen=True)
class Turn:
    """Matrices that lie one after another in a space and are whole at one time."""

    space: ParamSpace
    matrices: tuple[WholeMatrix, ...]

    @cached_property
    def parts(self) -> list[Fragment]:
        """This replica's parts, in the order of its shard: where they start there, and how far into all of them."""
        first, last = self.matrices[0].start, self.matrices[-1].stop
        found = self.space.parts_of(first, last, self.space.shard_index)
        places = accumulate((part.length for part in found), initial=0)
        return [Fragment(part.shard_start, place, part.length) for part, place in zip(found, places, strict=False)]

    @property
    def numel(self) -> int:
        """Elements of this replica's parts."""
        return sum(part.length for part in self.parts)

    @cached_property
    def owned(self) -> list[WholeMatrix]:
        """The matrices that this replica gets whole."""
        return [matrix for matrix in self.matrices if matrix.owner == self.space.shard_index]

    @cached_property
    def _to_owners(self) -> list[list[_Piece]]:
        """By owner, this replica's pieces of its matrices."""
        return [
            [piece for matrix in self.matrices if matrix.owner == owner for piece in self._pieces(matrix)]
            for owner in range(self.space.num_shards)
        ]

    @cached_property
    def _from_replicas(self) -> list[list[_Piece]]:
        """By replica, its pieces of the matrices that this one owns."""
        return [
            [
                _Piece(part.slot_start, index, part.length)
                for index, matrix in enumerate(self.owned)
                for part in self.space.parts_of(matrix.start, matrix.stop, replica)
            ]
            for replica in range(self.space.num_shards)
        ]

    def _pieces(self, matrix: WholeMatrix) -> list[_Piece]:
        """What this replica has of a matrix. A shard keeps the order of the space inside of each bucket."""
        pieces = []
        for part in self.space.parts_of(matrix.start, matrix.stop, self.space.shard_index):
            home = next(own for own in self.parts if 0 <= part.shard_start - own.shard_start < own.length)
            place = home.slot_start + part.shard_start - home.shard_start
            pieces.append(_Piece(part.slot_start, place, part.length))
        return pieces

    def gather(self, parts: Tensor) -> list[Tensor]:
        """Each owned matrix, as `WholeMatrix.of` gives it, from what all replicas have of it; called by all of them.

        Args:
            parts: of this replica, [numel].
        """
        sent = [piece.of_parts(parts) for pieces in self._to_owners for piece in pieces]
        received = self._swap(sent, parts, self._to_owners, self._from_replicas)
        wholes = [parts.new_zeros(matrix.stop - matrix.start) for matrix in self.owned]
        start = 0
        for pieces in self._from_replicas:
            for piece in pieces:
                piece.of_matrix(wholes[piece.place]).copy_(received[start : start + piece.length])
                start += piece.length
        return [matrix.of(flat) for matrix, flat in zip(self.owned, wholes, strict=True)]

    def scatter(self, results: Sequence[Tensor], out: Tensor) -> None:
        """Write this replica's parts of what the owners have made; called by all replicas.

        Args:
            results: of each owned matrix, in its shape and `out`'s dtype.
            out: [numel].
        """
        padded = [
            torch.nn.functional.pad(result.reshape(-1), (0, matrix.stop - matrix.start - result.numel()))
            for matrix, result in zip(self.owned, results, strict=True)
        ]
        sent = [piece.of_matrix(padded[piece.place]) for pieces in self._from_replicas for piece in pieces]
        received = self._swap(sent, out, self._from_replicas, self._to_owners)
        start = 0
        for piece in (piece for pieces in self._to_owners for piece in pieces):
            piece.of_parts(out).copy_(received[start : start + piece.length])
            start += piece.length

    def _swap(
        self, sent: Sequence[Tensor], like: Tensor, to: Sequence[list[_Piece]], come: Sequence[list[_Piece]]
    ) -> Tensor:
        """What other replicas sent this one, in their order.

        Args:
            sent: this replica's pieces, by the replica that they go to.
            like: a tensor of the dtype.
            to, come: the pieces that go to each replica, and that come from each.
        """
        flat = torch.cat(list(sent)) if sent else like[:0]
        if self.space.num_shards == 1:
            return flat
        counts, counts_received = (
            [sum(piece.length for piece in pieces) * like.itemsize for pieces in table] for table in (to, come)
        )
        received = torch.empty(sum(counts_received), dtype=torch.uint8, device=like.device)
        group = self.space.replicas.group
        torch.distributed.all_to_all_single(received, flat.view(torch.uint8), counts_received, counts, group=group)
        return received.view(like.dtype)


def turns(space: ParamSpace, cost: Callable[[Slot], float]) -> list[Turn]:
    """All matrices of a space, in order; the same on all replicas.

    Args:
        cost: of one matrix of a parameter, for the choice of owners.
    """
    ranges = [
        (slot, slot.offset + index * slot.padded_matrix, slot.offset + (index + 1) * slot.padded_matrix)
        for slot in space.slots
        for index in range(slot.num_matrices)
    ]
    limit = space.num_shards * max(_TURN_NUMEL, 2 * max(stop - start for _, start, stop in ranges))
    borders = [0]
    for index, (_, _, stop) in enumerate(ranges):
        if stop - ranges[borders[-1]][1] > limit:
            borders.append(index)
    runs = [ranges[first:last] for first, last in pairwise([*borders, len(ranges)])]
    return [Turn(space, _with_owners(run, space.num_shards, cost)) for run in runs]


def _with_owners(
    run: Sequence[tuple[Slot, int, int]], num_replicas: int, cost: Callable[[Slot], float]
) -> tuple[WholeMatrix, ...]:
    """The most costly matrix first, each to the replica with the least work so far."""
    work, owners = [0.0] * num_replicas, [0] * len(run)
    for index in sorted(range(len(run)), key=lambda index: -cost(run[index][0])):
        owners[index] = min(range(num_replicas), key=work.__getitem__)
        work[owners[index]] += cost(run[index][0])
    return tuple(WholeMatrix(*one, owner) for one, owner in zip(run, owners, strict=True))
