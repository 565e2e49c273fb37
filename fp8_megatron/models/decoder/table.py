"""The parameters of a decoder under their keys in checkpoints (`models.keys`), and the widths of a layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from ...config.model import ModelConfig
from ..architecture import LayerShape, Parameter, Stages
from ..keys import (
    ATTENTION_NORM,
    LAYERS,
    MLP_NORM,
    OUTPUT_LAYER,
    POSITION_EMBEDDING,
    VOCABULARY_KEYS,
    WORD_EMBEDDING,
)

FINAL_NORM = "decoder.final_layernorm."
QKV = LAYERS + "self_attention.linear_qkv."
PROJECTION = LAYERS + "self_attention.linear_proj."
_SINKS = ("softmax_offset",)
SINKS = LAYERS + "self_attention.core_attention.softmax_offset"
QUERY_NORM = LAYERS + "self_attention.q_layernorm."
KEY_NORM = LAYERS + "self_attention.k_layernorm."
FC1 = LAYERS + "mlp.linear_fc1."
FC2 = LAYERS + "mlp.linear_fc2."

#: Linear layers of a decoder layer: the ones in FP8.
linear_weights = tuple(prefix + "weight" for prefix in (QKV, PROJECTION, FC1, FC2))
#: The axis that tensor-parallel ranks share: the rows of column-parallel layers with their biases, the columns of
#: row-parallel layers.
shared_axes: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys((*VOCABULARY_KEYS, QKV + "weight", QKV + "bias", SINKS, FC1 + "weight", FC1 + "bias"), 0),
        **dict.fromkeys((PROJECTION + "weight", FC2 + "weight"), 1),
    }
)
#: A dense layer has one matrix a weight, and megatron-core's names are the keys.
matrix_axes: Mapping[str, int | None] = MappingProxyType({})
matrices_name = None
stored_keys: Mapping[str, str] = MappingProxyType({})
_NORM = ("layer_norm_weight", "layer_norm_bias")
_WEIGHTS = ("weight", "bias")
_HEAD_NORMS = (("self_attention.q_layernorm", _WEIGHTS), ("self_attention.k_layernorm", _WEIGHTS))
#: As `Architecture.layer_orders`: with Transformer Engine's layers, whose norms are part of the linear layer behind
#: them, and with megatron-core's own.
layer_orders = tuple(
    tuple(f"{module}.{name}" for module, names in modules for name in names)
    for modules in (
        (
            ("self_attention.core_attention", _SINKS),
            ("self_attention.linear_proj", _WEIGHTS),
            ("self_attention.linear_qkv", _NORM + _WEIGHTS),
            *_HEAD_NORMS,
            ("mlp.linear_fc1", _NORM + _WEIGHTS),
            ("mlp.linear_fc2", _WEIGHTS),
        ),
        (
            ("self_attention.linear_qkv", _NORM),
            ("self_attention.core_attention", _SINKS),
            ("self_attention.linear_proj", _WEIGHTS),
            ("self_attention.linear_qkv", _WEIGHTS),
            *_HEAD_NORMS,
            ("mlp.linear_fc1", _NORM + _WEIGHTS),
            ("mlp.linear_fc2", _WEIGHTS),
        ),
    )
)


def parameters(model: ModelConfig, padded_vocab_size: int) -> list[Parameter]:
    """As `Architecture.parameters`."""
    mlp = [
        *linear_rows(model, FC1, model.mlp_columns, model.hidden_size),
        *linear_rows(model, FC2, model.hidden_size, model.padded_ffn_hidden_size),
    ]
    return around_mlp(model, padded_vocab_size, mlp)


def around_mlp(model: ModelConfig, padded_vocab_size: int, mlp: Sequence[Parameter]) -> list[Parameter]:
    """The table of a decoder whose layers have `mlp` behind attention and its norm."""
    hidden, vocabulary = model.hidden_size, (padded_vocab_size, model.hidden_size)
    ties = not model.untie_embeddings_and_output_weights
    rows = [Parameter(WORD_EMBEDDING, vocabulary, Stages.FIRST, 0, is_tied=ties)]
    if model.position_embedding_type == "learned_absolute":
        positions = model.num_positions
        rows.append(Parameter(POSITION_EMBEDDING, (positions, hidden), Stages.FIRST))
    rows += _norm(model, ATTENTION_NORM, hidden)
    rows += linear_rows(model, QKV, model.query_width + 2 * model.key_width, hidden)
    if model.qk_layernorm:
        rows += [row for key in (QUERY_NORM, KEY_NORM) for row in _norm(model, key, model.head_dim)]
    if model.softmax_type == "learnable":
        rows.append(Parameter(SINKS, (model.num_attention_heads,), axis=0))
    rows += linear_rows(model, PROJECTION, hidden, model.query_width)
    rows += _norm(model, MLP_NORM, hidden)
    rows += mlp
    rows += _norm(model, FINAL_NORM, hidden, Stages.LAST)
    if not ties:
        rows.append(Parameter(OUTPUT_LAYER, vocabulary, Stages.LAST, 0))
    return rows


def stored_names(model: ModelConfig, key: str, layer: int) -> tuple[str, ...]:
    """As `Architecture.stored_names`."""
    return (key,)


def layer_shape(model: ModelConfig) -> LayerShape:
    """As `Architecture.layer_shape`."""
    return LayerShape(
        stream=model.hidden_size,
        head=model.head_dim,
        queries=model.query_width,
        keys=model.key_width,
        mlp=model.padded_ffn_hidden_size,
        mlp_input=model.mlp_columns,
        activation=model.activation,
        has_windows=model.window_size is not None,
    )


def _norm(model: ModelConfig, key: str, width: int, stages: Stages = Stages.LAYERS) -> list[Parameter]:
    parts = ("weight", "bias") if model.normalization == "LayerNorm" else ("weight",)
    return [Parameter(key + part, (width,), stages) for part in parts]


def linear_rows(
    model: ModelConfig, key: str, num_outputs: int, num_inputs: int, axes: Mapping[str, int] = shared_axes
) -> list[Parameter]:
    """Weight and, if the model has biases, bias of a linear layer.

    Args:
        axes: as `Architecture.shared_axes`.
    """
    pieces = 2 if key.endswith("linear_fc1.") and model.is_gated else 1
    weight = key + "weight"
    rows = [
        Parameter(weight, (num_outputs, num_inputs), axis=axes[weight], pieces=pieces, is_linear=True),
        Parameter(key + "bias", (num_outputs,), axis=axes.get(key + "bias"), pieces=pieces),
    ]
    has_bias = not model.disable_bias_linear or (key == QKV and model.add_qkv_bias)
    return rows if has_bias else rows[:1]
