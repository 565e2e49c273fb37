"""Reading a step's results one step late, so that the host never waits for the step it has just queued."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class StepResult:
    """What one step gave, on the host."""

    iteration: int
    learning_rate: float
    loss: float
    grad_norm: float
    stop_requested: bool

    @property
    def skipped(self) -> bool:
        """Whether the optimizer left the step out (its factor was not finite)."""
        return not (math.isfinite(self.loss) and math.isfinite(self.grad_norm))


class PendingStep:
    """The results of a queued step, on their way to the host."""

    def __init__(self, iteration: int, learning_rate: float, values: Tensor) -> None:
        """Args: values: what `train_step` returned."""
        self._iteration = iteration
        self._learning_rate = learning_rate
        self._event: torch.cuda.Event | None = None
        if values.device.type == "cuda":
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = values

    def result(self) -> StepResult:
        """Wait for this step (not for later ones) and read it."""
        if self._event is not None:
            self._event.synchronize()
        loss, stops, grad_norm = self._host.tolist()
        return StepResult(self._iteration, self._learning_rate, loss, grad_norm, stops > 0)
