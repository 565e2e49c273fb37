"""What a run reports of itself: settings, memory, events, each step's figures; and the end of one that diverges."""

from __future__ import annotations

import logging
import socket
from dataclasses import asdict, replace
from typing import Any

import torch

from ..assembly import LAYER_FILES
from ..checkpoint.run_state import Progress
from ..config.io import config_text, format_changes
from ..config.learning_rate import schedule_notes
from ..config.schema import Config
from ..planning.memory import predict_memory
from ..quantization.amax_history import MOST_SATURATED
from ..quantization.cast_report import Suspect
from ..reporting.cast_statistics import HealthSample
from ..reporting.flops import model_flops_per_token, peak_flops
from ..reporting.memory_report import memory_table
from ..reporting.metrics import EvalMetrics, MetricsLogger, StepMetrics
from ..reporting.metrics_file import METRICS_FILE
from ..reporting.report import Output, write_report
from ..reporting.run_log import EventKind, event
from ..watch.restarts import Launch
from .build import TrainingState, measured_storage, slot_names_of_ranks
from .loss_spikes import Spike, SpikeGuard
from .run_start import Session
from .step_results import StepResult
from .stopping import NonFiniteGuard, StopReason, TrainingDiverged

logger = logging.getLogger(__name__)


#: The roles of sampled casts, as messages name them.
_ROLES = {"input": "input", "weight": "weight", "grad_output": "output gradient", "weight_grad": "weight gradient"}


def log_settings(config: Config, world_size: int) -> None:
    """Log the settings that differ from their defaults, and a line for each that another one replaces or cuts."""
    logger.info("settings that differ from their defaults (config.yaml has all)\n%s", format_changes(config))
    if config.precision.is_fp8:
        logger.info("FP8: %s", config.fp8_summary)
    for note in schedule_notes(config, world_size):
        logger.warning("%s", note)
    batches = config.batch_schedule(world_size)
    if not batches.is_constant:
        logger.info(
            "the global batch grows from %d to %d samples, which sample %d reaches%s",
            batches.batch_size(0),
            batches.largest,
            batches.phases[-1][0],
            "; Megatron-LM 0.20 no longer reads --rampup-batch-size" if config.training.rampup_batch_size else "",
        )


class RunReport:
    """The reports of a run: its log, its events, its metrics. Every rank makes one; the first rank writes.

    Args:
        progress: where the run goes on.
        total_iterations: the step at which the run ends.
    """

    def __init__(
        self,
        config: Config,
        session: Session,
        *,
        padded_vocab_size: int,
        progress: Progress,
        total_iterations: int,
    ) -> None:
        topology, device = session.topology, session.device
        self._config, self._session, self._topology = config, session, topology
        self._padded_vocab_size = padded_vocab_size
        self._total_iterations = total_iterations
        self._is_writer = topology.rank == 0
        self._flops_per_token = model_flops_per_token(config.model, causal=False, padded_vocab_size=padded_vocab_size)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        self._peak_flops = peak_flops(name, config.precision.precision)
        self._metrics = MetricsLogger(
            config.logging,
            session.output_dir,
            is_writer=self._is_writer,
            total_iterations=total_iterations,
            batches=config.batch_schedule(topology.world_size),
            left_out=config.training.left_out,
            resume_iteration=progress.iteration,
            replaces_other_run=session.replaces_other_run,
            layer_files=LAYER_FILES,
            peak_flops=self._peak_flops,
            run_config=asdict(config),
        )

    def settings(self, state: TrainingState) -> None:
        """Write ``config.yaml`` and the memory table."""
        if not self._is_writer:
            return
        write_report(self._session.output_dir / "config.yaml", config_text(self._config).encode())
        memory = memory_table(
            measured_storage(state),
            self._config.precision.formats,
            state.optimizer.rule_states,
            predicted=predict_memory(self._config, self._padded_vocab_size, world_size=self._topology.world_size),
            level=self._config.precision.level,
            num_optimizer_shards=self._topology.replicas.size,
        )
        write_report(self._session.output_dir / "memory.txt", f"{memory}\n".encode())
        logger.info("%s", memory)

    def at(self, iteration: int) -> None:
        """Note the step that the run stands at, for events that name none."""
        if self._session.log is not None:
            self._session.log.iteration = iteration

    def started(self, iteration: int, *, skipped_steps: int) -> None:
        """Training is about to begin after `iteration`; 0: at the start of a run."""
        self.at(iteration)
        if not self._is_writer:
            return
        kind = EventKind.START if iteration == 0 else EventKind.RESUME
        source, world_size = self._session.start.source, self._topology.world_size
        where = f"{world_size} rank{'s' * (world_size > 1)}, first host {socket.gethostname()}"
        if iteration > 0:
            begins = f"training resumes after iteration {iteration}"
        else:
            begins = f"training starts {'from scratch' if source is None else f'with the weights of {source.root}'}"
        launch = Launch.of_environment().name
        mark = event(kind, iteration=iteration, world_size=world_size, skipped_steps=skipped_steps, launch=launch)
        logger.info("%s on %s, to iteration %d", begins, where, self._total_iterations, extra=mark)

    def skipped(self, result: StepResult, suspect: Suspect | None) -> None:
        """The optimizer skipped a step.

        Args:
            suspect: the tensor that its casts blame, if any. If there is none and the step was sampled, the sample's
                first cast of a value that is not finite is blamed.
        """
        if self._is_writer:
            loss, norm = result.figures.loss, result.figures.grad_norm
            blamed = _blamed(result, suspect)
            place = f", on rank {blamed['rank']}" if "rank" in blamed else ""
            where = f"; {blamed['reason']}: {blamed['tensor']}{place}" if blamed else ""
            mark = event(EventKind.SKIP, iteration=result.iteration, loss=str(loss), grad_norm=str(norm), **blamed)
            logger.warning(
                "iteration %d skipped: loss %g, gradient norm %g%s", result.iteration, loss, norm, where, extra=mark
            )

    def spiked(self, progress: Progress, spike: Spike, suspects: list[str], *, rolls_back: bool) -> str:
        """The loss of a step is a spike; returns the text, on every rank.

        Args:
            progress: with the step.
            suspects: casts that changed before it.
            rolls_back: whether the run goes back to a checkpoint.
        """
        text = (
            f"iteration {progress.iteration}: loss {spike.loss:.4f} is a spike, {spike.deviations:.0f} robust "
            f"deviations above {spike.usual:.4f}; casts that changed before: "
            + (", ".join(suspects) or "none in the samples")
        )
        if self._config.training.rollback_on_loss_spike and not rolls_back:
            text += "; training goes on, as there is no checkpoint of this run to go back to yet"
        if self._is_writer:
            fields = {"loss": spike.loss, "suspects": suspects, "consumed_samples": progress.consumed_samples}
            mark = event(EventKind.SPIKE, iteration=progress.iteration, rollback=rolls_back, **fields)
            logger.warning("%s", text, extra=mark)
        return text

    def save_postponed(self, iteration: int) -> None:
        """A checkpoint is due at a skipped step."""
        if self._is_writer:
            logger.warning("iteration %d was skipped: the checkpoint waits for a finite step", iteration)

    def stopped(self, iteration: int, reason: StopReason) -> None:
        """Training ended as asked, and everything is saved."""
        if self._is_writer:
            mark = event(EventKind.STOP, iteration=iteration, reason=reason.name.lower())
            logger.info(
                "training ends at iteration %d of %d: %s", iteration, self._total_iterations, reason.value, extra=mark
            )

    def step(self, result: StepResult, progress: Progress) -> None:
        """Output one step.

        Args:
            progress: after the step.
        """
        model, world_size = self._config.model, self._topology.world_size
        tokens = result.batch_size * model.seq_length
        rate = tokens / result.step_seconds / world_size
        flops = rate * self._flops_per_token
        self._metrics.log_step(
            StepMetrics(
                **result.figures.as_dict(),
                iteration=result.iteration,
                learning_rate=result.learning_rate,
                tokens_per_second_per_gpu=rate,
                tflops_per_gpu=flops / 1e12,
                mfu=None if self._peak_flops is None else flops / self._peak_flops,
                step_seconds=result.step_seconds,
                skipped_steps=progress.skipped_steps,
                global_batch_size=result.batch_size,
                consumed_samples=progress.consumed_samples,
                consumed_tokens=progress.consumed_samples * model.seq_length,
            ),
            result.layers,
        )

    def health(self, sample: HealthSample) -> None:
        """Output the casts of a sampled step."""
        self._metrics.log_health(sample)

    def evaluation(self, iteration: int, split: str, loss: float) -> None:
        """Output the loss of a held-out split."""
        self._metrics.log_eval(EvalMetrics.from_loss(iteration, split, loss))

    def finish(self, reached: int) -> None:
        """Close the metrics, draw the loss curve, and log a summary.

        Args:
            reached: the iteration that the run stands at.
        """
        if not self._is_writer:
            return
        from ..reporting.plot import plot_losses  # Matplotlib takes half a second, and no other rank draws

        summary = self._metrics.summary(reached=reached)
        self._metrics.close()
        model = self._config.model
        title = f"GPT, {model.num_layers} layers × {model.hidden_size}, {self._config.precision.level}"
        figure = self._session.output_dir / "loss.png"
        with Output(figure).writing():
            plot_losses(self._session.output_dir / METRICS_FILE, figure, title=title)
        logger.info("%s", summary)

    def close(self) -> None:
        """Close the metrics. A run that failed has no summary."""
        self._metrics.close()


def _blamed(result: StepResult, suspect: Suspect | None) -> dict[str, Any]:
    """The fields of a skip's event that say which tensor it is blamed on; empty if that is not known."""
    if suspect is not None:
        return {"tensor": str(suspect.tensor), "rank": suspect.rank, "reason": suspect.reason}
    name = None if result.health is None else result.health.first_non_finite()
    return {} if name is None else {"tensor": f"{_ROLES[name.role]} of {name.layer}", "reason": "not finite"}


class StepOutcomes:
    """Takes the results of every step, one after another. All ranks take the same results.

    Args:
        skipped_steps: steps that the run skipped before this session.
    """

    def __init__(self, config: Config, state: TrainingState, report: RunReport, *, skipped_steps: int) -> None:
        training = config.training
        self._state = state
        self._report = report
        self._slot_names = slot_names_of_ranks(state)
        self._count_of = state.schedule.count_of
        self._guard = NonFiniteGuard(training.max_skipped_steps, num_skipped=skipped_steps)
        self._spikes = SpikeGuard(
            training.loss_spike_threshold, rolls_back=training.rollback_on_loss_spike, report=report.spiked
        )

    @property
    def in_streak(self) -> bool:
        """Whether the last step was skipped."""
        return self._guard.num_consecutive > 0

    @property
    def wants_sample(self) -> bool:
        """Whether the casts of the next step should be sampled (`SpikeGuard.wants_sample`)."""
        return self._spikes.wants_sample

    def take(self, result: StepResult, progress: Progress, *, has_checkpoint: bool) -> Progress:
        """Output a step; returns the progress with it.

        Args:
            progress: before the step.
            has_checkpoint: whether this run has one to go back to.

        Raises:
            ReplicasDiffer: the step compared replicas, and they do.
            TrainingDiverged: too many steps in a row were skipped.
            LossSpike: its loss is one, and the run rolls back.
        """
        self._report.at(result.iteration)
        if result.check is not None:
            result.check.examine()
        if result.skipped:
            self._report.skipped(result, self._suspect(result))
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
