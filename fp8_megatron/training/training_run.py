"""One rank's training run: its steps, validation, checkpoints and the end."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

from ..checkpoint.files import CheckpointError
from ..checkpoint.run_state import Progress
from ..config.checks import check_batches
from ..config.schema import Config
from ..device.memory import Mark
from ..mcore.runtime import seed_everything
from ..reporting.profiling import StepProfiler
from ..watch.replica_hash import PendingCheck, ReplicasDiffer
from .batches import Batch
from .build import TrainingState, build_replica_check, build_training_state
from .cast_sampling import CastSampler
from .evaluation import evaluate_split
from .fallback import RecipeFallback
from .loss_spikes import LossSpike, resumed_after_spikes
from .run_data import RunData, open_run_data
from .run_report import RunReport, StepOutcomes, log_settings
from .run_start import Session, check_disk, check_memory, checkpoint_writer, warn_of_another_order
from .step_results import PendingStep
from .stopping import StopReason, TrainingDiverged
from .train_step import step_graph, train_step

logger = logging.getLogger(__name__)


@dataclass
class LoopState:
    """Where the loop stands, ahead of the results that `TrainingRun.progress` includes.

    Attributes:
        first: the first iteration of this session.
        consumed_samples: with those of the step whose results are pending.
        mark: where the time of the next step begins.
        saved_at: the iteration of the newest checkpoint.
        validated_at: the iteration of the last validation; None: there was none in this session.
        loader: None where training begins, and behind what is left out.
        pending: the step that is queued, until its results are read.
        due: iterations whose checkpoint is to be saved.
        end_is_due: whether --exit-interval is reached.
    """

    first: int
    consumed_samples: int
    mark: Mark
    saved_at: int
    validated_at: int | None = None
    loader: Iterator[Batch] | None = None
    pending: PendingStep | None = None
    due: list[int] = field(default_factory=list)
    end_is_due: bool = False


class TrainingRun:
    """One rank's state of a run, and its loop of steps."""

    def __init__(self, config: Config, session: Session) -> None:
        topology, start = session.topology, session.start
        self.config, self.session = config, session
        self.topology, self.start, self.watch = topology, start, session.watch
        self.is_writer = topology.rank == 0
        self.batches = config.batch_schedule(topology.world_size)
        self.left_out = config.training.left_out
        self.stop: StopReason | None = None
        if start.source is None:
            check_batches(config, topology.world_size, 0)  # with --load, `check_config` knew the last one alone
        seed_everything(
            config.training.seed,
            session.device,
            tensor_parallel_rank=topology.tp.rank(),
            pipeline_rank=topology.pp.rank(),
            records_graphs=session.graph_choice.records,
        )
        data = open_run_data(config, topology)
        self._check_and_log_settings(data.padded_vocab_size)
        unpadded = data.unpadded_vocab_size
        self.state: TrainingState = build_training_state(
            config, data.padded_vocab_size, topology, session.device, unpadded_vocab_size=unpadded
        )
        self.resumable = self.state.resumable(unpadded)
        progress = self._resume()
        self.writer = checkpoint_writer(config, topology, start, progress.iteration)
        if self.writer is not None:
            self.writer.prepare(self.resumable)
        self.has_checkpoint = start.continues_save  # under --save, of this run
        self.data: RunData = data.going_on(progress)
        self.progress = replace(progress, consumed_valid_samples=self.data.validated_samples(progress))
        self.total_iterations = config.train_iters(
            topology.world_size, iteration=progress.iteration, consumed_samples=progress.consumed_samples
        )
        self.graph = step_graph(self.state, session.graph_choice, most_documents=self.data.most_documents)
        self.replica_check = build_replica_check(self.state)
        self.profiler = StepProfiler(config.profile, session.output_dir, rank=topology.rank, left_out=self.left_out)
        self.profiler.begin(progress.iteration)
        self.report = RunReport(
            config,
            session,
            padded_vocab_size=self.data.padded_vocab_size,
            progress=progress,
            total_iterations=self.total_iterations,
        )
        self.report.settings(self.state)
        self.outcomes = StepOutcomes(config, self.state, self.report, skipped_steps=progress.skipped_steps)
        self.fallback = RecipeFallback(self.state, iteration=progress.iteration)

    def _check_and_log_settings(self, padded_vocab_size: int) -> None:
        """Check that the run fits into memory and onto the disk, and log what it is."""
        config, topology = self.config, self.topology
        check_memory(config, topology, self.session.device, padded_vocab_size)
        check_disk(config, self.start, topology, padded_vocab_size)
        if self.is_writer:
            log_settings(config, topology.world_size)
            self.session.graph_choice.log()

    def train(self) -> None:
        """Train, validate and save. A save in the background has finished when this returns."""
        self.report.started(self.progress.iteration, skipped_steps=self.progress.skipped_steps)
        try:
            self._loop()
        except (TrainingDiverged, LossSpike, ReplicasDiffer):
            with suppress(CheckpointError):
                self._finish_saving()
            raise
        self.profiler.finish(self.progress.iteration)
        try:
            self._finish_saving()
            self.report.stopped(self.progress.iteration, self._stop_reason())
        finally:
            self.report.finish(self.progress.iteration)

    def _loop(self) -> None:
        self.loop = LoopState(
            first=self.progress.iteration + 1,
            consumed_samples=self.progress.consumed_samples,
            mark=Mark(self.state.device),
            saved_at=self.progress.iteration,
        )
        self._warn_if_nothing_is_left()
        for iteration in range(self.loop.first, self.total_iterations + 1):
            if iteration in self.left_out:
                self._read_pending()
                if self.stop is not None:
                    break
                self._leave_out(iteration)
                continue
            self._step(iteration)
            self._validate_and_save(iteration)
            if self.stop is not None or self.loop.end_is_due:
                break
        self._end()
        self.loop.loader = None  # its workers end

    def _warn_if_nothing_is_left(self) -> None:
        if self.loop.first > self.total_iterations and self.is_writer:
            length = "--train-samples" if self.config.counts_samples else "--train-iters"
            reached = self.progress.iteration
            logger.warning("nothing is left to train: iteration %d, %s %d", reached, length, self.config.train_counts)

    def _step(self, iteration: int) -> None:
        """Queue one step, then read the results of the one before; its own, too, if the next one depends on them."""
        queued = self._queue_step(iteration, self._begin(iteration))
        self._read_pending()
        self.loop.pending = queued
        if self.fallback.decides_after(iteration):
            self._read_pending()

    def _begin(self, iteration: int) -> int:
        """Count an iteration and what is due after it. Returns its global batch size, in samples.

        What is due after an iteration that is left out comes after the next step.
        """
        self.watch.at(iteration, "training")
        batch_size = self.batches.batch_size(self.loop.consumed_samples)
        self.loop.consumed_samples += batch_size
        if self.config.checkpoint.saves_at(iteration):
            self.loop.due.append(iteration)
        exit_interval = self.config.training.exit_interval or 0
        self.loop.end_is_due |= exit_interval > 0 and iteration % exit_interval == 0
        return batch_size

    def _queue_step(self, iteration: int, batch_size: int) -> PendingStep:
        """Launch one step. Its numbers are on the device until somebody asks for the result."""
        loop = self.loop
        if loop.loader is None:
            loop.loader = self.data.train_loader(
                self.progress.consumed_samples,
                starts_over=self.progress.left_out_samples > 0,
                records=self.graph is not None,
            )
            loop.mark = Mark(self.state.device)
        self.fallback.before(iteration)
        learning_rate = self.state.schedule.learning_rate
        self.profiler.before(iteration)
        check = self._new_check(iteration)
        sampler = self._sampler_of(iteration)
        num_micro_batches = batch_size // self.state.samples_per_micro_batch
        values = train_step(
            self.state,
            loop.loader,
            stop=self._own_stop(),
            num_micro_batches=num_micro_batches,
            measures_underflow=iteration % self.config.logging.log_interval == 0,
            samples_casts=sampler is not None,
            graph=self.graph,
            before_update=None if check is None else check.start,
        )
        self.profiler.after(iteration)
        queued = PendingStep(
            iteration,
            learning_rate,
            values,
            loop.mark,
            check,
            None if sampler is None else sampler.collect(iteration),
            num_chunks=len(self.state.histories),
            layer_table=self.state.layer_table,
            num_micro_batches=num_micro_batches,
            batch_size=batch_size,
        )
        loop.mark = queued.ended
        return queued

    def _read_pending(self) -> None:
        """Wait for the queued step, if there is one, and record its results."""
        pending, self.loop.pending = self.loop.pending, None
        if pending is None:
            return
        result = pending.result()
        self.stop = self.stop or result.stop
        self.progress = self.outcomes.take(result, self.progress, has_checkpoint=self.has_checkpoint)
        if result.health is not None:
            self.fallback.sampled(result.health)

    def _validate_and_save(self, iteration: int) -> None:
        """Do what is due after a step. If something is, or the run ends, its results are read first."""
        loop, interval = self.loop, self.config.training.eval_interval
        validates = interval > 0 and iteration % interval == 0
        ends = self.stop is not None or loop.end_is_due or iteration == self.total_iterations
        if not (validates or loop.due or ends):
            return
        self._read_pending()
        # Inside a streak of skipped steps nothing is saved: a restart then goes back to before it.
        saves = bool(loop.due) and not self.outcomes.in_streak
        if loop.due and not saves:
            self.report.save_postponed(iteration)
        if validates:
            self._validate()
            loop.validated_at = iteration
        if saves:
            self._save()
        if validates or saves:
            loop.mark = Mark(self.state.device)

    def _leave_out(self, iteration: int) -> None:
        """Pass over an iteration of --iterations-to-skip and its data. As in Megatron, the schedule stands still."""
        batch_size = self._begin(iteration)
        is_first_of_several = self.loop.loader is not None or iteration == self.loop.first
        if is_first_of_several and self.is_writer:  # one line of the log names all of them
            last = iteration
            while last + 1 in self.left_out and last < self.total_iterations:
                last += 1
            which = f"iteration {iteration} is" if last == iteration else f"iterations {iteration} to {last} are"
            logger.info("%s left out with the data, as --iterations-to-skip asks", which)
        self.loop.loader = None
        consumed_samples = self.progress.consumed_samples + batch_size
        self.progress = replace(self.progress, iteration=iteration, consumed_samples=consumed_samples)

    def _end(self) -> None:
        """Save what no checkpoint has yet. Behind the last iteration, validate and test."""
        reached = self.progress.iteration
        if self.config.checkpoint.save is not None and reached > self.loop.saved_at:
            self._save()
        if reached >= self.total_iterations:
            if self.config.training.eval_interval > 0 and self.loop.validated_at != reached:
                self._validate()
            self._evaluate("test")

    def close(self) -> None:
        """Close every log; release what must not outlive the process groups."""
        if self.graph is not None:
            self.graph.release()
        self.report.close()

    def _own_stop(self) -> StopReason | None:
        """What this rank asks to stop for; the ranks agree in the next step."""
        received = self.session.signals.received()
        if self.start.lock is not None and self.start.lock.lost:  # a save would fail
            return StopReason.LOST_FOLDER
        if received:
            return StopReason.SIGNAL
        limit = self.config.training.exit_duration_in_mins or 0.0
        is_out_of_time = limit > 0 and time.monotonic() - self.session.started > 60.0 * limit
        return StopReason.DURATION if is_out_of_time else None

    def _new_check(self, iteration: int) -> PendingCheck | None:
        """The comparison of replicas in this step; None if it has none. What is saved has been compared."""
        if self.replica_check is None:
            return None
        interval = self.config.training.check_weight_hash_across_dp_replicas_interval
        assert interval is not None
        is_last = all(later in self.left_out for later in range(iteration + 1, self.total_iterations + 1))
        is_saved = bool(self.loop.due) or self.loop.end_is_due
        return PendingCheck(self.replica_check) if iteration % interval == 0 or is_saved or is_last else None

    def _sampler_of(self, iteration: int) -> CastSampler | None:
        """What samples the casts of this step; None if they are not sampled."""
        interval = self.config.logging.fp8_health_interval
        is_due = interval > 0 and (iteration % interval == 0 or self.outcomes.wants_sample)
        return self.state.sampler if is_due else None

    def _stop_reason(self) -> StopReason:
        if self.progress.iteration >= self.total_iterations:
            return StopReason.DONE
        return self.stop or StopReason.INTERVAL

    def _validate(self) -> None:
        """Report the losses of the validation data, and move on.

        A validation that is given up moves on, too: a resumed run reads the same as one that was not interrupted.
        """
        self._evaluate("valid", self.progress.consumed_valid_samples)
        behind = self.progress.consumed_valid_samples + self.data.samples_of_a_validation
        self.progress = replace(self.progress, consumed_valid_samples=behind)

    def _evaluate(self, split: str, consumed_samples: int = 0) -> None:
        """Report the losses of a split."""
        if self.stop is None:
            reached = self.progress.iteration
            self.stop = evaluate_split(
                *(self.state, self.data, split),
                consumed_samples=consumed_samples,
                before_each=lambda: self.watch.at(reached, "evaluating"),
                report=lambda name, loss: self.report.evaluation(reached, name, loss),
                own_stop=self._own_stop,
            )

    def _resume(self) -> Progress:
        source, schedule = self.start.source, self.state.schedule
        if source is None:
            return Progress(scheduled_samples=0, schedule=schedule.as_saved())
        progress = source.load(self.resumable)
        schedule.resume(progress, quiet=not self.is_writer)
        progress = replace(progress, scheduled_samples=schedule.counted_samples, schedule=schedule.as_saved())
        if self.start.continues_save:
            progress = resumed_after_spikes(progress, self.session.output_dir, self.topology, self.start.identity.run)
        check_batches(self.config, self.topology.world_size, progress.consumed_samples)
        if self.is_writer:
            if source.options.finetune:
                logger.info("took the weights of %s", source.root)
            else:
                logger.info("resumed from %s at iteration %d", source.root, progress.iteration)
                warn_of_another_order(self.config, source, progress)
        return progress

    def _save(self) -> None:
        due, self.loop.due = self.loop.due, []
        self.loop.saved_at = self.progress.iteration
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
