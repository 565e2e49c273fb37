"""Checks of a run's length, of its batches, and of its schedules of learning rate and weight decay."""

from __future__ import annotations

from collections.abc import Iterator

from .batch_schedule import BatchSchedule
from .fields import MAX_COUNT
from .learning_rate import LearningRateSchedule
from .schema import Config
from .words import flag_name, shortened, whole_number

#: The settings that count steps, and those that count samples.
_BY_STEPS = ("train_iters", "lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters")
_BY_SAMPLES = ("train_samples", "lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_samples")


def schedule_problems(config: Config, world_size: int) -> Iterator[str]:
    """One line for each problem: what cannot work, the values, the fix.

    The batches must have been read (`Config.batch_schedule`).
    """
    units = list(_check_units(config))
    yield from units
    if units:
        return
    schedule = LearningRateSchedule.of(config, world_size)
    yield from _check_length(config, world_size)
    yield from _check_warmup(config)
    yield from _check_decay(config, schedule, world_size)
    yield from _check_weight_decay(config)
    yield from _check_skipped(config, world_size)
    if config.optimizer.override_opt_param_scheduler and config.optimizer.use_checkpoint_opt_param_scheduler:
        yield "override_opt_param_scheduler and use_checkpoint_opt_param_scheduler contradict each other; drop one"


def batch_problem(batches: BatchSchedule, config: Config, world_size: int, consumed_samples: int = 0) -> str | None:
    """Why ranks cannot share a batch of the steps after `consumed_samples` evenly; None if they can."""
    micro, replicas = config.training.micro_batch_size, config.data_parallel_size(world_size)
    samples = micro * replicas
    for batch in batches.batches_from(consumed_samples):
        if batch % samples:
            below = batch // samples * samples
            near = f"{below} or {below + samples}" if below else f"{samples}"
            grows = "" if batches.is_constant else ", which the batch grows through,"
            return (
                f"global_batch_size({batch}){grows} is not a multiple of micro_batch_size({micro})"
                f" × data-parallel size({replicas}) = {samples}; choose {near}, or a smaller micro_batch_size"
            )
    return None


def _check_units(config: Config) -> Iterator[str]:
    """Steps and samples are not mixed."""
    own, others = (_BY_SAMPLES, _BY_STEPS) if config.counts_samples else (_BY_STEPS, _BY_SAMPLES)
    length = f"{own[0]}({config.train_counts})"
    for name, same in zip(others, own, strict=True):
        given = getattr(config.training if name.startswith("train") else config.optimizer, name)
        if given:
            counts = "samples" if config.counts_samples else "steps"
            yield f"{name}({given}) does not fit {length}, which counts {counts}; give {same}, or drop one"


def _check_length(config: Config, world_size: int) -> Iterator[str]:
    samples = config.training.train_samples
    if samples is None:
        return
    steps, first = config.train_iters(world_size), config.batch_schedule(world_size).batch_size(0)
    if steps == 0:
        yield f"train_samples({samples}) are fewer than one global batch of {first}; raise it"
    elif steps > MAX_COUNT:
        yield f"train_samples({samples}) are {steps} steps, more than {MAX_COUNT}; choose a larger global_batch_size"


def _check_warmup(config: Config) -> Iterator[str]:
    optimizer = config.optimizer
    decay_name, decay = _explicit_decay(config)
    name = "lr_warmup_samples" if config.counts_samples else "lr_warmup_iters"
    warmup = optimizer.warmup_counts(config.counts_samples)
    if optimizer.lr_warmup_fraction is not None and warmup > 0:
        yield f"lr_warmup_fraction({optimizer.lr_warmup_fraction}) and {name}({warmup}) both set the warm-up; drop one"
    if decay is not None and warmup >= decay:
        yield f"{name}({warmup}) ≥ {decay_name}({decay}); the warm-up must end before the decay does"
    for least in ("min_lr", "lr_warmup_init"):
        if getattr(optimizer, least) > optimizer.lr:
            yield f"{least}({getattr(optimizer, least)}) > lr({optimizer.lr}); choose at most {optimizer.lr}"
    yield from _check_decoupled(config)


def _check_decoupled(config: Config) -> Iterator[str]:
    optimizer = config.optimizer
    own, least = optimizer.decoupled_lr, optimizer.decoupled_min_lr
    if own is None:
        return
    end = ("min_lr", optimizer.min_lr) if least is None else ("decoupled_min_lr", least)
    for name, low in (end, ("lr_warmup_init", optimizer.lr_warmup_init)):
        if low > own:
            yield f"{name}({low}) > decoupled_lr({own}); choose at most {own}"


def _explicit_decay(config: Config) -> tuple[str, int | None]:
    optimizer = config.optimizer
    if config.counts_samples:
        return "lr_decay_samples", optimizer.lr_decay_samples
    return "lr_decay_iters", optimizer.lr_decay_iters


def _check_decay(config: Config, schedule: LearningRateSchedule, world_size: int) -> Iterator[str]:
    optimizer = config.optimizer
    unit, words = ("samples", "lr_wsd_decay_samples") if config.counts_samples else ("steps", "lr_wsd_decay_iters")
    given = optimizer.lr_wsd_decay_samples if config.counts_samples else optimizer.lr_wsd_decay_iters
    if optimizer.lr_decay_style != "WSD":
        return
    decay_name, decay = _explicit_decay(config)
    length = "train_samples" if config.counts_samples else "train_iters"
    if schedule.wsd_decay_samples is None:
        yield f"lr_decay_style(WSD) needs {words}, the {unit} of its final decay; about a tenth of {length}"
    elif schedule.wsd_decay_samples > schedule.decay_samples - schedule.warmup_samples:
        warmup = schedule.warmup_samples / config.samples_per_count(world_size)
        end = f"{length}({config.train_counts})" if decay is None else f"{decay_name}({decay})"
        yield f"{words}({given}) > {end} - {warmup:g} {unit} of warm-up; choose fewer"


def _check_weight_decay(config: Config) -> Iterator[str]:
    optimizer = config.optimizer
    start, end, style = optimizer.start_weight_decay, optimizer.end_weight_decay, optimizer.weight_decay_incr_style
    if style == "constant":
        for name, value in (("start_weight_decay", start), ("end_weight_decay", end)):
            if value is not None:
                yield (
                    f"{name}({value}) has no effect under weight_decay_incr_style(constant); give weight_decay, or "
                    f"--weight-decay-incr-style linear"
                )
    elif start is None or end is None:
        missing = "start_weight_decay" if start is None else "end_weight_decay"
        yield f"weight_decay_incr_style({style}) needs {missing}; give {flag_name(missing)}"
    elif end < start:
        yield f"end_weight_decay({end}) < start_weight_decay({start}); weight decay may only grow"


def _check_skipped(config: Config, world_size: int) -> Iterator[str]:
    words = config.training.iterations_to_skip
    bad = [word for word in words if not _is_iteration(word)]
    if bad:
        yield f"iterations_to_skip({shortened(' '.join(bad))}) are not iterations; give numbers from 1 on, e.g. 120 121"
        return
    if config.counts_samples and config.checkpoint.load is not None:
        return  # the steps before may have had other batches
    last = config.train_iters(world_size)
    late = [word for word in words if int(word) > last]
    if late:
        length = "train_samples" if config.counts_samples else "train_iters"
        yield (
            f"iterations_to_skip({shortened(' '.join(late))}) come after the last iteration({last}) of "
            f"{length}({config.train_counts}); drop them"
        )


def _is_iteration(word: str) -> bool:
    try:
        return whole_number(word) > 0
    except ValueError:
        return False
