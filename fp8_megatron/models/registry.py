"""Finds the architecture of a model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from ..config.model import ModelConfig
from ..errors import CheckpointError
from ..moe import architecture as moe
from . import decoder
from .architecture import Architecture
from .hugging_face_values import shown

if TYPE_CHECKING:
    from .hugging_face import HuggingFace

#: The first that describes a model is its own.
ARCHITECTURES: tuple[Architecture, ...] = (moe, decoder)


def architecture_of(model: ModelConfig) -> Architecture:
    """The architecture of a model."""
    return next(each for each in ARCHITECTURES if each.describes(model))


def shared_axis(key: str) -> int | None:
    """The axis of one layer's tensor that tensor-parallel ranks share; None if each has the whole."""
    return next((each.shared_axes[key] for each in ARCHITECTURES if key in each.shared_axes), None)


def is_linear_weight(key: str) -> bool:
    """Whether it is the key of layers' linear weights, which may be in FP8."""
    return any(key in each.linear_weights for each in ARCHITECTURES)


def weight_shapes(model: ModelConfig, padded_vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Whole shapes of every weight by key, layers stacked, in the order of the forward pass."""
    rows = architecture_of(model).parameters(model, padded_vocab_size)
    return {row.key: row.whole_shape(model.num_layers) for row in rows}


@cache
def layers_of_key(model: ModelConfig, key: str) -> tuple[int, ...]:
    """The layers that have a key of a layer, in the order in which checkpoints stack them."""
    layers, rows = range(model.num_layers), architecture_of(model).parameters(model, 0)
    return next((tuple(row.layers_of(layers)) for row in rows if row.key == key), tuple(layers))


def hugging_face_of_json(settings: Mapping[str, Any]) -> HuggingFace:
    """The names of the architecture that a ``config.json`` of Hugging Face describes.

    Raises:
        CheckpointError: no architecture reads its ``model_type``.
    """
    kind, all_names = settings.get("model_type"), [each.hugging_face() for each in ARCHITECTURES]
    found = next((names for names in all_names if kind in [*names.families]), None)
    if found is None:
        readable = ", ".join(sorted(kind for names in all_names for kind in names.families))
        raise CheckpointError(f"config.json: model_type {shown(kind)} is not supported; convertible ones: {readable}")
    return found
