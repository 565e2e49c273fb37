"""How Megatron-LM lays out a model over tensor- and pipeline-parallel ranks, and parameters in its optimizer's buffers.

A rank's parameters have an order: that of megatron-core's modules. Its distributed optimizer keeps masters and moments
in flat buffers, the last parameter first, each starting at a multiple of 64 elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby

import torch
from torch import Tensor

from ..models.keys import LAYERS, OUTPUT_LAYER, key_and_layer
from ..models.registry import holds_matrices, matrix_axis, shared_axis
from .files import CheckpointError

#: Elements that a parameter's start in a buffer is a multiple of.
_ALIGNMENT = 64


@dataclass(frozen=True)
class Name:
    """A parameter of the whole model: its checkpoint key, and its layer if it is in one, of those that have the key."""

    key: str
    layer: int | None

    @classmethod
    def of(cls, name: str, first_layer: int) -> Name:
        """From a parameter's name on a rank whose first layer is `first_layer` of the model."""
        key, layer = key_and_layer(name)
        return cls(key, None if layer is None else layer + first_layer)

    def __str__(self) -> str:
        return self.key if self.layer is None else f"{self.key}, layer {self.layer}"


@dataclass(frozen=True)
class Piece:
    """A parameter of a rank: its part of one of the whole model, or of one matrix of it.

    Attributes:
        matrix: counted over the rank's; None: the parameter does not hold several.
    """

    name: Name
    matrix: int | None = None


class MatrixOrder(Enum):
    """How the matrices of a rank follow each other in a layer whose linear layers have several."""

    #: `SequentialMLP`: the first matrix of each linear layer, then the second ones.
    SEQUENTIAL = "sequential"
    #: `TEGroupedMLP`: all matrices of a linear layer, then those of the next.
    GROUPED = "grouped"
    #: `GroupedMLP`: as GROUPED, but those of a linear layer are one parameter, each transposed.
    JOINED = "joined"

    def pieces(self, names: Sequence[Name], num_matrices: int) -> Iterator[Piece]:
        """The parameters of these linear layers, in the order of the modules.

        Args:
            names: of the layer, in the order of the modules that have one matrix each.
        """
        if self is MatrixOrder.SEQUENTIAL:
            yield from (Piece(name, matrix) for matrix in range(num_matrices) for name in names)
            return
        # A buffer is filled from its end, one parameter from its beginning.
        matrices = range(num_matrices)[:: -1 if self is MatrixOrder.JOINED else 1]
        for _, group in groupby(names, lambda name: name.key.rpartition(".")[0]):
            own = [*group]
            yield from (Piece(name, matrix) for matrix in matrices for name in own)


def axis_of_ranks(key: str) -> int | None:
    """The axis of one layer's tensor, or of one of its matrices, that Megatron's ranks share; None: none."""
    return matrix_axis(key) if holds_matrices(key) else shared_axis(key)


def local_shape(key: str, shape: Sequence[int], tensor_size: int) -> tuple[int, ...]:
    """A rank's part of a parameter whose whole shape, without the axes of layers and matrices, is `shape`."""
    axis = axis_of_ranks(key)
    return tuple(size // tensor_size if index == axis else size for index, size in enumerate(shape))


def merged(key: str, parts: Sequence[Tensor], *, is_gated: bool) -> Tensor:
    """One parameter from the parts of all tensor-parallel ranks.

    Args:
        key: megatron-core's name, which says the axis that ranks share (`axis_of_ranks`).
        parts: by rank, of equal shapes; any dtype.
        is_gated: whether the MLP is. Each rank then has a part of either half of fc1.
    """
    axis = axis_of_ranks(key)
    if axis is None or len(parts) == 1:
        return parts[0]
    pieces = [part.chunk(2 if is_gated and "linear_fc1" in key else 1, axis) for part in parts]
    return torch.cat([piece for each in zip(*pieces, strict=True) for piece in each], axis)


def part_of(key: str, whole: Tensor, rank: int, size: int, *, is_gated: bool) -> Tensor:
    """The part of one of `size` tensor-parallel ranks, a view where the shape allows; undoes `merged`."""
    axis = axis_of_ranks(key)
    if axis is None or size == 1:
        return whole
    if is_gated and "linear_fc1" in key:
        halves = whole.view(2, size, -1, *whole.shape[1:])
        return halves[:, rank].flatten(0, 1)
    return whole.chunk(size, axis)[rank]


@dataclass(frozen=True)
class ChunkOrder:
    """The order of a rank's modules.

    Attributes:
        layer: one of `Architecture.layer_orders`.
        matrices: of a rank in a layer.
        num_matrices: that a rank has of each parameter that holds several.
    """

    layer: Sequence[str]
    matrices: MatrixOrder
    num_matrices: int

    def pieces(
        self, keys: Mapping[str, Sequence[int]], layers: range, *, is_first: bool, is_last: bool, ties: bool
    ) -> list[Piece]:
        """The parameters of one model chunk in the order of its modules.

        Args:
            keys: all keys of the model, each with the layers that have it.
            layers: of the chunk.
            is_first, is_last: whether the chunk has the embedding and the head.
            ties: the head is the embedding.
        """
        names = [Name(key, None) for key in keys if is_first and key.startswith("embedding.")]
        names.sort(key=lambda name: "position" in name.key)
        found = [Piece(name) for name in names]
        for layer in layers:
            own = [key for key in (LAYERS + end for end in self.layer) if layer in keys.get(key, ())]
            of_layer = [Name(key, keys[key].index(layer)) for key in own]
            for has_several, group in groupby(of_layer, lambda name: holds_matrices(name.key)):
                here = [*group]
                found += self.matrices.pieces(here, self.num_matrices) if has_several else map(Piece, here)
        if is_last:
            norm = sorted((key for key in keys if key.startswith("decoder.final_layernorm.")), reverse=True)
            found += [Piece(Name(key, None)) for key in norm]
            if not (ties and is_first):  # with `ties` it is the last stage's copy of the embedding
                found.append(Piece(Name(OUTPUT_LAYER, None)))
        return found


def places_in_buckets(numels: Sequence[int], bucket_numels: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(bucket, start in it) of each parameter of a buffer, in the order of the modules.

    Args:
        numels: elements of each parameter.
        bucket_numels: elements of each bucket without the padding behind its last parameter.

    Raises:
        CheckpointError: they do not fill the buckets.
    """
    places = []
    bucket = offset = 0
    for numel in reversed(numels):
        start = -(-offset // _ALIGNMENT) * _ALIGNMENT
        if bucket >= len(bucket_numels) or start + numel > bucket_numels[bucket]:
            raise CheckpointError(f"{numel} elements do not fit into bucket {bucket} of {list(bucket_numels)}")
        places.append((bucket, start))
        offset = start + numel
        if offset == bucket_numels[bucket]:
            bucket, offset = bucket + 1, 0
    if bucket != len(bucket_numels) or offset:
        raise CheckpointError(f"{sum(numels)} elements do not fill the buckets {list(bucket_numels)}")
    return reversed(places)


def places_in_buffer(numels: Sequence[int], num_elements: int) -> list[int]:
    """The start of each parameter, in the order of the modules, in buckets joined without what pads their ends.

    Raises:
        CheckpointError: parameters do not fill the buffer, or where they start depends on the buckets, which the file
            does not tell.
    """
    offset, starts = 0, []
    for numel in reversed(numels):
        start = -(-offset // _ALIGNMENT) * _ALIGNMENT
        starts.append(start)
        offset = start + numel
    if offset == num_elements:
        return starts[::-1]
    raise CheckpointError(f"{sum(numels)} elements do not fill a buffer of {num_elements} elements")


def is_rounded(master: Tensor, weight: Tensor) -> bool:
    """Whether a 16-bit weight is its master, rounded: each pair of a checkpoint's is."""
    return master.shape == weight.shape and torch.equal(
        master.to(weight.dtype).nan_to_num(), weight.detach().nan_to_num()
    )


def numels_of(shapes: Sequence[Sequence[int]]) -> list[int]:
    """Elements of each shape."""
    return [math.prod(shape) for shape in shapes]
