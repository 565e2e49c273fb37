"""Loss scaling for FP16. Its gradients underflow below 6e-8; BF16 and FP8 (E5M2 with a scale a tensor) need none.

The scale is on the device. A step that overflowed halves it; a run of good steps doubles it. The host does not wait
(Micikevicius et al., arXiv 1710.03740, section 3.2, with Megatron's hysteresis).
"""

from __future__ import annotations

import torch
from torch import Tensor


class LossScale:
    """The factor of the loss, and so of all gradients until the optimizer divides by it; FP32 [1] on the device.

    Args:
        initial: scale of the first step.
        window: steps without an overflow after which it doubles; None keeps it constant.
        hysteresis: it halves from this many overflows on. The count restarts when it doubles.
        minimum: it never falls below this.
    """

    def __init__(
        self, initial: float, device: torch.device, *, window: int | None, hysteresis: int = 1, minimum: float = 1.0
    ) -> None:
        self.scale = torch.full((1,), initial, device=device)
        self._window = window
        self._hysteresis = hysteresis
        self._minimum = minimum
        self._good_steps = torch.zeros(1, device=device)
        self._forgiven = torch.zeros(1, device=device)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """``loss · scale``, in the shape of `loss`; also megatron-core's ``grad_scale_func``."""
        return loss * self.scale

    def update(self, overflowed: Tensor) -> None:
        """After a step: `overflowed` is bool [1] on the device."""
        if self._window is None:
            return
        forgiven = self._forgiven + overflowed
        halves = overflowed & (forgiven >= self._hysteresis)
        good_steps = torch.where(overflowed, torch.zeros_like(self._good_steps), self._good_steps + 1)
        doubles = good_steps >= self._window
        self.scale.mul_(torch.where(doubles, 2.0, torch.where(halves, 0.5, 1.0))).clamp_(min=self._minimum)
        self._forgiven.copy_(torch.where(doubles, torch.zeros_like(forgiven), forgiven))
        self._good_steps.copy_(torch.where(doubles, torch.zeros_like(good_steps), good_steps))

    def state_dict(self) -> dict[str, Tensor]:
        """What a resumed run needs, FP32 [1] each; not copies."""
        return {"scale": self.scale, "good_steps": self._good_steps, "forgiven": self._forgiven}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore the result of `state_dict`, in place."""
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])
