"""What megatron-core's GPT has of a mixture of experts: its settings, its layers, and what routers do after a step."""

from __future__ import annotations

from functools import partial
from typing import Any

from ...config.schema import Config
from ...mcore.parts import Parts
from ...mcore.topology import Topology
from ..router_report import RouterTable, router_table
from .layer import mixture_spec
from .router import update_expert_biases


def mixture_parts(config: Config) -> Parts:
    """The parts of a model with experts."""
    model = config.model
    return Parts(
        settings=mixture_settings(config),
        mlps=dict.fromkeys(model.expert_layers, partial(mixture_spec, activation=model.activation)),
        after_gradients=update_expert_biases,
        layer_table=partial(_router_table, config),
    )


def _router_table(config: Config, topology: Topology) -> RouterTable:
    num_sequences = topology.dp.size()
    num_ranks = num_sequences * topology.cp.size() * topology.tp.size()
    return router_table(config, num_sequences=num_sequences, num_ranks=num_ranks)


def mixture_settings(config: Config) -> dict[str, Any]:
    """megatron-core's settings of experts and their router."""
    model, parallel = config.model, config.parallel
    same = (
        "moe_shared_expert_intermediate_size",
        "moe_shared_expert_gate",
        "moe_router_topk",
        "moe_router_score_function",
        "moe_router_pre_softmax",
        "moe_router_num_groups",
        "moe_router_group_topk",
        "moe_router_topk_scaling_factor",
        "moe_router_dtype",
        "moe_router_enable_expert_bias",
        "moe_router_bias_update_rate",
        "moe_router_force_load_balancing",
        "moe_z_loss_coeff",
        "moe_expert_capacity_factor",
        "moe_token_drop_policy",
        "moe_input_jitter_eps",
    )
    losses = model.balancing_losses or {"none": 0.0}
    has_experts = [int(layer in model.expert_layers) for layer in range(model.num_layers)]
    return {
        "num_moe_experts": model.num_experts,
        "moe_grouped_gemm": True,
        "moe_layer_freq": has_experts,
        "moe_ffn_hidden_size": model.expert_ffn_hidden_size,
        # A list of one loss is what its name alone is.
        "moe_router_load_balancing_type": list(losses) if len(losses) > 1 else next(iter(losses)),
        "moe_aux_loss_coeff": list(losses.values()) if len(losses) > 1 else next(iter(losses.values())),
        **{name: getattr(model, name) for name in same},
        "expert_model_parallel_size": parallel.expert_model_parallel_size,
        "expert_tensor_parallel_size": parallel.expert_tensor_size,
        "moe_token_dispatcher_type": "allgather" if parallel.gathers_tokens else "alltoall",
        "moe_per_layer_logging": config.logging.moe_per_layer_logging,
    }
