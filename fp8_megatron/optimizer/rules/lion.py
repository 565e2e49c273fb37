"""Lion (arXiv 2302.06675, Algorithm 2): the sign of an interpolated momentum, with decoupled weight decay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...storage import StateSpec
from .rule import ElementwiseRule


class Lion(ElementwiseRule):
    """Options: ``betas``, of the update and of the momentum."""

    states = (StateSpec("exp_avg", "momentum"),)
    required_options = ("betas",)
    counts_steps = False

    @classmethod
    def refusal(cls, optimizer: torch.optim.Optimizer) -> str | None:
        if getattr(optimizer, "decoupled_wd", False):
            return "decoupled_weight_decay=True divides the decay by lr: leave it out, and give weight_decay / lr"
        if any(group.get("cautious_factor", 1.0) != 1.0 for group in optimizer.param_groups):
            return "cautious_factor changes the update: leave it out"
        return None

    def change(
        self, grad: Tensor, param: Tensor, states: list[Tensor], group: Mapping[str, Any], step: Tensor
    ) -> tuple[Tensor, Sequence[Tensor]]:
        lr, (beta1, beta2), (momentum,) = float(group["lr"]), group["betas"], states
        direction = torch.sign(beta1 * momentum + (1.0 - beta1) * grad)
        decay = lr * float(group["weight_decay"])
        return -(lr * direction + decay * param), [beta2 * momentum + (1.0 - beta2) * grad]
