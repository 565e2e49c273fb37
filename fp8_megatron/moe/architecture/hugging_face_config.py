"""``config.json`` of Hugging Face's Mixtral, Qwen2-MoE, Qwen3-MoE and gpt-oss ↔ the model section of a configuration,
and the names of their weights.

Outside its experts, a family with experts is a dense one (`_DENSE`), whose settings and names `models.decoder` reads
and writes. The rest is here: which layers have experts, how a token chooses them, and their tensors.

- An expert's tensors are stored one by one; ours holds the experts of a layer in one weight. Transformers 5 also takes
  them in that form, with other names (`Rule.otherwise`).
- The softmax over the chosen experts alone is a softmax over all that is divided by the sum of the chosen
  (``norm_topk_prob``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ...config.model import ModelConfig
from ...models.decoder import hugging_face_config as decoder
from ...models.decoder.hugging_face_rules import (
    GPT_OSS,
    MISTRAL,
    QWEN2,
    QWEN3,
    gated_rules,
    join_gate_and_up,
    llama_rules,
    split_gate_and_up,
)
from ...models.decoder.table import FC1, FC2
from ...models.hugging_face import Family, Rule, first_without
from ...models.hugging_face_values import (
    Allowed,
    Json,
    count,
    number,
    refuse,
    shown,
    truth,
    without_aliases,
    wrong_types,
)
from .hugging_face_gpt_oss import mixture_rules
from .table import EXPERTS_FC1, EXPERTS_FC2, ROUTER, SHARED_FC1, SHARED_FC2, SHARED_GATE

MIXTRAL, QWEN3_MOE, QWEN2_MOE = map(Family, ("mixtral", "qwen3_moe", "qwen2_moe"))
#: As `HuggingFace.families`; a model is written as the first that computes the same.
families = {family.model_type: family for family in (MIXTRAL, QWEN3_MOE, QWEN2_MOE, GPT_OSS)}
#: As `HuggingFace.reserved`.
reserved: Allowed = {"num_local_experts": ((None, 0, 1), "only dense MLPs are supported")}
#: The dense family that each is outside its experts.
_DENSE = {MIXTRAL: MISTRAL, QWEN3_MOE: QWEN3, QWEN2_MOE: QWEN2, GPT_OSS: GPT_OSS}
_ARCHITECTURES = {
    MIXTRAL: "MixtralForCausalLM",
    QWEN3_MOE: "Qwen3MoeForCausalLM",
    QWEN2_MOE: "Qwen2MoeForCausalLM",
    GPT_OSS: "GptOssForCausalLM",
}
_QWEN_DEFAULTS = {
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "norm_topk_prob": False,
    "router_aux_loss_coef": 0.001,
}
#: The settings of experts, and what the file means where it does not say them.
_DEFAULTS: dict[Family, dict[str, Any]] = {
    MIXTRAL: {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
    },
    QWEN3_MOE: {**_QWEN_DEFAULTS, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    QWEN2_MOE: {
        **_QWEN_DEFAULTS,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "qkv_bias": True,
    },
    GPT_OSS: {"num_experts": 128, "num_experts_per_tok": 4, "router_aux_loss_coef": 0.001},
}
#: The defaults of other settings, where the dense family has another.
_OTHER_DEFAULTS: dict[Family, dict[str, Any]] = {
    MIXTRAL: {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None},
    QWEN3_MOE: {"num_key_value_heads": 4},
    QWEN2_MOE: {"num_key_value_heads": 16},
    GPT_OSS: {"rms_norm_eps": 1e-5, "rope_theta": 150_000.0, "head_dim": 64, "attention_bias": True},
}
#: RoPE of a gpt-oss whose file has none.
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _layer_numbers(value: Any) -> str | None:
    """A check for a list of layers: what else is expected, or None."""
    is_list = isinstance(value, list) and all(type(layer) is int and layer >= 0 for layer in value)
    return None if is_list else "expected a list of whole numbers"


#: Checks of the settings of experts, and whether null stands for the default.
_CHECKS = (
    ("num_experts", count(), False),
    ("num_experts_per_tok", count(), False),
    ("moe_intermediate_size", count(), False),
    ("shared_expert_intermediate_size", count(), False),
    ("decoder_sparse_step", count(), False),
    ("mlp_only_layers", _layer_numbers, True),
    ("norm_topk_prob", truth, False),
    ("router_aux_loss_coef", number(least=0), False),
    ("router_jitter_noise", number(least=0, below=1), False),
)


def model_from_json(settings: Json) -> ModelConfig:
    """As `HuggingFace.model_from_json`."""
    family = families[settings["model_type"]]
    settings = without_aliases(settings, {"num_local_experts": "num_experts"})
    own = {name: settings.get(name, default) for name, default in _DEFAULTS[family].items()}
    dense = _dense_settings(family, settings)
    wrong = list(wrong_types(own, _CHECKS))
    if family is QWEN2_MOE and own["qkv_bias"] is not True:
        wrong.append(f"qkv_bias({shown(own['qkv_bias'])}) is not supported; only True")
    refuse([*decoder.json_problems(dense), *wrong])
    model = decoder.model_from_json(dense)
    has_experts = [_has_experts(own, layer) for layer in range(model.num_layers)]
    refuse(list(_problems(own, has_experts)))
    experts: dict[str, Any] = {
        "num_experts": own["num_experts"],
        "moe_layer_freq": "1" if all(has_experts) else str([*map(int, has_experts)]),
        "moe_ffn_hidden_size": own.get("moe_intermediate_size", model.ffn_hidden_size),
        "moe_router_topk": own["num_experts_per_tok"],
        "moe_router_pre_softmax": not own.get("norm_topk_prob", True),
        "moe_aux_loss_coeff": (str(own["router_aux_loss_coef"]),),
        "moe_input_jitter_eps": own.get("router_jitter_noise") or None,
    }
    if family is QWEN2_MOE:
        experts["moe_shared_expert_intermediate_size"] = own["shared_expert_intermediate_size"]
        experts["moe_shared_expert_gate"] = True
    return replace(model, **experts)


def token_ids_of_json(settings: Json) -> dict[str, Any]:
    """As `HuggingFace.token_ids_of_json`."""
    return decoder.token_ids_of_json({**settings, "model_type": _DENSE[families[settings["model_type"]]].model_type})


def _dense_settings(family: Family, settings: Json) -> dict[str, Any]:
    """The settings of the dense family, with its defaults where they are others."""
    defaults = _OTHER_DEFAULTS[family] | {"model_type": _DENSE[family].model_type}
    nested = [settings.get(name) for name in ("rope_parameters", "rope_scaling")]
    if any(isinstance(rope, dict) and "rope_theta" in rope for rope in nested):
        defaults.pop("rope_theta", None)
    if family is GPT_OSS and not any(nested):
        settings = {**settings, "rope_scaling": _GPT_OSS_ROPE}
    hidden, heads = settings.get("hidden_size"), settings.get("num_attention_heads")
    width = settings.get("head_dim", defaults.get("head_dim"))
    if width is None and isinstance(hidden, int) and isinstance(heads, int) and 0 < heads <= hidden:
        settings = {**settings, "head_dim": hidden // heads}
    others = {name: value for name, value in settings.items() if name != "model_type"}
    return defaults | others


def _has_experts(own: Json, layer: int) -> bool:
    """Whether a layer has experts; a Mixtral's all have them."""
    return (layer + 1) % own.get("decoder_sparse_step", 1) == 0 and layer not in (own.get("mlp_only_layers") or ())


def _problems(own: Json, has_experts: Sequence[bool]) -> Iterator[str]:
    experts, chosen = own["num_experts"], own["num_experts_per_tok"]
    if chosen > experts:
        yield f"num_experts_per_tok({chosen}) > num_experts({experts}); correct one of them"
    if not any(has_experts):
        yield (
            f"decoder_sparse_step({own['decoder_sparse_step']}) and mlp_only_layers leave no layer with experts; "
            f"correct one of them"
        )


def family_of(model: ModelConfig) -> Family:
    """As `HuggingFace.family_of`."""
    return first_without({family: _reasons_against(family, model) for family in families.values()})


def _reasons_against(family: Family, model: ModelConfig) -> list[str]:
    shared, gate = model.moe_shared_expert_intermediate_size, model.moe_shared_expert_gate
    against = [
        (
            model.moe_router_score_function != "softmax",
            f"moe_router_score_function({model.moe_router_score_function})",
        ),
        (model.moe_router_num_groups is not None, f"moe_router_num_groups({model.moe_router_num_groups})"),
        (
            model.moe_router_topk_scaling_factor not in (None, 1.0),
            f"moe_router_topk_scaling_factor({model.moe_router_topk_scaling_factor})",
        ),
        ("sinkhorn" in model.moe_router_load_balancing_type, "moe_router_load_balancing_type(sinkhorn)"),
    ]
    if family in (MIXTRAL, GPT_OSS):
        against.append((model.moe_router_pre_softmax, "moe_router_pre_softmax"))
        against.append((model.has_dense_mlps, f"moe_layer_freq({model.moe_layer_freq})"))
    if family is QWEN2_MOE:
        against.append((shared is None or not gate, "no shared expert with a gate"))
    else:
        against.append((shared is not None, f"moe_shared_expert_intermediate_size({shared})"))
    own = [text for stands, text in against if stands]
    return [*decoder.reasons_against(_DENSE[family], model), *own]


def json_from_model(model: ModelConfig, vocab_size: int, dtype: str) -> dict[str, Any]:
    """As `HuggingFace.json_from_model`."""
    family = family_of(model)
    theirs = {
        **decoder.json_of_family(_DENSE[family], model, vocab_size, dtype),
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family.model_type,
        "num_experts_per_tok": model.moe_router_topk,
        "output_router_logits": False,
        "router_aux_loss_coef": model.balancing_losses.get("aux_loss", 0.0),
    }
    if family in (MIXTRAL, GPT_OSS):
        theirs |= {"intermediate_size": model.expert_ffn_hidden_size, "num_local_experts": model.num_experts}
        return theirs | ({"router_jitter_noise": model.moe_input_jitter_eps or 0.0} if family is MIXTRAL else {})
    theirs |= {
        "num_experts": model.num_experts,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer in range(model.num_layers) if layer not in model.expert_layers],
        "moe_intermediate_size": model.expert_ffn_hidden_size,
        "norm_topk_prob": not model.moe_router_pre_softmax,
    }
    if family is QWEN2_MOE:
        theirs["qkv_bias"] = True
        theirs["shared_expert_intermediate_size"] = model.moe_shared_expert_intermediate_size
    return theirs


def settings_of_layer(model: ModelConfig, layer: int) -> dict[str, Any]:
    """As `HuggingFace.settings_of_layer`."""
    return {"decoder_sparse_step": 1, "mlp_only_layers": [] if layer in model.expert_layers else [0]}


def rules(model: ModelConfig, vocab_size: int, settings: Json | None = None) -> list[Rule]:
    """As `HuggingFace.rules`."""
    family = family_of(model) if settings is None else families[settings["model_type"]]
    mlp = [] if len(model.expert_layers) == model.num_layers else gated_rules(model, FC1, FC2, "mlp")
    return llama_rules(_DENSE[family], model, vocab_size, [*mlp, *_mixture(family, model)])


def _mixture(family: Family, model: ModelConfig) -> list[Rule]:
    """Of a layer's router, experts and shared expert."""
    if family is GPT_OSS:
        return mixture_rules()
    layer = "model.layers.{}.mlp."
    router, fused = Rule(ROUTER + "weight", (layer + "gate.weight",)), layer + "experts."
    one, (gate, up, down) = layer + "experts.{}.", ("gate_proj", "up_proj", "down_proj")
    if family is MIXTRAL:
        one, (gate, up, down) = "model.layers.{}.block_sparse_moe.experts.{}.", ("w1", "w3", "w2")
        router = replace(router, names=("model.layers.{}.block_sparse_moe.gate.weight",), otherwise=router)
    fc1, fc2 = EXPERTS_FC1 + "weight", EXPERTS_FC2 + "weight"
    rules = [
        router,
        Rule(
            fc1,
            (f"{one}{gate}.weight", f"{one}{up}.weight"),
            join_gate_and_up,
            split_gate_and_up,
            otherwise=Rule(fc1, (fused + "gate_up_proj",), has_all_matrices=True),
        ),
        Rule(fc2, (f"{one}{down}.weight",), otherwise=Rule(fc2, (fused + "down_proj",), has_all_matrices=True)),
    ]
    if family is QWEN2_MOE:
        rules += gated_rules(model, SHARED_FC1, SHARED_FC2, "mlp.shared_expert")
        rules.append(Rule(SHARED_GATE, (layer + "shared_expert_gate.weight",)))
    return rules
