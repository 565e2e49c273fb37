"""The settings of a decoder that change what weights of the same shapes compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ...config.model import ACTIVATIONS, ROTARY_KINDS, SETTINGS_WITHOUT_YARN, YARN_SETTINGS, ModelConfig

#: Settings that choose GELU's form, beside --disable-bias-linear.
_FORM_OF_GELU = ("bias_gelu_fusion", "use_te_activation_func")
#: Settings of muP, which is compared by what it multiplies.
_MUP = (
    "use_mup",
    "mup_base_hidden_size",
    "mup_embedding_mult",
    "mup_output_mult",
    "mup_base_head_dim",
    "mup_attn_scale_power",
)
#: As `Architecture.sizes`.
sizes = ("num_layers", "hidden_size")
#: As `Architecture.arguments_without_setting`.
arguments_without_setting: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "apply_residual_connection_post_layernorm": (None, False),
        "attention_output_gate": (None, False),
        "enable_mhc_connections": (None, False),
        "experimental_attention_variant": (None,),
        "heterogeneous_layers_config_encoded_json": (None,),
        "heterogeneous_layers_config_path": (None,),
        "is_hybrid_model": (None, False),
        "mtp_num_layers": (None, 0),
        "multi_latent_attention": (None, False),
        "no_rope_freq": (None,),
        "qk_l2_norm": (None, False),
    }
)
#: As `Architecture.computed_settings`. Given the shapes, the number of heads fixes the other widths of attention.
computed_settings = (
    "num_attention_heads",
    "normalization",
    "norm_epsilon",
    *ACTIVATIONS,
    *_FORM_OF_GELU,
    "activation_func_clamp_value",
    "glu_linear_offset",
    "position_embedding_type",
    "rotary_percent",
    "rotary_base",
    "rotary_interleaved",
    "rotary_seq_len_interpolation_factor",
    "use_rope_scaling",
    "rope_scaling_factor",
    *YARN_SETTINGS,
    "window_size",
    "window_attn_skip_freq",
    "softmax_type",
    *_MUP,
)
#: Base and scaling of RoPE, which a longer context may change.
_SCALES = (
    "rotary_base",
    "rotary_seq_len_interpolation_factor",
    "use_rope_scaling",
    "rope_scaling_factor",
    *YARN_SETTINGS,
)


def single_layer(model: ModelConfig, layer: int) -> ModelConfig:
    """As `Architecture.single_layer`."""
    window = None if model.windows[layer] is None else model.window_size
    return replace(model, num_layers=1, window_size=window, window_attn_skip_freq=None)


def changed_setting(saved: Mapping[str, Any], model: ModelConfig, *, finetune: bool = False) -> str | None:
    """As `Architecture.changed_setting`."""
    passed = {*_unread(model), *(_SCALES if finetune else ())}
    if finetune and model.uses_rope and saved.get("position_embedding_type") in ROTARY_KINDS:
        passed.add("position_embedding_type")
    for name in computed_settings:
        if name not in saved or name in passed:
            continue
        if saved[name] != getattr(model, name) and not _is_same(saved, model, name):
            return name
    return None


def _unread(model: ModelConfig) -> tuple[str, ...]:
    """The settings of `computed_settings` that the model does not read."""
    if not model.uses_rope:
        return ("rotary_base", *SETTINGS_WITHOUT_YARN, *YARN_SETTINGS)
    if model.position_embedding_type == "yarn":
        return SETTINGS_WITHOUT_YARN
    return YARN_SETTINGS if model.use_rope_scaling else (*YARN_SETTINGS, "rope_scaling_factor")


def _is_same(saved: Mapping[str, Any], model: ModelConfig, name: str) -> bool:
    """Whether two spellings of a setting mean the same: windows, forms of GELU and muP have several."""
    if name in _FORM_OF_GELU:
        named = {each: saved[each] for each in (*_FORM_OF_GELU, "disable_bias_linear") if each in saved}
        return replace(model, **named).activation == model.activation
    if name in _MUP:
        scaled = replace(model, **{each: saved[each] for each in _MUP if each in saved})
        return _multipliers(scaled) == _multipliers(model)
    if not name.startswith("window_"):
        return False
    theirs = {each: saved[each] for each in ("window_size", "window_attn_skip_freq") if each in saved}
    try:
        return replace(model, **theirs).windows == model.windows
    except (ValueError, IndexError, ZeroDivisionError):  # not the text of a window
        return False


def _multipliers(model: ModelConfig) -> tuple[float, ...]:
    """Of initial weights and learning rates, scores, embedding and logits."""
    return model.width_mult, model.softmax_scale, model.embedding_mult, model.output_mult
