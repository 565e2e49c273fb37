"""Where a rank's part of a parameter lies in the whole tensor: the one map from a parameter's elements to rectangles.

Checkpoints, state dicts of shards, initial values and the random bits of stochastic rounding read it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

Shape = tuple[int, ...]


def counts_matrices(param: torch.Tensor) -> bool:
    """Whether a layer has marked its parameter (``counts_matrices``): axis 0 counts matrices [M, N, K], or what goes
    with each of them [M, N]. Ranks may share it evenly."""
    return getattr(param, "counts_matrices", False)


@dataclass(frozen=True)
class Cut:
    """How a rank's part of a parameter lies in the whole parameter, both flat: runs of `width` elements.

    Element i of the part is element ``first + (i // width) · stride + i % width`` of the whole.

    Attributes:
        stride: elements from the start of one run to the start of the next.
    """

    width: int
    stride: int
    first: int


@dataclass(frozen=True)
class Rectangle:
    """A run of a rank's flat parameter that is a rectangle of the whole tensor.

    Attributes:
        start, numel: elements of the run in the rank's parameter.
        offset, sizes: the rectangle in the whole tensor, stacked axes included; its elements are in the run's order.
    """

    start: int
    numel: int
    offset: Shape
    sizes: Shape


@dataclass(frozen=True)
class Region:
    """A rank's part of one parameter.

    Attributes:
        shape: of the rank's part.
        axis: the axis that ranks share; None: the part has all of every axis.
        pieces: equal pieces of the axis that are cut separately (2 for the gate and up matrices of SwiGLU).
        rank, size: of the ranks that share the axis.
        axis_size: of the whole parameter, where the ranks' parts are not equal: all but the last ones are the largest.
        stacked: (index, count) of each axis that the whole tensor has in front of the parameter's, as that of layers.
        matrices: (rank, size) of the ranks that share the matrices evenly, axis 0 of a parameter [M, N, K] or [M, N].
            `axis` is then another one.
    """

    shape: Shape
    axis: int | None = None
    pieces: int = 1
    rank: int = 0
    size: int = 1
    axis_size: int | None = None
    stacked: tuple[tuple[int, int], ...] = ()
    matrices: tuple[int, int] = (0, 1)

    @property
    def whole_shape(self) -> Shape:
        """Of the whole parameter."""
        whole = list(self.shape)
        if self.axis is not None:
            whole[self.axis] = whole[self.axis] * self.size if self.axis_size is None else self.axis_size
        if whole:
            whole[0] *= self.matrices[1]
        return tuple(whole)

    @property
    def global_shape(self) -> Shape:
        """Of the whole tensor, stacked axes included."""
        return (*(count for _, count in self.stacked), *self.whole_shape)

    @property
    def is_even(self) -> bool:
        """Whether all ranks have equal parts."""
        return self.axis is None or self.whole_shape[self.axis] % (self.size * self.pieces) == 0

    @property
    def is_first(self) -> bool:
        """Whether no rank before this one has a part of the parameter."""
        return self.rank == 0 and self.matrices[0] == 0

    def of_matrix(self) -> Region:
        """Where the part of one matrix of a parameter [M, N, K] lies in the whole matrix."""
        axis = None if self.axis is None else self.axis - 1
        return Region(self.shape[1:], axis, self.pieces, self.rank, self.size, self.axis_size)

    @property
    def axis_numel(self) -> int:
        """Elements of the shared axis of the whole parameter."""
        assert self.axis is not None
        return self.whole_shape[self.axis]

    @property
    def part_sizes(self) -> list[int]:
        """Elements of the shared axis that each rank has, of one piece."""
        assert self.pieces == 1
        share, size = self._share(), self.axis_numel
        return [max(0, min(share, size - rank * share)) for rank in range(self.size)]

    def _share(self) -> int:
        """The largest part that a rank has of each piece of the axis."""
        assert self.axis is not None
        return -(-self.whole_shape[self.axis] // (self.pieces * self.size))

    @property
    def cut(self) -> Cut | None:
        """Where the elements lie, flat, in the whole parameter; None: the part is the whole."""
        holder, holders = self.matrices
        if self.axis is None:
            numel = math.prod(self.shape)
            return None if holders == 1 else Cut(numel, numel, holder * numel)
        inner = math.prod(self.shape[self.axis + 1 :])
        width = max(1, self._share() * inner)
        is_one_run = self.axis == 0 and self.pieces == 1
        stride = width if is_one_run else max(1, self.whole_shape[self.axis] // self.pieces * inner)
        before = holder * math.prod(self.whole_shape) // holders
        return Cut(width, stride, before + self.rank * self._share() * inner)

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor of `whole_shape`."""
        holder, holders = self.matrices
        if holders > 1:
            whole = whole.chunk(holders)[holder]
        if self.axis is None:
            return whole
        share, size = self._share(), whole.shape[self.axis] // self.pieces
        start = min(self.rank * share, size)
        length = min(share, size - start)
        parts = [whole.narrow(self.axis, piece * size + start, length) for piece in range(self.pieces)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.axis)

    def rectangles(self, start: int, length: int) -> Iterator[Rectangle]:
        """Rectangles of the elements [start, start + length) of the flattened part, without the padding after its end.

        Each takes as many full rows, matrices or single elements as lie in one rectangle of the whole.
        """
        stop = min(start + length, math.prod(self.shape))
        while start < stop:
            found = self._rectangle(start, stop)
            yield found
            start += found.numel

    def _rectangle(self, start: int, stop: int) -> Rectangle:
        """The largest rectangle that begins at `start`, of a range that ends at `stop`."""
        first_dim = 0 if self.axis is None or self.pieces == 1 else self.axis  # what has pieces is no rectangle
        for dim in range(first_dim, len(self.shape)):
            inner = math.prod(self.shape[dim + 1 :])
            if start % inner == 0 and stop - start >= inner:
                break
        index = start // inner % self.shape[dim]
        run = self.shape[dim] // (self.pieces if dim == self.axis else 1)
        count = min((stop - start) // inner, run - index % run)
        offset: list[int] = []
        left = start
        for size in reversed(self.shape):
            left, place = divmod(left, size)
            offset.insert(0, place)
        if self.axis is not None:
            share = self._share()
            piece, place = divmod(offset[self.axis], share)
            offset[self.axis] = piece * (self.whole_shape[self.axis] // self.pieces) + self.rank * share + place
        offset[0] += self.matrices[0] * self.shape[0]
        sizes = (*(1 for _ in range(dim)), count, *self.shape[dim + 1 :])
        front = tuple(index for index, _ in self.stacked)
        return Rectangle(start, count * inner, (*front, *offset), (*(1 for _ in front), *sizes))
