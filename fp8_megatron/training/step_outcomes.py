"""What becomes of the results of a step: progress, figures, events; and the end of a run that diverges or spikes."""

from __future__ import annotations

from dataclasses import replace

from ..checkpoint.run_state import Progress
from ..config.schema import Config
from ..quantization.amax_history import MOST_SATURATED
from ..quantization.cast_report import SlotNames, Suspect
from .build import TrainingState
from .loss_spikes import SpikeGuard
from .run_events import RunEvents
from .run_report import RunReport
from .step_results import StepResult
from .stopping import NonFiniteGuard, TrainingDiverged


class StepOutcomes:
    """Takes the results of every step, one after another. All ranks record the same results.

    Args:
        slot_names: the casts' names, of every rank (`build.slot_names_of_ranks`).
        skipped_steps: steps that the run skipped before this session.
    """

    def __init__(
        self,
        config: Config,
        state: TrainingState,
        slot_names: SlotNames,
        events: RunEvents,
        report: RunReport,
        *,
        skipped_steps: int,
    ) -> None:
        training = config.training
        self._state = state
        self._events = events
        self._report = report
        self._slot_names = slot_names
        self._count_of = state.schedule.count_of
        self._guard = NonFiniteGuard(training.max_skipped_steps, num_skipped=skipped_steps)
        self._spikes = SpikeGuard(
            training.loss_spike_threshold, rolls_back=training.rollback_on_loss_spike, report=events.spiked
        )

    @property
    def in_streak(self) -> bool:
        """Whether the last step was skipped."""
        return self._guard.num_consecutive > 0

    @property
    def wants_sample(self) -> bool:
        """Whether the casts of the next step should be sampled (`SpikeGuard.wants_sample`)."""
        return self._spikes.wants_sample

    def record(self, result: StepResult, progress: Progress, *, has_checkpoint: bool) -> Progress:
        """Report a step; returns the progress with it.

        Args:
            progress: before the step.
            has_checkpoint: whether this run has one to go back to.

        Raises:
            ReplicasDiffer: the step compared replicas, and they do.
            TrainingDiverged: too many steps in a row were skipped.
            LossSpike: its loss is one, and the run rolls back.
        """
        self._events.at(result.iteration)
        if result.check is not None:
            result.check.examine()
        if result.skipped:
            self._events.skipped(result, self._suspect(result))
        if result.health is not None:
            self._report.health(result.health)
            self._spikes.sampled(result.health)
        try:
            self._guard.update(result.skipped, iteration=result.iteration)
        except TrainingDiverged as error:
            raise TrainingDiverged(f"{error}\n{self._where_not_finite()}") from None
        progress = replace(
            progress,
            iteration=result.iteration,
            consumed_samples=progress.consumed_samples + result.batch_size,
            skipped_steps=self._guard.num_skipped,
            scheduled_samples=(progress.scheduled_samples or 0) + self._count_of(result.batch_size),
        )
        self._report.step(result, progress)
        figures = result.figures
        self._spikes.examine(progress, figures.loss, figures.grad_norm, has_checkpoint=has_checkpoint)
        return progress

    def _suspect(self, result: StepResult) -> Suspect | None:
        """The tensor that a skipped step is blamed on, if its casts know one."""
        report = result.cast_report
        return None if report is None else report.suspect(self._slot_names, most_saturated=MOST_SATURATED)

    def _where_not_finite(self) -> str:
        """Which of this rank's gradients hold a NaN or inf, in words. Waits for the device; the run is about to end."""
        topology = self._state.topology
        names = [name for buffer in self._state.optimizer.buffers for name in buffer.non_finite_slots()]
        if not names:
            others = "a gradient of another rank, " if topology.world_size > 1 else ""
            return (
                f"no gradient on rank {topology.rank} holds a NaN or inf, so {others}the loss or a cast does: see "
                f"the lines of the skipped steps"
            )
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        return f"gradients with a NaN or inf on rank {topology.rank}: {shown}"
