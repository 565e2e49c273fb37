"""Results of a step, read one step late: the host never waits for the step that it has just queued."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import Tensor

from ..device.memory import HostCopy, Mark
from ..quantization.cast_report import CastReport
from ..reporting.cast_statistics import HealthSample
from ..reporting.layer_report import LayerReport, LayerTable
from ..reporting.step_figures import StepFigures
from ..watch.replica_hash import PendingCheck
from .cast_sampling import PendingSample
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
    layers: LayerReport | None = None
    """What a part of the layers reports, if any does."""
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
        layer_table: LayerTable | None = None,
        num_micro_batches: int = 1,
        batch_size: int,
    ) -> None:
        """
        Args:
            values: what `train_step` returned.
            num_chunks: model chunks of a rank.
            layer_table: how what a part of the layers reports lies in `values`; None: none does.
            num_micro_batches: of the step.
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
        self._layer_table = layer_table
        self._num_micro_batches = num_micro_batches
        self._batch_size = batch_size
        self._values = HostCopy(values)
        self.ended = self._values.ended

    def result(self) -> StepResult:
        """Wait for this step, but not for later ones, and read its results."""
        values = self._values.read()
        figures, rest = StepFigures.unpack(values[: StepFigures.num_packed()]), values[StepFigures.num_packed() :]
        table = self._layer_table
        num_of_layers = 0 if table is None else table.numel
        casts, of_layers = rest[num_of_layers:], rest[:num_of_layers]
        cast_report = CastReport.unpack(casts, self._num_chunks) if casts else None
        if cast_report is not None:
            figures = replace(figures, **cast_report.figures())
        return StepResult(
            iteration=self._iteration,
            learning_rate=self._learning_rate,
            figures=figures,
            step_seconds=self.ended.seconds_since(self._started),
            batch_size=self._batch_size,
            cast_report=cast_report,
            layers=None if table is None else table.unpack(of_layers, self._num_micro_batches),
            check=self._check,
            health=None if self._sample is None else self._sample.result(),
        )
