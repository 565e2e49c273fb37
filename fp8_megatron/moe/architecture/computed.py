"""The settings of a decoder with experts that change what weights of the same shapes compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ...config.model import ModelConfig, layers_with_experts
from ...models.decoder import computed as decoder

_OF_EXPERTS = (
    "moe_layer_freq",
    "moe_router_topk",
    "moe_router_score_function",
    "moe_router_pre_softmax",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_topk_scaling_factor",
    "moe_router_load_balancing_type",
)
sizes = (*decoder.sizes, "num_experts")
#: As `Architecture.arguments_without_setting`.
arguments_without_setting: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        **decoder.arguments_without_setting,
        "moe_apply_probs_on_input": (None, False),
        "moe_latent_size": (None,),
    }
)
#: As `Architecture.computed_settings`.
computed_settings = (*decoder.computed_settings, *_OF_EXPERTS)


def single_layer(model: ModelConfig, layer: int) -> ModelConfig:
    """As `Architecture.single_layer`. What a run sets for training would send tokens elsewhere, or nowhere."""
    return replace(
        decoder.single_layer(model, layer),
        num_experts=model.num_experts if layer in model.expert_layers else None,
        moe_layer_freq="1",
        moe_input_jitter_eps=None,
        moe_router_force_load_balancing=False,
        moe_expert_capacity_factor=None,
    )


def changed_setting(saved: Mapping[str, Any], model: ModelConfig, *, finetune: bool = False) -> str | None:
    """As `Architecture.changed_setting`."""
    changed = decoder.changed_setting(saved, model, finetune=finetune)
    if changed is not None:
        return changed
    for name in _OF_EXPERTS:
        if name in saved and saved[name] != getattr(model, name) and not _is_same(saved[name], model, name):
            return name
    return None


def _is_same(value: Any, model: ModelConfig, name: str) -> bool:
    """Whether two spellings of a setting mean the same, or the model does not read it."""
    if name == "moe_layer_freq":
        try:
            return layers_with_experts(value, model.num_layers) == model.expert_layers
        except ValueError:
            return False
    if name == "moe_router_load_balancing_type":  # sinkhorn has other scores; losses change none
        return ("sinkhorn" in value) == ("sinkhorn" in model.moe_router_load_balancing_type)
    if name == "moe_router_topk_scaling_factor":
        return (value or 1.0) == (model.moe_router_topk_scaling_factor or 1.0)
    return name == "moe_router_pre_softmax" and model.moe_router_score_function != "softmax"
