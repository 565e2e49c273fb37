"""Where a rank's parameters lie in the whole model: megatron-core's checkpoint keys, global shapes and offsets.

megatron-core stacks the layers of a model along a new first axis: ``decoder.layers.mlp.linear_fc2.weight`` is
[layers, hidden, ffn]. It names a layer's norm as if it were fused into the linear layer behind it. So its plain layers
and Transformer Engine's read each other's checkpoints. This project's layers do the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..models.keys import VOCABULARY_KEYS, key_and_layer

Shape = tuple[int, ...]
Sharding = tuple[int, int] | None


@dataclass(frozen=True)
class Rectangle:
    """A run of a rank's flat parameter that is a rectangle of the whole tensor.

    Attributes:
        start, numel: elements of the run in the rank's parameter.
        offset, sizes: the rectangle in the whole tensor, layer axis included; its elements are in the run's order.
    """

    start: int
    numel: int
    offset: Shape
    sizes: Shape


@dataclass(frozen=True)
class Placement:
    """A rank's part of one parameter in the tensor that a checkpoint holds under `key`.

    Args:
        local_shape: the rank's part, one- or two-dimensional.
        layer: (index, number of layers), None outside the layers.
        sharding: (axis, stride) of the tensor-parallel cut; stride 2 cuts each half of the axis (SwiGLU).
        rank, size: of the tensor-parallel group.
    """

    key: str
    local_shape: Shape
    layer: tuple[int, int] | None
    sharding: Sharding
    rank: int
    size: int

    @property
    def global_shape(self) -> Shape:
        """Shape of the whole tensor, layer axis included."""
        shape = list(self.local_shape)
        if self.sharding is not None:
            shape[self.sharding[0]] *= self.size
        return (*([] if self.layer is None else [self.layer[1]]), *shape)

    @property
    def has_vocabulary_rows(self) -> bool:
        """Whether the first axis is the padded vocabulary."""
        return self.key in VOCABULARY_KEYS

    def rectangles(self, start: int, length: int) -> Iterator[Rectangle]:
        """Rectangles of the elements [start, start + length) of the flattened local parameter, without the padding
        after its end.

        At most a partial row, full rows (two runs if a half of the axis ends between them) and a partial row.
        """
        columns = math.prod(self.local_shape[1:])
        stop = min(start + length, math.prod(self.local_shape))
        cut = self.local_shape[0]
        if self.sharding is not None and self.sharding[0] == 0:
            cut //= self.sharding[1]
        while start < stop:
            row, column = divmod(start, columns)
            if column or stop - start < columns:
                num_rows, width = 1, min(columns - column, stop - start)
            else:
                num_rows, width = min((stop - start) // columns, cut - row % cut), columns
            yield self._rectangle(start, row, column, num_rows, width)
            start += num_rows * width

    def _rectangle(self, start: int, row: int, column: int, num_rows: int, width: int) -> Rectangle:
        if self.sharding is not None:
            axis, stride = self.sharding
            if axis == 1:
                column += self.rank * self.local_shape[1]
            else:
                part = self.local_shape[0] // stride
                half, row = divmod(row, part)
                row += half * part * self.size + self.rank * part
        offset: Shape = (row, column)[: len(self.local_shape)]
        sizes: Shape = (num_rows, width)[: len(self.local_shape)]
        if self.layer is not None:
            offset, sizes = (self.layer[0], *offset), (1, *sizes)
        return Rectangle(start, num_rows * width, offset, sizes)


def placement_of(
    name: str, param: torch.nn.Parameter, *, num_layers: int, tensor_rank: int, tensor_size: int
) -> Placement:
    """Where a rank's parameter lies.

    Args:
        name: in the whole model (`mcore.initialization.named_parameters_of_model`).
    """
    key, index = key_and_layer(name)
    layer = None if index is None else (index, num_layers)
    sharding = None
    if getattr(param, "tensor_model_parallel", False):
        sharding = (param.partition_dim, param.partition_stride)  # type: ignore[attr-defined]
    return Placement(key, tuple(param.shape), layer, sharding, tensor_rank, tensor_size)
