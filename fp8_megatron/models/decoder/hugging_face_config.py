"""``config.json`` of Hugging Face's GPT-2, Llama and its kin ↔ the model section of a configuration.

A setting that changes what a model computes and that this project does not implement is refused. The error names the
setting, its value and what to do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ...config.model import ModelConfig
from ..hugging_face import Family, Rule, first_without
from ..hugging_face_values import (
    MAX_ROWS,
    Allowed,
    Json,
    count,
    mapping,
    not_allowed,
    number,
    refuse,
    rope_contradictions,
    shown,
    truth,
    unequal_heads,
    without_aliases,
    wrong_types,
)
from .hugging_face_rope import rope_of, scaling_json, scaling_of, scaling_problems
from .hugging_face_rules import GPT2, GPT_OSS, LLAMA, MISTRAL, QWEN2, QWEN3, rules_of
from .hugging_face_windows import layer_type_problems, windows_json, windows_of_json

#: As `HuggingFace.reserved`: what is left is the decoder's.
reserved: Allowed = {}
#: As `HuggingFace.families`; a model is written as the first that computes the same.
families = {family.model_type: family for family in (GPT2, LLAMA, QWEN3, MISTRAL, QWEN2)}
#: Those that `model_from_json` reads: gpt-oss too, whose MLPs another architecture adds.
_READ = {**families, GPT_OSS.model_type: GPT_OSS}

#: Hugging Face's names of GELU: of its tanh form, and of the exact one. The first is written.
_TANH_GELUS = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
_EXACT_GELUS = ("gelu", "gelu_python")

_ALL: Allowed = {
    "is_causal": ((True,), "a token attends to none after it"),
    "per_layer_config": ((None, {}), "all layers have the same settings"),
    "transformers_weights": ((None,), "weights are read from model.safetensors, or from its shards"),
}
_LIKE_LLAMA: Allowed = {
    **_ALL,
    "hidden_act": (("silu", "swish"), "the gated MLP is SwiGLU"),
    "partial_rotary_factor": ((None, 1, 1.0), "transformers' Llama rotates whole heads"),
}
_LIKE_QWEN: Allowed = {
    "use_sliding_window": ((None, False), "attention sees the whole context"),
}

# Settings that change the computation: the supported values, and what other values would need.
_ONLY: dict[Family, Allowed] = {
    GPT2: {
        **_ALL,
        "activation_function": ((*_TANH_GELUS, *_EXACT_GELUS), "the MLP's activation is GELU"),
        "scale_attn_weights": ((True,), "attention logits are divided by √(head width)"),
        "scale_attn_by_inverse_layer_idx": ((False,), "attention logits are scaled alike in every layer"),
        "add_cross_attention": ((False,), "only decoders without an encoder are supported"),
    },
    LLAMA: {
        **_LIKE_LLAMA,
        "sliding_window": ((None, False), "attention sees the whole context"),
        "use_qk_norm": ((None, False), "queries and keys are not normalised"),
        "qk_layernorm": ((None, False), "queries and keys are not normalised"),
    },
    MISTRAL: _LIKE_LLAMA,
    QWEN2: {**_LIKE_LLAMA, **_LIKE_QWEN},
    QWEN3: {
        **_LIKE_LLAMA,
        **_LIKE_QWEN,
        "attention_bias": ((None, False), "a model with norms of query and key has no biases"),
    },
    GPT_OSS: {
        **_LIKE_LLAMA,
        "attention_bias": ((True,), "gpt-oss has biases everywhere"),
        "swiglu_alpha": ((1.702,), "the gate is GELU's sigmoid form"),
    },
}


def _same_as_llama(max_position_embeddings: int) -> tuple[tuple[str, str, Any], ...]:
    return (
        ("num_hidden_layers", "num_layers", None),
        ("hidden_size", "hidden_size", None),
        ("intermediate_size", "ffn_hidden_size", None),
        ("num_attention_heads", "num_attention_heads", None),
        ("max_position_embeddings", "max_position_embeddings", max_position_embeddings),
        ("vocab_size", "vocab_size", None),
        ("rms_norm_eps", "norm_epsilon", 1e-6),
        ("initializer_range", "init_method_std", 0.02),
        ("attention_dropout", "attention_dropout", 0.0),
    )


# (their name, our name, their default) of settings that differ only in name. None: there is no default.
_SAME: dict[Family, tuple[tuple[str, str, Any], ...]] = {
    GPT2: (
        ("n_layer", "num_layers", 12),
        ("n_embd", "hidden_size", 768),
        ("n_head", "num_attention_heads", 12),
        ("n_positions", "max_position_embeddings", 1024),
        ("vocab_size", "vocab_size", 50257),
        ("layer_norm_epsilon", "norm_epsilon", 1e-5),
        ("initializer_range", "init_method_std", 0.02),
        ("attn_pdrop", "attention_dropout", 0.1),
        ("resid_pdrop", "hidden_dropout", 0.1),
    ),
    LLAMA: _same_as_llama(2048),
    MISTRAL: _same_as_llama(131_072),
    QWEN2: _same_as_llama(32_768),
    QWEN3: _same_as_llama(32_768),
    GPT_OSS: _same_as_llama(131_072),
}


#: Checks of the settings that `_SAME` names, by our name.
_CHECKS = {
    "num_layers": count(),
    "hidden_size": count(),
    "ffn_hidden_size": count(),
    "num_attention_heads": count(),
    "max_position_embeddings": count(MAX_ROWS),
    "vocab_size": count(MAX_ROWS),
    "norm_epsilon": number(above=0, below=1),
    "init_method_std": number(least=0),
    "attention_dropout": number(least=0, below=1),
    "hidden_dropout": number(least=0, below=1),
}
_LLAMA_CHECKS = (
    ("num_key_value_heads", count(), True),
    ("head_dim", count(), True),
    ("attention_bias", truth, True),
    ("mlp_bias", truth, True),
    ("rope_theta", number(least=1), False),
    ("rope_parameters", mapping, True),
    ("rope_scaling", mapping, True),
    ("tie_word_embeddings", truth, False),
    ("quantization_config", mapping, True),
)
#: Checks of the other settings, and whether null stands for the default.
_OTHER_CHECKS = {
    GPT2: (
        ("n_inner", count(), True),
        ("embd_pdrop", number(least=0, below=1), False),
        ("tie_word_embeddings", truth, False),
        ("quantization_config", mapping, True),
    ),
    **dict.fromkeys((LLAMA, QWEN2, QWEN3), _LLAMA_CHECKS),
    MISTRAL: (*_LLAMA_CHECKS, ("sliding_window", count(), True)),
    GPT_OSS: (*_LLAMA_CHECKS, ("sliding_window", count(), False), ("swiglu_limit", number(above=0), False)),
}
#: The clamp of gpt-oss's activation's inputs.
_GPT_OSS_LIMIT = 7.0
#: Groups of keys and values where the file does not name them; otherwise, and where it has null, one a head.
_GROUPS = {MISTRAL: 8, QWEN2: 32, QWEN3: 32, GPT_OSS: 8}
#: The width of a head where the file does not give it; otherwise it is hidden_size / num_attention_heads.
_HEAD_DIM = {QWEN3: 128}
#: ``bos_token_id`` and ``eos_token_id`` where the file does not name them; otherwise there are none.
_TOKEN_IDS = {GPT2: (50256, 50256), LLAMA: (1, 2), MISTRAL: (1, 2)}
#: Other names under which transformers takes GPT-2's settings: theirs, and the name in `_SAME`.
_GPT2_ALIASES = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
}


def model_from_json(settings: Json) -> ModelConfig:
    """As `HuggingFace.model_from_json`."""
    family = _READ[settings["model_type"]]
    settings = without_aliases(settings, _GPT2_ALIASES if family is GPT2 else {})
    refuse(json_problems(settings))
    values = {ours: settings.get(theirs, default) for theirs, ours, default in _SAME[family]}
    values["seq_length"] = values["max_position_embeddings"]
    values.setdefault("hidden_dropout", 0.0)  # a Llama has none
    if family is GPT2:
        tied = settings.get("tie_word_embeddings", True)
        return ModelConfig(
            **values,
            ffn_hidden_size=settings.get("n_inner") or 4 * values["hidden_size"],
            bias_gelu_fusion=settings.get("activation_function", _TANH_GELUS[0]) in _TANH_GELUS,
            untie_embeddings_and_output_weights=not tied,
        )
    _, heads, groups, head_dim = _heads(family, settings)
    attention_bias, mlp_bias = _biases(family, settings)
    return ModelConfig(
        **values,
        kv_channels=head_dim,
        group_query_attention=groups != heads,
        num_query_groups=groups if groups != heads else 1,
        rotary_base=int(rope_of(settings)["rope_theta"]),
        **{"position_embedding_type": "rope", **scaling_of(rope_of(settings))},
        **windows_of_json(family, settings),
        **_activation_of_json(family, settings),
        qk_layernorm=family is QWEN3,
        softmax_type="learnable" if family is GPT_OSS else "vanilla",
        normalization="RMSNorm",
        disable_bias_linear=not mlp_bias,
        add_qkv_bias=attention_bias and not mlp_bias,
        untie_embeddings_and_output_weights=not settings.get("tie_word_embeddings", False),
    )


def json_problems(settings: Json) -> list[str]:
    """What keeps a ``config.json`` from describing a model of this project, a line for each."""
    family = _READ[settings["model_type"]]
    checks = [(theirs, _CHECKS[ours], False) for theirs, ours, _ in _SAME[family]]
    return list(wrong_types(settings, (*checks, *_OTHER_CHECKS[family]))) or list(_problems(family, settings))


def token_ids_of_json(settings: Json) -> dict[str, Any]:
    """As `HuggingFace.token_ids_of_json`."""
    bos, eos = _TOKEN_IDS.get(_READ[settings["model_type"]], (None, None))
    defaults = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": None}
    return {name: settings.get(name, default) for name, default in defaults.items()}


def _problems(family: Family, settings: Json) -> Iterator[str]:
    yield from not_allowed(settings, _ONLY[family])
    missing = [name for name, _, default in _SAME[family] if default is None and name not in settings]
    for name in missing:
        yield f"{name} is missing; complete the file"
    if not missing:
        yield from unequal_heads(*_heads(family, settings))
    if family is GPT2:
        embedding, residual = settings.get("embd_pdrop", 0.1), settings.get("resid_pdrop", 0.1)
        if embedding != residual:
            yield f"embd_pdrop({embedding}) and resid_pdrop({residual}) are one setting here; make them equal"
        return
    yield from rope_contradictions(settings)
    rope = rope_of(settings)
    yield from scaling_problems(rope)
    if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        factor = shown(rope["partial_rotary_factor"])
        yield f"partial_rotary_factor({factor}) is not supported (whole heads are rotated)"
    if (expected := number(least=1)(rope["rope_theta"])) is not None:
        yield f"rope_theta({shown(rope['rope_theta'])}) is wrong: {expected}; correct it"
    elif rope["rope_theta"] != int(rope["rope_theta"]):
        yield f"rope_theta({rope['rope_theta']}) is not a whole number, which rotary_base is"
    yield from layer_type_problems(family, settings)
    attention_bias, mlp_bias = _biases(family, settings)
    if mlp_bias and not attention_bias:
        yield (
            f"mlp_bias({mlp_bias}) with attention_bias({attention_bias}) is not supported: linear layers have biases "
            f"all (disable_bias_linear off), none, or of QKV alone (add_qkv_bias)"
        )


def _activation_of_json(family: Family, settings: Json) -> dict[str, Any]:
    if family is not GPT_OSS:
        return {"swiglu": True}
    limit = float(settings.get("swiglu_limit", _GPT_OSS_LIMIT))
    return {"quick_geglu": True, "glu_linear_offset": 1.0, "activation_func_clamp_value": limit}


def _heads(family: Family, settings: Json) -> tuple[int, int, int, int | None]:
    """Hidden size, heads, groups of keys and values, and the width of a head if it is given."""
    names = {ours: (theirs, default) for theirs, ours, default in _SAME[family]}
    hidden_size, heads = (settings.get(*names[name]) for name in ("hidden_size", "num_attention_heads"))
    if family is GPT2:
        return hidden_size, heads, heads, None
    head_dim = settings.get("head_dim") or _HEAD_DIM.get(family)
    groups = settings.get("num_key_value_heads", _GROUPS.get(family)) or heads
    return hidden_size, heads, groups, head_dim


def _biases(family: Family, settings: Json) -> tuple[bool, bool]:
    """Whether attention and MLP have biases."""
    if family is not LLAMA:
        return family in (QWEN2, GPT_OSS), family is GPT_OSS
    return bool(settings.get("attention_bias")), bool(settings.get("mlp_bias"))


_ARCHITECTURES = {
    GPT2: "GPT2LMHeadModel",
    LLAMA: "LlamaForCausalLM",
    MISTRAL: "MistralForCausalLM",
    QWEN2: "Qwen2ForCausalLM",
    QWEN3: "Qwen3ForCausalLM",
    GPT_OSS: "GptOssForCausalLM",
}


def family_of(model: ModelConfig) -> Family:
    """As `HuggingFace.family_of`."""
    return first_without({family: reasons_against(family, model) for family in families.values()})


def reasons_against(family: Family, model: ModelConfig) -> list[str]:
    """What of a decoder a family does not compute."""
    return [text for stands, text in _against(family, model) if stands]


def _against(family: Family, model: ModelConfig) -> list[tuple[bool, str]]:
    """(Whether it holds, what it is) of what may stand against an architecture."""
    positions = f"position_embedding_type({model.position_embedding_type})"
    mup = _mup_against(model)
    softmax, activation = ("learnable", "clamped_swiglu") if family is GPT_OSS else ("vanilla", "swiglu")
    sinks = (model.softmax_type != softmax, f"softmax_type({model.softmax_type})")
    if family is GPT2:
        unequal = model.query_width != model.hidden_size
        return [
            (model.position_embedding_type != "learned_absolute", positions),
            (model.normalization != "LayerNorm", f"normalization({model.normalization})"),
            (not model.has_gelu, model.activation.kind),
            sinks,
            (model.qk_layernorm, "qk_layernorm"),
            (model.window_size is not None, f"window_size({model.window_size})"),
            (model.query_groups != model.num_attention_heads, f"num_query_groups({model.num_query_groups})"),
            (unequal, f"kv_channels({model.kv_channels}) other than hidden_size / num_attention_heads"),
            *mup,
        ]
    window = (model.window_size is not None, f"window_size({model.window_size})")
    if family is MISTRAL:
        window = (len({*model.windows}) != 1, "layers without a window")
    elif family is GPT_OSS:
        window = (False, "any window")
    has_qkv_bias, heads = not model.disable_bias_linear or model.add_qkv_bias, model.num_attention_heads
    scales_twice = model.use_rope_scaling and model.rotary_seq_len_interpolation_factor != 1
    return [
        (model.qk_layernorm != (family is QWEN3), "no qk_layernorm" if family is QWEN3 else "qk_layernorm"),
        window,
        (not model.uses_rope, positions),
        (model.normalization != "RMSNorm", f"normalization({model.normalization})"),
        sinks,
        (model.activation.kind != activation or (family is GPT_OSS and model.swiglu), f"no {activation}"),
        (model.rotary_percent != 1.0, f"rotary_percent({model.rotary_percent})"),
        (model.rotary_interleaved, "rotary_interleaved"),
        (scales_twice, "use_rope_scaling beside rotary_seq_len_interpolation_factor"),
        (family in (MISTRAL, QWEN3) and has_qkv_bias, "biases"),
        (family is GPT_OSS and model.disable_bias_linear, "no biases"),
        (family is QWEN2 and not (model.disable_bias_linear and model.add_qkv_bias), "other biases than QKV's"),
        # Transformers 5 builds no such Llama, whatever the width of its heads.
        (
            family is LLAMA and model.hidden_size % heads != 0,
            f"hidden_size({model.hidden_size}) no multiple of num_attention_heads({heads})",
        ),
        *mup,
    ]


def _mup_against(model: ModelConfig) -> list[tuple[bool, str]]:
    """As `_against`, of muP: what weights of theirs cannot hold bit for bit."""
    plain, embedding = math.isclose(model.softmax_scale, model.head_dim**-0.5), model.embedding_mult
    is_tied = embedding != 1.0 and not model.untie_embeddings_and_output_weights
    return [
        (not plain, f"use_mup: scores times {model.softmax_scale:g}, not 1 / √{model.head_dim}"),
        (math.frexp(model.output_mult)[0] != 0.5, f"use_mup: logits times {model.output_mult:g}, no power of two"),
        (math.frexp(embedding)[0] != 0.5, f"mup_embedding_mult({embedding:g}), no power of two"),
        (is_tied, f"mup_embedding_mult({embedding:g}) of an embedding that the head shares"),
    ]


def json_from_model(model: ModelConfig, vocab_size: int, dtype: str) -> dict[str, Any]:
    """As `HuggingFace.json_from_model`."""
    return json_of_family(family_of(model), model, vocab_size, dtype)


def json_of_family(family: Family, model: ModelConfig, vocab_size: int, dtype: str) -> dict[str, Any]:
    """As `HuggingFace.json_from_model`, of an architecture that nothing stands against."""
    values: dict[str, Any] = {theirs: getattr(model, ours) for theirs, ours, _ in _SAME[family]}
    values["vocab_size"] = vocab_size
    positions = model.num_positions
    common = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family.model_type,
        "torch_dtype": dtype,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "use_cache": True,
    }
    if family is GPT2:
        return {
            **common,
            **values,
            "n_positions": positions,
            "n_inner": model.padded_ffn_hidden_size,
            "activation_function": (_TANH_GELUS if model.activation.kind == "gelu" else _EXACT_GELUS)[0],
            "embd_pdrop": model.hidden_dropout,
            "scale_attn_weights": True,
        }
    theirs = {
        **common,
        **values,
        "intermediate_size": model.padded_ffn_hidden_size,
        "max_position_embeddings": positions,
        "num_key_value_heads": model.query_groups,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "rope_theta": float(model.rotary_base),
        "rope_scaling": scaling_json(model),
        "attention_bias": not model.disable_bias_linear or model.add_qkv_bias,
    }
    if family is MISTRAL:
        del theirs["attention_bias"]
        (window,) = {*model.windows}
        return {**theirs, "sliding_window": None if window is None else window + 1}
    if family is GPT_OSS:
        rope = scaling_json(model) or {"rope_type": "default"}  # theirs is YaRN without one
        limit = model.activation_func_clamp_value
        return {**theirs, **windows_json(model), "rope_scaling": rope, "swiglu_limit": limit}
    if family is QWEN2:
        del theirs["attention_bias"]
    if family in (QWEN2, QWEN3):
        return {**theirs, "use_sliding_window": False}
    return {**theirs, "mlp_bias": not model.disable_bias_linear}


def settings_of_layer(model: ModelConfig, layer: int) -> dict[str, Any]:
    """As `HuggingFace.settings_of_layer`."""
    return {}


def rules(model: ModelConfig, vocab_size: int, settings: Json | None = None) -> list[Rule]:
    """As `HuggingFace.rules`."""
    return rules_of(family_of(model) if settings is None else families[settings["model_type"]], model, vocab_size)
