"""Reading a step's results one step late, so that the host never waits for the step it has just queued."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from ..reporting.step_figures import StepFigures


class Mark:
    """A point in a device's work: on a GPU the moment its stream gets there, on a CPU now."""

    def __init__(self, device: torch.device) -> None:
        self._time = time.monotonic()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def wait(self) -> None:
        """Wait until the device has reached this point (not for what was queued after it)."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: Mark) -> float:
        """Device time between two marks; both have been reached."""
        if self._event is not None and earlier._event is not None:
            return earlier._event.elapsed_time(self._event) / 1e3
        return self._time - earlier._time


@dataclass(frozen=True)
class StepResult:
    """What one step gave, on the host."""

    iteration: int
    learning_rate: float
    figures: StepFigures
    step_seconds: float

    @property
    def stop_requested(self) -> bool:
        """Whether any rank wants to stop."""
        return self.figures.num_stop_requests > 0

    @property
    def skipped(self) -> bool:
        """Whether the optimizer skipped the step: its gradient norm was not finite."""
        return not math.isfinite(self.figures.grad_norm)


class PendingStep:
    """The results of a queued step, on their way to the host."""

    def __init__(self, iteration: int, learning_rate: float, values: Tensor, started: Mark) -> None:
        """Args: values: the packed figures that `train_step` returned; started: the mark before the step."""
        self._iteration = iteration
        self._learning_rate = learning_rate
        self._started = started
        if values.device.type == "cuda":
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
        else:
            self._host = values
        self.ended = Mark(values.device)

    def result(self) -> StepResult:
        """Wait for this step (not for later ones) and read it."""
        self.ended.wait()
        return StepResult(
            iteration=self._iteration,
            learning_rate=self._learning_rate,
            figures=StepFigures.unpack(self._host.tolist()),
            step_seconds=self.ended.seconds_since(self._started),
        )
