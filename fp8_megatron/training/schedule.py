"""The schedule of learning rate and weight decay, and how a resumed run follows it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from ..checkpoint.run_state import Progress
from ..config.checks import ConfigError
from ..config.learning_rate import LearningRateSchedule, scaled
from ..config.schema import Config
from ..update_rules import Rate

logger = logging.getLogger(__name__)


def build_scheduler(optimizer: Any, schedule: LearningRateSchedule) -> OptimizerParamScheduler:
    """megatron-core's schedule. It counts samples: ``step(count)`` after every step.

    Args:
        optimizer: any object with torch's `param_groups`; the schedule writes `lr` and `weight_decay` into them.
    """
    return OptimizerParamScheduler(
        optimizer,
        init_lr=schedule.warmup_init,
        max_lr=schedule.lr,
        min_lr=schedule.min_lr,
        lr_warmup_steps=schedule.warmup_samples,  # not whole for a fraction, in Megatron too
        lr_decay_steps=schedule.decay_samples,
        lr_decay_style=schedule.decay_style,
        start_wd=schedule.start_weight_decay,
        end_wd=schedule.end_weight_decay,
        wd_incr_steps=schedule.weight_decay_incr_samples,
        wd_incr_style=schedule.weight_decay_incr_style,
        wsd_decay_steps=schedule.wsd_decay_samples,
        lr_wsd_decay_style=schedule.wsd_decay_style,
    )


class RunSchedule:
    """The schedule of a run: how many samples it has counted, and the rates that follow.

    Attributes:
        counted_samples: samples that moved the schedule; data that was left out did not.
    """

    def __init__(self, optimizer: Any, config: Config, world_size: int) -> None:
        self._optimizer = optimizer
        self._config = config
        self._batch_size = config.global_batch_size(world_size)
        self._schedule = LearningRateSchedule.of(config, world_size)
        self._scheduler = build_scheduler(optimizer, self._schedule)

    @property
    def counted_samples(self) -> int:
        """Samples that moved the schedule; data that was left out did not."""
        return int(self._scheduler.num_steps)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step, without --decoupled-lr and muP: a stage may hold an embedding alone."""
        return float(self._scheduler.get_lr({}))

    def count_of(self, batch_size: int) -> int:
        """What a step on `batch_size` samples counts for. With --train-iters all steps count alike."""
        return batch_size if self._config.counts_samples else self._batch_size

    def step(self, batch_size: int) -> None:
        """A step has trained on `batch_size` samples: set the rates of the next one."""
        self._scheduler.step(self.count_of(batch_size))

    def as_saved(self) -> dict[str, Any]:
        """What a checkpoint holds of the schedule beside its place."""
        return {**self._schedule.as_saved(), "global_batch_size": self._batch_size}

    def resume(self, progress: Progress, *, quiet: bool = False) -> None:
        """Go to the place of a checkpoint.

        The flags say which schedule the run follows from there, and a warning names what differs from the
        checkpoint's. With --use-checkpoint-opt_param-scheduler it is the checkpoint's;
        --override-opt_param-scheduler gives no warning.

        Raises:
            ConfigError: the checkpoint's is asked for, and it holds none, as Megatron-LM's.
        """
        saved = dict(progress.schedule)
        if saved and not self._config.counts_samples:
            saved = scaled(saved, self._batch_size, saved["global_batch_size"])
        takes_saved = self._config.optimizer.use_checkpoint_opt_param_scheduler
        if takes_saved and progress.iteration > 0 and not saved:
            raise ConfigError(
                f"use_checkpoint_opt_param_scheduler: the checkpoint of iteration {progress.iteration} does not say "
                f"which schedule it followed; drop it, and give the schedule's flags"
            )
        if takes_saved and saved:
            self._follow(self._schedule.with_saved(saved))
        elif not quiet and not self._config.optimizer.override_opt_param_scheduler:
            self._warn(saved)
        self._scheduler.step(self._place(progress) - self.counted_samples)

    def _place(self, progress: Progress) -> int:
        """Where the schedule stands, in samples of this run's batches."""
        if progress.scheduled_samples is None:  # saved by an earlier version: every step had one batch
            return progress.iteration * self._batch_size
        if self._config.counts_samples or not progress.schedule:
            return progress.scheduled_samples
        return progress.scheduled_samples * self._batch_size // int(progress.schedule["global_batch_size"])

    def _follow(self, schedule: LearningRateSchedule) -> None:
        set_peaks(self._optimizer, schedule)
        self._schedule = schedule
        self._scheduler = build_scheduler(self._optimizer, schedule)

    def _warn(self, saved: Mapping[str, Any]) -> None:
        differing = self._schedule.differences(saved)
        if differing:
            logger.warning(
                "the schedule is not the checkpoint's (%s); --use-checkpoint-opt_param-scheduler keeps that one, "
                "--override-opt_param-scheduler gives no warning",
                ", ".join(differing),
            )


def set_peaks(optimizer: Any, schedule: LearningRateSchedule) -> None:
    """Set the peak and the end of the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["max_lr"], group["min_lr"] = Rate(group["is_decoupled_lr"], group["lr_mult"]).ends(schedule)
