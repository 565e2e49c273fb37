"""SGD with momentum, as `torch.optim.SGD` does it: dampening, Nesterov's form, and weight decay in the gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import UserError
from ...storage import StateSpec
from .rule import ElementwiseRule


class SGD(ElementwiseRule):
    """Options: ``momentum``, ``dampening``, ``nesterov``. Without momentum it stores nothing."""

    states: tuple[StateSpec, ...] = (StateSpec("momentum_buffer", "momentum"),)
    required_options = ("momentum",)
    counts_steps = False

    def __init__(self, options: Mapping[str, Any]) -> None:
        momentum, dampening = float(options["momentum"]), float(options["dampening"])
        if options["nesterov"] and (momentum <= 0.0 or dampening != 0.0):
            raise UserError(f"nesterov needs momentum({momentum}) above 0 and dampening({dampening}) 0")
        if momentum == 0.0:
            self.states = ()

    def change(
        self, grad: Tensor, param: Tensor, states: list[Tensor], group: Mapping[str, Any], step: Tensor
    ) -> tuple[Tensor, Sequence[Tensor]]:
        lr, momentum, decay = float(group["lr"]), float(group["momentum"]), float(group["weight_decay"])
        grad = grad + decay * param if decay else grad
        if momentum == 0.0:
            return -lr * grad, states
        if not states:
            raise UserError(f"momentum({momentum}) was 0 when the optimizer was built: build it with momentum")
        # The first gradient is the buffer, whole.
        added = torch.where(step == 1.0, grad, (1.0 - float(group["dampening"])) * grad)
        buffer = momentum * states[0] + added
        return -lr * (grad + momentum * buffer if group["nesterov"] else buffer), [buffer]
