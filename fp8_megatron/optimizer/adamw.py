"""The precision-decoupled AdamW: one fused pass over a flat space, every operand in its own storage dtype.

FP8-LM (arXiv 2310.18313), section 2.2: gradients and first moment in FP8, second moment and master weight in FP16
with scales, arithmetic in FP32.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..config import OptimizerConfig
from ..distributed.grad_buffer import GradBuffer
from ..kernels import ops
from .state import SpaceState


def update_space(
    buffer: GradBuffer,
    state: SpaceState,
    group: dict[str, Any],
    config: OptimizerConfig,
    *,
    grad_factor: Tensor,
    step_count: Tensor,
) -> None:
    """Update this rank's shard of one space and send the new weights on their way.

    Args:
        group: the space's parameter group; `lr` and `weight_decay` are read.
        grad_factor: FP32 [1]; where it is not finite nothing changes (`reference.adamw_step_`).
        step_count: FP32 [1], this step's number.
    """
    ops.adamw_step_(
        buffer.payload,
        buffer.scales,
        state.exp_avg.payload,
        state.exp_avg.scales,
        state.exp_avg_sq.payload,
        state.exp_avg_sq.scales,
        state.master.payload,
        state.master.scales,
        state.weight_to_write(),
        state.chunk_amax,
        grad_factor,
        step_count,
        lr=float(group["lr"]),
        beta1=config.adam_beta1,
        beta2=config.adam_beta2,
        eps=config.adam_eps,
        weight_decay=float(group["weight_decay"]),
        decoupled=config.optimizer == "adamw",
    )
    state.publish_weights()
