"""A decoder with experts in some layers. The names below are what `models.architecture.Architecture` asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...config.model import ModelConfig
from ...models.decoder.costs import attention_flops, table_bytes
from .checks import problems
from .computed import arguments_without_setting, changed_setting, computed_settings, single_layer, sizes
from .costs import backward_bytes, forward_beside, forward_bytes, kept_bytes, recomputed_bytes
from .layouts import assumptions, cuts_mlps, layout_sizes, mlp_modules, other_matrices, why_no_rates
from .table import (
    layer_orders,
    layer_shape,
    linear_weights,
    matrices_name,
    matrix_axes,
    parameters,
    shared_axes,
    stored_keys,
    stored_names,
)

if TYPE_CHECKING:
    from ...models.hugging_face import HuggingFace


def hugging_face() -> HuggingFace:
    """As `Architecture.hugging_face`."""
    from . import hugging_face_config  # imports torch

    return hugging_face_config


def describes(model: ModelConfig) -> bool:
    """Every model with experts."""
    return model.num_experts is not None
