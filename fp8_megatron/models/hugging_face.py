"""What conversions ask of an architecture's names in Hugging Face's transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ..config.model import ModelConfig
from ..errors import CheckpointError
from .hugging_face_values import Allowed, Json
from .keys import LAYERS
from .registry import holds_matrices, layers_of_key, num_matrices


@dataclass(frozen=True)
class Family:
    """An architecture of transformers.

    Attributes:
        model_type: in its ``config.json``.
        layers: what begins the names of tensors in its layers.
        prefix: what begins all names, where published folders leave it out; else nothing.
        has_linear_modules: its linear layers are torch's, which readers of FP8 layouts take.
    """

    model_type: str
    layers: str = "model.layers."
    prefix: str = ""
    has_linear_modules: bool = True


@dataclass(frozen=True)
class Rule:
    """One weight of ours, and the tensors of theirs that it is made of. Of several matrices it is one.

    Attributes:
        key: standard key (`models.keys`).
        names: their names; the first ``{}`` stands for the layer, the second for the matrix.
        join: their tensors → ours. Values do not change; any dtype is kept.
        split: ours → theirs, in the order of `names`; views if possible.
        refuses: `join` may refuse values, with a `CheckpointError`.
        has_all_matrices: each of their tensors holds all matrices of a layer, along its first axis.
        otherwise: the form in which other versions of transformers have it.
    """

    key: str
    names: tuple[str, ...]
    join: Callable[[Sequence[Tensor]], Tensor] = lambda tensors: tensors[0]
    split: Callable[[Tensor], tuple[Tensor, ...]] = lambda tensor: (tensor,)
    refuses: bool = field(default=False, kw_only=True)
    has_all_matrices: bool = field(default=False, kw_only=True)
    otherwise: Rule | None = field(default=None, kw_only=True)

    def names_of(self, layer: int | None, matrix: int | None = None) -> tuple[str, ...]:
        """Names of theirs in one layer, of one matrix."""
        return tuple(name.format(layer, matrix) for name in self.names)

    def split_shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The shapes that `split` gives, from the shape of ours. Needs no data."""
        return tuple(tuple(part.shape) for part in self.split(torch.empty(shape, device="meta")))

    def stored(self, weight: Tensor) -> tuple[Tensor, ...]:
        """Their tensors of ours: of one matrix, or of [M, …] if they have all of a layer."""
        if not self.has_all_matrices:
            return self.split(weight)
        return tuple(torch.stack(parts) for parts in zip(*map(self.split, weight), strict=True))

    def stored_shapes(self, shape: tuple[int, ...], model: ModelConfig) -> tuple[tuple[int, ...], ...]:
        """The shapes of their tensors, from that of `split_shapes`."""
        front = (len(self.matrices(model)),) if self.has_all_matrices else ()
        return tuple((*front, *each) for each in self.split_shapes(shape))

    def stored_matrices(self, model: ModelConfig) -> Sequence[int | None]:
        """The matrices that have tensors of their own, or [None]."""
        return [None] if self.has_all_matrices else self.matrices(model)

    def layers(self, model: ModelConfig) -> Sequence[int | None]:
        """The layers that have the weight, or [None] for a weight outside the layers."""
        return layers_of_key(model, self.key) if self.key.startswith(LAYERS) else [None]

    def matrices(self, model: ModelConfig) -> Sequence[int | None]:
        """The matrices of the weight in one layer, or [None] for a weight that is one."""
        return range(num_matrices(model)) if holds_matrices(self.key) else [None]


def first_without(against: Mapping[Family, Sequence[str]]) -> Family:
    """The first architecture that nothing stands against.

    Raises:
        CheckpointError: there is none. The message says what stands against each.
    """
    for family, reasons in against.items():
        if not reasons:
            return family
    raise CheckpointError(
        "no Hugging Face architecture computes what this model does. "
        + "; ".join(f"Against {family.model_type}: {', '.join(reasons)}" for family, reasons in against.items())
    )


class HuggingFace(Protocol):
    """An architecture's names in transformers: a module with these functions."""

    @property
    def families(self) -> Mapping[str, Family]:
        """The architectures of transformers that it reads and writes, by ``model_type``."""

    @property
    def reserved(self) -> Allowed:
        """Settings that only a ``config.json`` of its families may have with other values than these."""

    def model_from_json(self, settings: Json) -> ModelConfig:
        """The model that a ``config.json`` describes; `seq_length` is its longest context.

        Raises:
            CheckpointError: lists all settings that this project does not implement, one per line.
        """

    def token_ids_of_json(self, settings: Json) -> dict[str, Any]:
        """The ids of special tokens in a ``config.json``: a number, a list of them (``eos_token_id``) or None."""

    def family_of(self, model: ModelConfig) -> Family:
        """The architecture that computes the same as this model.

        Raises:
            CheckpointError: there is none. The message says what differs for each.
        """

    def json_from_model(self, model: ModelConfig, vocab_size: int, dtype: str) -> dict[str, Any]:
        """The ``config.json`` of a model whose `family_of` exists; `dtype` of the weights is torch's word."""

    def settings_of_layer(self, model: ModelConfig, layer: int) -> Mapping[str, Any]:
        """What a ``config.json`` of one layer says to make it the layer `layer` of this model, beside its windows."""

    def rules(self, model: ModelConfig, vocab_size: int, settings: Json | None = None) -> list[Rule]:
        """The rules of every weight, in the order of the forward pass.

        Args:
            vocab_size: rows without padding, which theirs keep.
            settings: of the ``config.json`` that is read; None: of the one that is written. Biases that theirs has and
                this model lacks are zero.
        """
