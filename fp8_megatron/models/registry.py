"""Finds the architecture of a model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from ..config.model import ModelConfig
from ..errors import CheckpointError
from ..moe import architecture as moe
from . import decoder
from .architecture import Architecture, Stages
from .hugging_face_values import not_allowed, refuse, shown
from .keys import LAYERS, standard_key

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
def num_matrices(model: ModelConfig) -> int:
    """Matrices of a parameter that holds several (`Parameter.matrices`); 0 where none does."""
    return max(row.matrices or 0 for row in architecture_of(model).parameters(model, 0))


def holds_matrices(key: str) -> bool:
    """Whether the key's tensor in one layer has an axis of matrices, its first."""
    return any(key in each.matrix_axes for each in ARCHITECTURES)


def matrix_axis(key: str) -> int | None:
    """The axis of one matrix that ranks may share, for a key that holds several; None if each has the whole."""
    return next(each.matrix_axes[key] for each in ARCHITECTURES if key in each.matrix_axes)


def key_of_stored(name: str) -> str:
    """The key of what megatron-core saves under a name, layers stacked."""
    return next((each.stored_keys[name] for each in ARCHITECTURES if name in each.stored_keys), standard_key(name))


def stored_names(model: ModelConfig, key: str, layer: int) -> list[str]:
    """What megatron-core's own layers save a weight under.

    Args:
        layer: of those that have the key. Its number in the model is in the name if layers differ: then megatron-core
            saves them one by one.
    """
    number, architecture = layers_of_key(model, key)[layer], architecture_of(model)
    names = architecture.stored_names(model, key, number)
    return [name.replace(LAYERS, f"{LAYERS}{number}.", 1) if has_unlike_layers(model) else name for name in names]


@cache
def has_unlike_layers(model: ModelConfig) -> bool:
    """Whether layers have different parameters."""
    rows = [row for row in architecture_of(model).parameters(model, 0) if row.stages is Stages.LAYERS]
    return any(0 < len(row.layers_of(range(model.num_layers))) < model.num_layers for row in rows)


@cache
def layers_of_key(model: ModelConfig, key: str) -> tuple[int, ...]:
    """The layers that have a key of a layer, in the order in which checkpoints stack them."""
    layers, rows = range(model.num_layers), architecture_of(model).parameters(model, 0)
    return next((tuple(row.layers_of(layers)) for row in rows if row.key == key), tuple(layers))


def hugging_face_of_json(settings: Mapping[str, Any]) -> HuggingFace:
    """The names of the architecture that a ``config.json`` of Hugging Face describes.

    Raises:
        CheckpointError: no architecture reads its ``model_type``, or it has a setting of another one's models.
    """
    kind, all_names = settings.get("model_type"), [each.hugging_face() for each in ARCHITECTURES]
    found = next((names for names in all_names if kind in [*names.families]), None)
    if found is None:
        readable = ", ".join(sorted(kind for names in all_names for kind in names.families))
        raise CheckpointError(f"config.json: model_type {shown(kind)} is not supported; convertible ones: {readable}")
    refuse([line for names in all_names if names is not found for line in not_allowed(settings, names.reserved)])
    return found
