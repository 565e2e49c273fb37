"""Results of a step, read one step late: the host never waits for the step that it has just queued."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..device.memory import cpu_copy
from ..quantization.cast_report import CastReport
from ..reporting.cast_statistics import HealthSample
from ..reporting.step_figures import StepFigures
from ..watch.replica_hash import PendingCheck
from .cast_sampling import PendingSample
from .stopping import StopReason, request_of


class Mark:
    """A point in a device's work: on a GPU, when the stream reaches it; on a CPU, the time of the call."""

    def __init__(self, device: torch.device) -> None:
        self._time = time.monotonic()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def wait(self) -> None:
        """Wait until the device has reached this point. Work that was queued later may still run."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: Mark) -> float:
        """Seconds of device time between two marks. Both must have been reached."""
        if self._event is not None and earlier._event is not None:
            return earlier._event.elapsed_time(self._event) / 1e3
        return self._time - earlier._time


@dataclass(frozen=True)
class StepResult:
    """Results of one step, on the host."""

    iteration: int
    learning_rate: float
    figures: StepFigures
    step_seconds: float
    batch_size: int
    """Samples of the step over all ranks."""
    cast_report: CastReport | None = None
    """What the casts of the step report, under delayed scaling."""
    check: PendingCheck | None = None
    """Hashes of what replicas hold, if this step compares them."""
    health: HealthSample | None = None
    """Statistics of the casts, if this step sampled them."""

    @property
    def stop(self) -> StopReason | None:
        """Why any rank asks to stop; None: none does."""
        return request_of(self.figures.stop_request)

    @property
    def skipped(self) -> bool:
        """Whether the optimizer skipped the step: its gradient norm was not finite."""
        return not math.isfinite(self.figures.grad_norm)


class HostCopy:
    """Values that are being copied from a device to the host.

    Attributes:
        ended: the point in the device's work behind the copy.
    """

    def __init__(self, values: Tensor) -> None:
        self._host = cpu_copy(values)
        self.ended = Mark(values.device)

    def read(self) -> list[float]:
        """Wait for the copy, but not for work that was queued behind it."""
        self.ended.wait()
        values: list[float] = self._host.tolist()
        return values


class PendingStep:
    """The results of a queued step, which are being copied to the host."""

    def __init__(
        self,
        iteration: int,
        learning_rate: float,
        values: Tensor,
        started: Mark,
        check: PendingCheck | None = None,
        sample: PendingSample | None = None,
        *,
        num_chunks: int = 1,
        batch_size: int,
    ) -> None:
        """
        Args:
            values: what `train_step` returned.
            num_chunks: model chunks of a rank.
            batch_size: samples of the step over all ranks.
            started: the mark before the step.
            check, sample: of this step.
        """
        self._iteration = iteration
        self._learning_rate = learning_rate
        self._started = started
        self._check = check
        self._sample = sample
        self._num_chunks = num_chunks
        self._batch_size = batch_size
        self._values = HostCopy(values)
        self.ended = self._values.ended

    def result(self) -> StepResult:
        """Wait for this step, but not for later ones, and read its results."""
        values = self._values.read()
        figures, rest = StepFigures.unpack(values[: StepFigures.num_packed()]), values[StepFigures.num_packed() :]
        cast_report = CastReport.unpack(rest, self._num_chunks) if rest else None
        if cast_report is not None:
            figures = replace(figures, **cast_report.figures())
        return StepResult(
            iteration=self._iteration,
            learning_rate=self._learning_rate,
            figures=figures,
            step_seconds=self.ended.seconds_since(self._started),
            batch_size=self._batch_size,
            cast_report=cast_report,
            check=self._check,
            health=None if self._sample is None else self._sample.result(),
        )
