"""Results of a step, read one step late: the host never waits for the step that it has just queued."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from ..device.memory import HostCopy, Mark
from ..quantization.cast_report import CastReport
from ..reporting.cast_statistics import HealthSample
from ..reporting.step_figures import StepFigures
from ..watch.replica_hash import PendingCheck
from .cast_sampling import PendingSample
from .expert_figures import ExpertFigures
from .stopping import StopReason, request_of


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
    of_experts: Mapping[str, list[float]] | None = None
    """What routers say, by layer (`ExpertFigures.by_layer`); None without experts."""
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
        experts: ExpertFigures | None = None,
    ) -> None:
        """
        Args:
            values: what `train_step` returned.
            num_chunks: model chunks of a rank.
            batch_size: samples of the step over all ranks.
            started: the mark before the step.
            experts: figures of the model's experts.
            check, sample: of this step.
        """
        self._iteration = iteration
        self._learning_rate = learning_rate
        self._started = started
        self._check = check
        self._sample = sample
        self._num_chunks = num_chunks
        self._batch_size = batch_size
        self._experts = experts
        self._values = HostCopy(values)
        self.ended = self._values.ended

    def result(self) -> StepResult:
        """Wait for this step, but not for later ones, and read its results."""
        values = self._values.read()
        figures, rest = StepFigures.unpack(values[: StepFigures.num_packed()]), values[StepFigures.num_packed() :]
        of_experts = None
        if self._experts is not None:
            packed, rest = rest[: self._experts.num_packed], rest[self._experts.num_packed :]
            of_experts = self._experts.by_layer(packed)
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
            of_experts=of_experts,
            check=self._check,
            health=None if self._sample is None else self._sample.result(),
        )
