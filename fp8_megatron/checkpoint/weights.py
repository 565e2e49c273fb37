"""A model's weights by their standard keys (`models.keys`), read one layer at a time.

`TorchDistWeights` reads them from a ``torch_dist`` folder, this project's or megatron-core's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..models.keys import LAYERS, VOCABULARY_KEYS, key_and_layer
from ..models.registry import holds_matrices, key_of_stored
from .files import CheckpointError
from .torch_dist import TorchDistReader

#: What begins the key of a tensor that is no weight: an optimizer's state, of several optimizers by number.
_OPTIMIZER = ("optimizer.", "chained_")
#: Transformer Engine's FP8 state. In most checkpoints it is an object, not a tensor.
_EXTRA_STATE = "_extra_state"


class WeightReader(Protocol):
    """A checkpoint whose weights can be read one at a time."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Whole shapes by standard key, layers stacked."""
        ...

    def read(self, key: str, layer: int | None, matrix: int | None = None) -> Tensor:
        """One weight in FP32: of a layer for a key of the decoder's layers, else the whole tensor (`layer` None).

        Args:
            layer: counted over the layers that have the key.
            matrix: one of the layer's, for a key that holds several; None: all of them.
        """
        ...


class Place(NamedTuple):
    """What `WeightReader.read` takes."""

    key: str
    layer: int | None = None
    matrix: int | None = None


class MatricesOfLayer:
    """Reads one matrix after the other where files hold those of a layer together.

    Args:
        read: a weight of a layer, which is read once and kept until another's is read.
    """

    def __init__(self, read: Callable[[str, int | None], Tensor]) -> None:
        self._read = read
        self._last: tuple[str, int | None] | None = None
        self._weight = torch.empty(0)

    def read(self, key: str, layer: int | None, matrix: int | None = None) -> Tensor:
        """As `WeightReader.read`."""
        if matrix is None:
            return self._read(key, layer)
        if self._last != (key, layer):
            self._weight = torch.empty(0)  # frees the last before the next is read
            self._last, self._weight = (key, layer), self._read(key, layer)
        return self._weight[matrix]


def places(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Place]:
    """Every weight in the order of the forward pass: a layer's weights are consecutive. Each of
    several matrices is one."""
    stacked = [key for key in shapes if key.startswith(LAYERS)]
    for key in shapes:
        if key not in stacked:
            yield Place(key)
        elif key == stacked[0]:
            most = max(shapes[each][0] for each in stacked)
            yield from (
                Place(each, layer, matrix)
                for layer in range(most)
                for each in stacked
                if layer < shapes[each][0]
                for matrix in (range(shapes[each][1]) if holds_matrices(each) else (None,))
            )


def check_shapes(found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], source: str) -> None:
    """Raise `CheckpointError` naming the first weight that is missing, unknown, or of another shape than the model's.

    The vocabulary may be padded differently.
    """
    for key, shape in expected.items():
        if key not in found:
            raise CheckpointError(f"{source} has no {key!r}, which this model has; check the configuration")
        same = found[key][1:] == shape[1:] if key in VOCABULARY_KEYS else found[key] == shape
        if not same:
            raise CheckpointError(
                f"{source}: {key} has shape {found[key]}, this model's is {shape}; check the configuration"
            )
    extra = next((key for key in found if key not in expected), None)
    if extra is not None:
        raise CheckpointError(f"{source} holds {extra!r}, which this model has not; check the configuration")


def is_finite(weight: Tensor) -> bool:
    """Whether it holds neither inf nor NaN. Minimum and maximum tell in a tenth of the time of `torch.isfinite`."""
    return all(bool(extreme.isfinite()) for extreme in torch.aminmax(weight))


def with_vocab_rows(weight: Tensor, vocab_size: int, num_rows: int) -> Tensor:
    """An embedding [≥ vocab_size, hidden] with `num_rows` ≥ vocab_size rows: its vocabulary and new padding.

    Padding rows are the mean of the vocabulary's, so their logit is the mean of the others at every position. By
    Jensen's inequality, padding then takes no more of the softmax than its share of the rows. Rows of zeros can take
    nearly all of it, because the logits of many published models are far below zero.
    """
    weight = weight[:vocab_size]
    if num_rows == vocab_size:
        return weight
    padding = weight.float().mean(0, keepdim=True).to(weight.dtype).expand(num_rows - vocab_size, -1)
    return torch.cat([weight, padding])


class Repadded:
    """A reader whose vocabulary is padded to another number of rows.

    Args:
        vocab_size: rows of the vocabulary itself.
        num_rows: rows after padding.
    """

    def __init__(self, reader: WeightReader, vocab_size: int, num_rows: int) -> None:
        self._reader, self._vocab_size, self._num_rows = reader, vocab_size, num_rows
        self.shapes = {
            key: (num_rows, *shape[1:]) if key in VOCABULARY_KEYS else shape for key, shape in reader.shapes.items()
        }

    def read(self, key: str, layer: int | None, matrix: int | None = None) -> Tensor:
        """As `WeightReader.read`."""
        weight = self._reader.read(key, layer, matrix)
        return with_vocab_rows(weight, self._vocab_size, self._num_rows) if key in VOCABULARY_KEYS else weight


class TorchDistWeights:
    """Reads weights under standard keys, in FP32. Every tensor counts as one but the optimizer's state.

    Also finds norms under their modules' names (specs without `sharded_state_dict_keys_map`), and layers one by one
    under their numbers, as megatron-core saves a model whose layers differ.

    Args:
        folder: with ``.metadata``.
        reader: of that folder, if there is one already.

    Attributes:
        shapes: of the weights by standard key, layers stacked.

    Raises:
        CheckpointError: there is no description of tensors, or the decoder's layers are missing or differ in shape.
    """

    def __init__(self, folder: Path, reader: TorchDistReader | None = None) -> None:
        self._reader = TorchDistReader(folder) if reader is None else reader
        self._matrices = MatricesOfLayer(lambda key, layer: self._reader.read_layer(*self.stored_place(key, layer)))
        found = self._reader.shapes
        self._stored: dict[str, dict[int | None, str]] = {}
        for stored in found:
            if not stored.startswith(_OPTIMIZER) and _EXTRA_STATE not in stored:
                key, layer = key_and_layer(stored)
                self._stored.setdefault(key_of_stored(key), {})[layer] = stored
        self.shapes: Mapping[str, tuple[int, ...]] = {
            key: found[rows[None]]
            if None in rows
            else _stacked(folder, [found[stored] for stored in rows.values()], key)
            for key, rows in self._stored.items()
        }
        if not any(key.startswith(LAYERS) for key in self.shapes):
            raise CheckpointError(f"{folder} has no {LAYERS}*: it is not the checkpoint of a GPT")
        flat = next((key for key, shape in self.shapes.items() if key.startswith(LAYERS) and not shape), None)
        if flat is not None:
            raise CheckpointError(f"{folder} is damaged: {flat} is a single number, not stacked layers; copy it again")

    def stored_place(self, key: str, layer: int | None) -> tuple[str, int | None]:
        """The key under which a weight was saved, and its row there; None if the tensor is that weight alone."""
        rows = self._stored[key]
        if None in rows:
            return rows[None], layer
        assert layer is not None, key
        return rows[sorted(each for each in rows if each is not None)[layer]], None

    def read(self, key: str, layer: int | None, matrix: int | None = None) -> Tensor:
        """As `weights.WeightReader.read`."""
        return self._matrices.read(key, layer, matrix)


def _stacked(folder: Path, shapes: Sequence[tuple[int, ...]], key: str) -> tuple[int, ...]:
    """The shape of a tensor that stacks layers of these shapes."""
    if len(set(shapes)) > 1:
        raise CheckpointError(f"{folder}: layers of {key} have shapes {' and '.join(map(str, dict.fromkeys(shapes)))}")
    return (len(shapes), *shapes[0])
