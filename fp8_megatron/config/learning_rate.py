"""The schedule of learning rate and weight decay that a configuration asks for, counted in samples as in Megatron."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

from .schema import Config

#: Settings that --train-iters scales with the global batch.
_COUNTS = ("warmup_samples", "decay_samples", "wsd_decay_samples", "weight_decay_incr_samples")


@dataclass(frozen=True)
class LearningRateSchedule:
    """What megatron-core's ``OptimizerParamScheduler`` takes. Counts are samples.

    Attributes:
        lr: the peak. min_lr: the end of the decay. decoupled_lr, decoupled_min_lr: those of embedding and output layer;
            None: as for all.
        warmup_samples: linear warm-up from `warmup_init`; a fraction of the decay need not be whole.
        decay_samples: where the decay ends. wsd_decay_samples: WSD's final decay.
        weight_decay_incr_samples: where weight decay reaches `end_weight_decay`.
    """

    lr: float
    min_lr: float
    decoupled_lr: float | None
    decoupled_min_lr: float | None
    warmup_init: float
    warmup_samples: float
    decay_samples: int
    decay_style: str
    wsd_decay_samples: int | None
    wsd_decay_style: str
    start_weight_decay: float
    end_weight_decay: float
    weight_decay_incr_samples: int
    weight_decay_incr_style: str

    @classmethod
    def of(cls, config: Config, world_size: int) -> LearningRateSchedule:
        """The schedule of a checked configuration.

        With --train-iters, every step counts as many samples as the largest global batch has.
        """
        optimizer = config.optimizer
        unit = config.samples_per_count(world_size)
        decay = optimizer.decay_counts(config.train_counts) * unit
        wsd = optimizer.lr_wsd_decay_samples if config.counts_samples else optimizer.lr_wsd_decay_iters
        constant = optimizer.weight_decay_incr_style == "constant"
        start, end = optimizer.start_weight_decay, optimizer.end_weight_decay
        return cls(
            lr=optimizer.lr,
            min_lr=optimizer.min_lr,
            decoupled_lr=optimizer.decoupled_lr,
            decoupled_min_lr=optimizer.decoupled_min_lr,
            warmup_init=optimizer.lr_warmup_init,
            warmup_samples=_warmup_samples(config, world_size, decay),
            decay_samples=decay,
            decay_style=optimizer.lr_decay_style,
            wsd_decay_samples=None if wsd is None else wsd * unit,
            wsd_decay_style=optimizer.lr_wsd_decay_style,
            start_weight_decay=optimizer.weight_decay if constant or start is None else start,
            end_weight_decay=optimizer.weight_decay if constant or end is None else end,
            weight_decay_incr_samples=config.train_counts * unit,
            weight_decay_incr_style=optimizer.weight_decay_incr_style,
        )

    def as_saved(self) -> dict[str, Any]:
        """The settings by name, for a checkpoint."""
        return asdict(self)

    def with_saved(self, saved: Mapping[str, Any]) -> Self:
        """This schedule with those settings that a checkpoint names."""
        names = {field.name for field in fields(self)}
        return replace(self, **{name: value for name, value in saved.items() if name in names})

    def differences(self, saved: Mapping[str, Any]) -> list[str]:
        """``name saved → own`` for each setting that differs from a checkpoint's."""
        own = self.as_saved()
        return [f"{name} {saved[name]} → {own[name]}" for name in own if name in saved and saved[name] != own[name]]


def schedule_notes(config: Config, world_size: int) -> Iterator[str]:
    """One line for each count that is cut: samples that no step trains on, and a warm-up longer than the run; and for
    updates that no width leaves alike under muP, and an overlap of micro-batches where a step has one."""
    samples, batches = config.training.train_samples, config.batch_schedule(world_size)
    if samples is not None and not batches.is_constant:
        rest = samples - batches.num_samples(batches.num_steps(samples))
        if rest:
            yield f"train_samples({samples}): the last {rest} samples fill no global batch and are not trained"
    unit, (asked_by, length) = "steps", ("lr_warmup_iters", "train_iters")
    if config.counts_samples:
        unit, (asked_by, length) = "samples", ("lr_warmup_samples", "train_samples")
    asked = config.optimizer.warmup_counts(config.counts_samples)
    count = LearningRateSchedule.of(config, world_size).warmup_samples / config.samples_per_count(world_size)
    if count < asked:
        yield (
            f"{asked_by}({asked}) does not fit into {length}({config.train_counts}): the warm-up is cut to {count:.0f} "
            f"{unit}"
        )
    optimizer = config.optimizer
    if config.model.use_mup and optimizer.optimizer == "muon" and optimizer.muon_scale_mode == "spectral":
        yield "muon_scale_mode(spectral) makes updates grow with the width: with use_mup give unit_rms_norm"
    if config.parallel.overlap_moe_expert_parallel_comm and config.num_micro_batches(world_size) == 1:
        yield (
            "overlap_moe_expert_parallel_comm has no effect with one micro-batch a step; drop it or raise "
            "--global-batch-size"
        )


def scaled(saved: Mapping[str, Any], batch_size: int, saved_batch_size: int) -> dict[str, Any]:
    """A checkpoint's settings for another global batch, where the schedule counts steps."""
    counts = {name: saved[name] * batch_size / saved_batch_size for name in _COUNTS if saved.get(name) is not None}
    return {**saved, **{name: int(count) if count.is_integer() else count for name, count in counts.items()}}


def _warmup_samples(config: Config, world_size: int, decay_samples: int) -> float:
    """Samples of the warm-up, always fewer than the decay's.

    A warm-up that does not fit into the run ends one batch before the last.
    """
    optimizer = config.optimizer
    if optimizer.lr_warmup_fraction is not None:
        return optimizer.lr_warmup_fraction * decay_samples
    given = optimizer.warmup_counts(config.counts_samples) * config.samples_per_count(world_size)
    return min(given, max(0, decay_samples - config.global_batch_size(world_size)))
