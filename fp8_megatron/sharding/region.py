"""Where a rank's part of a parameter lies in the whole tensor: the one map from a parameter's elements to rectangles.

Checkpoints, state dicts of shards, initial values and the random bits of stochastic rounding read it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

Shape = tuple[int, ...]


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
        axis: the axis that ranks share; None: the part is the whole parameter.
        pieces: equal pieces of the axis that are cut separately (2 for the gate and up matrices of SwiGLU).
        rank, size: of the ranks that share the parameter.
        axis_size: of the whole parameter, where the ranks' parts are not equal: all but the last ones are the largest.
        stacked: (index, count) of each axis that the whole tensor has in front of the parameter's: layers, experts.
    """

    shape: Shape
    axis: int | None = None
    pieces: int = 1
    rank: int = 0
    size: int = 1
    axis_size: int | None = None
    stacked: tuple[tuple[int, int], ...] = ()

    @property
    def whole_shape(self) -> Shape:
        """Of the whole parameter."""
        if self.axis is None:
            return self.shape
        axis_size = self.shape[self.axis] * self.size if self.axis_size is None else self.axis_size
        return (*self.shape[: self.axis], axis_size, *self.shape[self.axis + 1 :])

    @property
    def global_shape(self) -> Shape:
        """Of the whole tensor, stacked axes included."""
        return (*(count for _, count in self.stacked), *self.whole_shape)

    @property
    def is_even(self) -> bool:
        """Whether all ranks have equal parts."""
        return self.axis is None or self.whole_shape[self.axis] % (self.size * self.pieces) == 0

    def _share(self) -> int:
        """The largest part that a rank has of each piece of the axis."""
        assert self.axis is not None
        return -(-self.whole_shape[self.axis] // (self.pieces * self.size))

    @property
    def cut(self) -> Cut | None:
        """Where the elements lie, flat, in the whole parameter; None: the part is the whole."""
        if self.axis is None:
            return None
        inner = math.prod(self.shape[self.axis + 1 :])
        width = max(1, self._share() * inner)
        is_one_run = self.axis == 0 and self.pieces == 1
        stride = width if is_one_run else max(1, self.whole_shape[self.axis] // self.pieces * inner)
        return Cut(width, stride, self.rank * self._share() * inner)

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor of `whole_shape`."""
        if self.axis is None:
            return whole
        share, size = self._share(), whole.shape[self.axis] // self.pieces
        start = min(self.rank * share, size)
        length = min(share, size - start)
        parts = [whole.narrow(self.axis, piece * size + start, length) for piece in range(self.pieces)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.axis)

    def rectangles(self, start: int, length: int) -> Iterator[Rectangle]:
        """Rectangles of the elements [start, start + length) of the flattened part, without the padding after its end.

        At most a partial row, full rows (two runs if a piece of the axis ends between them) and a partial row. The
        parameter has one or two dimensions.
        """
        columns = math.prod(self.shape[1:])
        stop = min(start + length, math.prod(self.shape))
        rows = self.shape[0] // (self.pieces if self.axis == 0 else 1)
        while start < stop:
            row, column = divmod(start, columns)
            if column or stop - start < columns:
                num_rows, width = 1, min(columns - column, stop - start)
            else:
                num_rows, width = min((stop - start) // columns, rows - row % rows), columns
            yield self._rectangle(start, row, column, num_rows, width)
            start += num_rows * width

    def _rectangle(self, start: int, row: int, column: int, num_rows: int, width: int) -> Rectangle:
        if self.axis == 1:
            column += self.rank * self._share()
        elif self.axis == 0:
            share = self._share()
            piece, row = divmod(row, share)
            row += piece * (self.whole_shape[0] // self.pieces) + self.rank * share
        offset: Shape = (row, column)[: len(self.shape)]
        sizes: Shape = (num_rows, width)[: len(self.shape)]
        front = tuple(index for index, _ in self.stacked)
        return Rectangle(start, num_rows * width, (*front, *offset), (*(1 for _ in front), *sizes))
