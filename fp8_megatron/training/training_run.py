"""One rank's training run: its steps, validation, checkpoints and the end."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from ..checkpoint.files import CheckpointError
from ..checkpoint.loading import load_checkpoint
from ..checkpoint.run_state import Progress, Resumable
from ..config.checks import ConfigError
from ..config.pipeline_checks import interleaving_problems
from ..config.schedule_checks import batch_problem
from ..config.schema import Config
from ..mcore.runtime import seed_everything
from ..mcore.topology import Topology
from ..quantization.amax_history import MOST_SATURATED
from ..quantization.cast_report import Suspect
from ..reporting.profiling import StepProfiler
from ..reporting.run_log import RunLog
from ..watch.failures import RankWatch
from ..watch.replica_hash import PendingCheck, ReplicaCheck, ReplicasDiffer
from .batches import Batch
from .build import TrainingState, build_training_state, slot_names_of_ranks
from .cast_sampling import CastSampler
from .graph_choice import GraphChoice, documents_fit
from .loss_spikes import LossSpike, SpikeGuard, resumed_after_spikes
from .room import check_memory, check_room
from .run_data import RunData, open_run_data
from .run_events import RunEvents
from .run_report import RunReport, log_settings
from .run_start import RunStart, checkpoint_writer
from .step_results import Mark, PendingStep, StepResult
from .stopping import NonFiniteGuard, SignalHandler, StopReason, TrainingDiverged
from .train_step import evaluate, step_graph, train_step

logger = logging.getLogger(__name__)


class TrainingRun:
    """One rank's state of a run, and its loop of steps."""

    def __init__(
        self,
        config: Config,
        output_dir: Path,
        topology: Topology,
        watch: RankWatch,
        device: torch.device,
        signals: SignalHandler,
        graph_choice: GraphChoice,
        start: RunStart,
        log: RunLog | None,
        *,
        started: float,
        replaces_other_run: bool,
    ) -> None:
        """Args: started: when this session began, on the clock of `time.monotonic`."""
        self.config = config
        self.output_dir = output_dir
        self.topology = topology
        self.watch = watch
        self.signals = signals
        self.start = start
        self.is_writer = topology.rank == 0
        self.events = RunEvents(config, log, is_writer=self.is_writer, world_size=topology.world_size)
        self.batches = config.batch_schedule(topology.world_size)
        if start.source is None:
            self._check_batches(0)
        seed_everything(
            config.training.seed,
            device,
            tensor_parallel_rank=topology.tp.rank(),
            pipeline_rank=topology.pp.rank(),
            records_graphs=graph_choice.records,
        )
        self.data: RunData = open_run_data(config, topology)
        check_memory(config, topology, device, self.data.vocab_size)
        check_room(config, start, topology, self.data.vocab_size)
        if self.is_writer:
            log_settings(config, topology.world_size)
            graph_choice.log()
        self.state: TrainingState = build_training_state(
            config, self.data.vocab_size, topology, device, unpadded_vocab_size=self.data.unpadded_vocab_size
        )
        self.resumable = Resumable(
            config,
            self.state.optimizer,
            self.state.histories,
            topology,
            device,
            vocab_size=self.data.unpadded_vocab_size,
            padded_vocab_size=self.data.vocab_size,
        )
        self.slot_names = slot_names_of_ranks(self.state)
        self.progress = self._resume()
        self.total_iterations = config.train_iters(
            topology.world_size, iteration=self.progress.iteration, consumed_samples=self.progress.consumed_samples
        )
        self.events.total_iterations = self.total_iterations
        self.writer = checkpoint_writer(config, topology, start, self.progress.iteration)
        if self.writer is not None:
            self.writer.prepare(self.resumable)
        self.data = self.data.going_on(self.progress)
        self.guard = NonFiniteGuard(config.training.max_skipped_steps, num_skipped=self.progress.skipped_steps)
        self.spike_guard = SpikeGuard(
            config.training.loss_spike_threshold,
            rolls_back=config.training.rollback_on_loss_spike,
            report=self.events.spiked,
        )
        self.left_out = config.training.left_out
        self.has_checkpoint = start.continues_save  # under --save, of this run
        self.started = started
        self.stop: StopReason | None = None
        records = graph_choice.records and documents_fit(config, self.data.most_documents())
        self.graph = step_graph(self.state, needs_room=graph_choice.needs_room) if records else None
        self.replica_check = _replica_check(config, self.state)
        self.profiler = StepProfiler(config.profile, output_dir, rank=topology.rank, left_out=self.left_out)
        self.profiler.begin(self.progress.iteration)
        self.report = RunReport(
            config,
            output_dir,
            topology,
            device,
            vocab_size=self.data.vocab_size,
            resume_iteration=self.progress.iteration,
            total_iterations=self.total_iterations,
            replaces_other_run=replaces_other_run,
        )
        self.report.start(self.state)

    def train(self) -> None:
        """Train, validate and save. A save in the background has finished when this returns."""
        source = self.start.source
        self.events.started(
            self.progress.iteration,
            skipped_steps=self.progress.skipped_steps,
            weights_of=None if source is None else source.root,
        )
        try:
            self._loop()
        except (TrainingDiverged, LossSpike, ReplicasDiffer):
            with suppress(CheckpointError):
                self._finish_saving()
            raise
        self.profiler.finish(self.progress.iteration)
        try:
            self._finish_saving()
            self.events.stopped(self.progress.iteration, self._stop_reason())
        finally:
            self.report.finish()

    def _loop(self) -> None:
        training, checkpoint, total = self.config.training, self.config.checkpoint, self.total_iterations
        first = self.progress.iteration + 1
        consumed_samples = self.progress.consumed_samples  # of the steps that are queued
        pending: PendingStep | None = None
        saved_at, validated_at = self.progress.iteration, None
        loader: Iterator[Batch] | None = None  # opened where training begins, and again behind what is left out
        if first > total and self.is_writer:
            length = "--train-samples" if self.config.counts_samples else "--train-iters"
            logger.warning("nothing is left to train: iteration %d, %s %d", first - 1, length, self.config.train_counts)
        due: list[int] = []  # iterations whose checkpoint is to be saved
        end_is_due = False
        mark = Mark(self.state.device)
        for iteration in range(first, total + 1):
            if iteration in self.left_out and pending is not None:
                self._record(pending.result())
                pending = None
                if self.stop is not None:
                    break
            self.watch.at(iteration, "training")
            batch_size = self.batches.batch_size(consumed_samples)
            consumed_samples += batch_size
            # Both come after the next step, if this one is left out.
            due += [iteration] if checkpoint.saves_at(iteration) else []
            end_is_due |= training.exit_interval is not None and iteration % training.exit_interval == 0
            if iteration in self.left_out:
                self._leave_out(iteration, batch_size, is_first=loader is not None or iteration == first)
                loader = None
                continue
            if loader is None:
                loader = self.data.train_loader(
                    self.progress.consumed_samples,
                    starts_over=self.progress.left_out_samples > 0,
                    records=self.graph is not None,
                )
                mark = Mark(self.state.device)
            queued = self._queue_step(iteration, loader, mark, batch_size=batch_size, is_saved=bool(due) or end_is_due)
            mark = queued.ended
            if pending is not None:
                self._record(pending.result())
            pending = queued
            evaluates = training.eval_interval > 0 and iteration % training.eval_interval == 0
            if evaluates or due or self.stop is not None or end_is_due or iteration == total:
                self._record(pending.result())
                pending = None
            # Inside a streak of skipped steps nothing is saved: a restart then goes back to before it.
            saves = bool(due) and self.guard.num_consecutive == 0
            if due and not saves:
                self.events.save_postponed(iteration)
            if evaluates:
                self._evaluate("valid")
                validated_at = iteration
            if saves:
                self._save(due)
                saved_at, due = iteration, []
            if evaluates or saves:
                mark = Mark(self.state.device)
            if self.stop is not None or end_is_due:
                break
        if checkpoint.save is not None and self.progress.iteration > saved_at:
            self._save(due)
        if self.progress.iteration >= total:
            if training.eval_interval > 0 and validated_at != self.progress.iteration:
                self._evaluate("valid")
            self._evaluate("test")

    def _queue_step(
        self, iteration: int, loader: Iterator[Batch], since: Mark, *, batch_size: int, is_saved: bool
    ) -> PendingStep:
        """Launch one step. Its numbers are on the device until somebody asks for the result.

        Args:
            since: where the time of the step begins.
            is_saved: whether a checkpoint of this step, or the end of the run, is due.
        """
        learning_rate = self.state.schedule.learning_rate
        self.profiler.before(iteration)
        check = self._new_check(iteration, is_saved=is_saved)
        sampler = self._sampler_of(iteration)
        values = train_step(
            self.state,
            loader,
            stop=self._own_stop(),
            num_micro_batches=batch_size // self.state.samples_per_micro_batch,
            measures_underflow=iteration % self.config.logging.log_interval == 0,
            samples_casts=sampler is not None,
            graph=self.graph,
            before_update=None if check is None else check.start,
        )
        self.profiler.after(iteration)
        sample = None if sampler is None else sampler.collect(iteration)
        return PendingStep(
            iteration,
            learning_rate,
            values,
            since,
            check,
            sample,
            num_chunks=len(self.state.histories),
            batch_size=batch_size,
        )

    def _leave_out(self, iteration: int, batch_size: int, *, is_first: bool) -> None:
        """Pass over an iteration of --iterations-to-skip and its data. The schedule stays where it is, as in Megatron.

        Args:
            is_first: of those in a row, which one line of the log names together.
        """
        if is_first and self.is_writer:
            last = iteration
            while last + 1 in self.left_out and last < self.total_iterations:
                last += 1
            which = f"iteration {iteration} is" if last == iteration else f"iterations {iteration} to {last} are"
            logger.info("%s left out with the data, as --iterations-to-skip asks", which)
        consumed_samples = self.progress.consumed_samples + batch_size
        self.progress = replace(self.progress, iteration=iteration, consumed_samples=consumed_samples)

    def close(self) -> None:
        """Close every log; release what must not outlive the process groups."""
        if self.graph is not None:
            self.graph.release()
        self.report.close()

    def _own_stop(self) -> StopReason | None:
        """What this rank asks to stop for; the ranks agree in the next step."""
        received = self.signals.received()  # every rank asks, as its contract says
        if self.start.lock is not None and self.start.lock.lost:  # a save would fail
            return StopReason.LOST_FOLDER
        if received:
            return StopReason.SIGNAL
        limit = self.config.training.exit_duration_in_mins
        is_out_of_time = limit is not None and time.monotonic() - self.started > 60.0 * limit
        return StopReason.DURATION if is_out_of_time else None

    def _new_check(self, iteration: int, *, is_saved: bool) -> PendingCheck | None:
        """The comparison of replicas in this step; None if it has none. What is saved has been compared."""
        if self.replica_check is None:
            return None
        interval = self.config.training.check_weight_hash_across_dp_replicas_interval
        assert interval is not None
        is_last = all(later in self.left_out for later in range(iteration + 1, self.total_iterations + 1))
        return PendingCheck(self.replica_check) if iteration % interval == 0 or is_saved or is_last else None

    def _sampler_of(self, iteration: int) -> CastSampler | None:
        """What samples the casts of this step; None if they are not sampled."""
        interval = self.config.logging.fp8_health_interval
        is_due = interval > 0 and (iteration % interval == 0 or self.spike_guard.wants_sample)
        return self.state.sampler if is_due else None

    def _stop_reason(self) -> StopReason:
        if self.progress.iteration >= self.total_iterations:
            return StopReason.DONE
        return self.stop or StopReason.INTERVAL

    def _record(self, result: StepResult) -> None:
        self.stop = self.stop or result.stop
        self.events.at(result.iteration)
        if result.check is not None:
            result.check.examine()
        if result.skipped:
            self.events.skipped(result, self._suspect(result))
        if result.health is not None:
            self.report.health(result.health)
            self.spike_guard.sampled(result.health)
        try:
            self.guard.update(result.skipped, iteration=result.iteration)
        except TrainingDiverged as error:
            raise TrainingDiverged(f"{error}\n{self._where_not_finite()}") from None
        self.progress = replace(
            self.progress,
            iteration=result.iteration,
            consumed_samples=self.progress.consumed_samples + result.batch_size,
            skipped_steps=self.guard.num_skipped,
            scheduled_samples=(self.progress.scheduled_samples or 0) + result.batch_size,
        )
        self.report.step(result, self.progress)
        self.spike_guard.examine(
            self.progress, result.figures.loss, result.figures.grad_norm, has_checkpoint=self.has_checkpoint
        )

    def _suspect(self, result: StepResult) -> Suspect | None:
        """The tensor that a skipped step is blamed on, if its casts know one."""
        report = result.cast_report
        return None if report is None else report.suspect(self.slot_names, most_saturated=MOST_SATURATED)

    def _where_not_finite(self) -> str:
        names = [name for buffer in self.state.optimizer.buffers for name in buffer.non_finite_slots()]
        if not names:
            others = "a gradient of another rank, " if self.topology.world_size > 1 else ""
            return (
                f"no gradient on rank {self.topology.rank} holds a NaN or inf, so {others}the loss or a cast does: see "
                f"the lines of the skipped steps"
            )
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        return f"gradients with a NaN or inf on rank {self.topology.rank}: {shown}"

    def _evaluate(self, split: str) -> None:
        """Report the losses of a split. A request to stop ends it without those that are not known yet."""
        for one in self.data.evaluations(split):
            if self.stop is not None:
                return
            self.watch.at(self.progress.iteration, "evaluating")
            loss, self.stop = evaluate(
                self.state, one.loader, one.num_batches, over_tokens=one.is_whole, own_stop=self._own_stop
            )
            if self.stop is None:
                self.report.evaluation(self.progress.iteration, one.name, loss)
            elif self.is_writer:
                logger.warning("the evaluation (%s) is given up, because %s", one.name, self.stop.value)

    def _resume(self) -> Progress:
        source, schedule = self.start.source, self.state.schedule
        if source is None:
            return Progress(scheduled_samples=0, schedule=schedule.as_saved())
        progress = load_checkpoint(source.root, self.resumable, source.options)
        if progress is None:
            raise CheckpointError(f"the checkpoints under {source.root} were removed while the run started")
        schedule.resume(progress, quiet=not self.is_writer)
        progress = replace(progress, scheduled_samples=schedule.counted_samples, schedule=schedule.as_saved())
        if self.start.continues_save:
            progress = resumed_after_spikes(progress, self.output_dir, self.topology, self.start.identity.run)
        self._check_batches(progress.consumed_samples)
        if self.is_writer:
            if source.options.finetune:
                logger.info("took the weights of %s", source.root)
            else:
                logger.info("resumed from %s at iteration %d", source.root, progress.iteration)
        return progress

    def _check_batches(self, consumed_samples: int) -> None:
        """Check that ranks and stages can take the batches to come. With --load, `check_config` knows the last alone.

        Raises:
            ConfigError: they cannot.
        """
        steps = self.batches, self.config, self.topology.world_size, consumed_samples
        problem = batch_problem(*steps) or next(interleaving_problems(*steps), None)
        if problem is not None:
            raise ConfigError(f"after {consumed_samples} samples: {problem}" if consumed_samples else problem)

    def _save(self, due: Sequence[int]) -> None:
        if self.writer is None:
            return
        with self.watch.patiently("saving a checkpoint"):
            seconds = self.writer.save(self.resumable, self.progress, due=due)
        self.has_checkpoint = True
        if self.is_writer and self.config.checkpoint.async_save:
            logger.info("saving iteration %d; training stood still for %.2f s", self.progress.iteration, seconds)

    def _finish_saving(self) -> None:
        if self.writer is not None:
            with self.watch.patiently("waiting for a checkpoint"):
                self.writer.finish()


def _replica_check(config: Config, state: TrainingState) -> ReplicaCheck | None:
    """The comparison of replicas, with --check-weight-hash-across-dp-replicas-interval. Collective."""
    topology = state.topology
    if config.training.check_weight_hash_across_dp_replicas_interval is None or topology.world is None:
        return None
    return ReplicaCheck(
        state.optimizer,
        state.histories,
        stage_group=topology.stage_group,
        world=topology.world,
        device=state.device,
    )
