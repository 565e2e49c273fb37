"""AdamW (arXiv 1711.05101), or Adam with an L2 term, as one fused kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...kernels import ops
from ...storage import StateSpec
from .rule import UpdateRule


class AdamW(UpdateRule):
    """Options: ``betas``, ``eps``, and ``decoupled_weight_decay`` (AdamW; otherwise the gradient's L2 term)."""

    states = (
        StateSpec("exp_avg", "first moment"),
        StateSpec("exp_avg_sq", "second moment", holds_squares=True),
    )
    required_options = ("betas",)

    def step(self, operands: ops.FlatOperands, group: Mapping[str, Any], *, grad_factor: Tensor, step: Tensor) -> None:
        exp_avg, exp_avg_sq = operands.states
        ops.adamw_step_(
            ops.AdamState(operands.grad, exp_avg, exp_avg_sq, operands.master, operands.places),
            self.hyper(group),
            grad_factor=grad_factor,
            step=step,
            weight=operands.weight,
            chunk_amax=operands.chunk_amax,
        )

    @staticmethod
    def hyper(group: Mapping[str, Any]) -> ops.AdamHyper:
        """The numbers that the kernels take."""
        beta1, beta2 = group["betas"]
        return ops.AdamHyper(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            decoupled=bool(group.get("decoupled_weight_decay")),
        )
