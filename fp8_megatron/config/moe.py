"""The settings of a mixture of experts, a part of the section ``model`` (`schema` says how fields become flags).

How ranks share experts is in `parallel`. What experts cannot do yet, their architecture refuses
(`moe.architecture.checks`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from .fields import BelowOne, NotNegative, NumExperts, Positive, Size

#: Losses that balance experts, and their names in reports. Several may be added.
LOSSES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
#: What balances them without a loss, or not at all.
ALONE = ("sinkhorn", "none")


#: Of the experts that tokens choose, the fraction that has no room for them, as reports name it.
DROPPED = "dropped_fraction"


def reported_means(
    factors: Mapping[str, float], z_loss_factor: float | None, capacity_factor: float | None
) -> tuple[str, ...]:
    """What a router reports beside loads, as reports name it: the losses that it adds, and what it drops."""
    balancing = tuple(name for kind, name in LOSSES.items() if factors.get(kind, 0.0) > 0)
    return balancing + (("z_loss",) if z_loss_factor else ()) + (() if capacity_factor is None else (DROPPED,))


def expert_capacity(num_tokens: int, top_k: int, num_experts: int, factor: float | None) -> int:
    """Tokens that an expert takes of `num_tokens`, which one rank routes at once."""
    return num_tokens if factor is None else min(num_tokens, math.ceil(num_tokens * top_k / num_experts * factor))


@dataclass(frozen=True)
class MoeConfig:
    """Experts and their router."""

    num_experts: NumExperts | None = None
    """Experts of a layer, each of which is an MLP. A router sends every token to some of them. Default: no experts."""
    moe_layer_freq: str = "1"
    """Layers with experts; the others have one MLP. N: the first of every N layers. A list such as [0]*3+[1]*11: layers
    with a 1."""
    moe_ffn_hidden_size: Size | None = None
    """Width of an expert. Default: ffn-hidden-size."""
    moe_shared_expert_intermediate_size: Size | None = None
    """Width of a shared expert, which has every token, beside the others. Default: no shared expert."""
    moe_shared_expert_gate: bool = False
    """Multiply the shared expert's output with the sigmoid of a learned projection of the token."""
    moe_router_topk: Size = 2
    """Experts that a token is sent to."""
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    """Function that makes scores of the router's logits."""
    moe_router_pre_softmax: bool = False
    """On: softmax over all experts, then the choice of some. Off: softmax over the chosen experts."""
    moe_router_num_groups: Size | None = None
    """Groups of experts. A token's experts come from the best --moe-router-group-topk of them."""
    moe_router_group_topk: Size | None = None
    """Groups that a token's experts come from."""
    moe_router_topk_scaling_factor: Positive | None = None
    """Multiplies the probabilities of a token's experts. Default: 1."""
    moe_router_dtype: Literal["fp32"] | None = None
    """Dtype of the router's product. Default: 16 bits."""
    moe_router_enable_expert_bias: bool = False
    """Balance experts by a bias that is added to the scores for the choice alone (arXiv 2408.15664). Needs
    --moe-router-score-function sigmoid."""
    moe_router_bias_update_rate: NotNegative = 1e-3
    """What a step adds to the bias of an expert with fewer tokens than the mean, or subtracts."""
    moe_router_load_balancing_type: tuple[str, ...] = ("aux_loss",)
    """Losses that balance experts, one or several. aux_loss: over a micro-batch. seq_aux_loss: over each sequence.
    global_aux_loss: over the global batch. none: no loss. sinkhorn: no loss; training chooses experts from a balanced
    transport plan (arXiv 2202.01169). The scores are sigmoids with one expert a token, else softmax."""
    moe_aux_loss_coeff: tuple[str, ...] = ("0.0",)
    """Factor of each loss of --moe-router-load-balancing-type."""
    moe_z_loss_coeff: NotNegative | None = None
    """Factor of the z-loss, which keeps the router's logits small (arXiv 2202.08906). Default: no z-loss."""
    moe_input_jitter_eps: BelowOne | None = None
    """Multiply the router's input with random numbers between 1 - eps and 1 + eps. Default: no."""
    moe_expert_capacity_factor: Positive | None = None
    """Tokens that an expert takes of a micro-batch on a rank, as a multiple of its share if experts are balanced. The
    others are dropped: that expert adds nothing to them. Default: every expert takes all tokens."""
    moe_token_drop_policy: Literal["probs", "position"] = "probs"
    """Tokens that an expert keeps. probs: those with the largest probabilities. position: the first ones."""
    moe_router_force_load_balancing: bool = False
    """Replace the router's logits by random ones, so that experts are balanced. For benchmarks."""
