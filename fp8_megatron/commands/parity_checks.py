"""What is refused of a comparison of precision levels before its first run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from ..config.checks import ConfigError, check_config
from ..config.command_line import flags_of
from ..config.io import load_config, parse_config, stated_settings
from ..config.schema import CheckpointConfig, Config, PrecisionConfig
from .levels import check_trains
from .parity_plan import RunPlan
from .run_settings import run_command_line

_LOADED = "--continue-from and --finetune-from say what runs load"
_OF_LEVELS = "the levels set everything of precision"
#: Settings that say what is loaded. No file may have them either.
_LOADING = ("load", "ckpt_step", "finetune", "pretrained_checkpoint", "exit_on_missing_checkpoint")
#: Settings that this command gives each run, or that would do nothing, and why they are no flags of the run.
_NO_FLAGS = {
    **dict.fromkeys(_LOADING, _LOADED),
    "seed": "--seeds says the seeds",
    "save": "each run saves below --output-dir",
    "output_dir": "it stands before --",
    "save_retain_interval": "the checkpoints of a finished run are removed",
}
#: Settings of data that leave the samples as they are.
_NOT_SAMPLES = {
    "data_cache_path",
    "num_dataset_builder_threads",
    "mmap_bin_files",
    "num_workers",
    "reset_position_ids",
    "reset_attention_mask",
}
_SAMPLES_OF_TRAINING = (
    "eval_interval",
    "eval_iters",
    "eval_fixed_samples",
    "full_validation",
    "multiple_validation_sets",
    "rampup_batch_size",
    "step_batch_size_schedule",
    "iterations_to_skip",
)


def check_levels(plan: RunPlan) -> Config:
    """The common configuration of the runs.

    Raises:
        ConfigError: a level cannot run with it, its precision is not the levels', it has not one validation loss, it
            says what to load or what this command sets, or a level has other samples.
        CheckpointError: --use-checkpoint-args, and there is no checkpoint to take settings from.
    """
    _check_flags(plan.common_flags, {**_NO_FLAGS, **{field.name: _OF_LEVELS for field in fields(PrecisionConfig)}})
    start = plan.start_flags(plan.seeds[0])
    _check_starts_alike(parse_config(plan.common_flags).checkpoint, has_start=bool(start))
    config = _config_of_run([*plan.common_flags, *start])
    if config.precision != PrecisionConfig():
        default = asdict(PrecisionConfig())
        name, value = next((name, value) for name, value in asdict(config.precision).items() if value != default[name])
        raise ConfigError(f"{name}({value}): {_OF_LEVELS}; leave it out")
    training = config.training
    if training.eval_interval == 0 or (training.eval_iters == 0 and not training.full_validation):
        raise ConfigError(
            f"eval_interval({training.eval_interval}) and eval_iters({training.eval_iters}) must be above 0: the "
            "losses compared are of a validation after the last step"
        )
    if training.multiple_validation_sets:
        raise ConfigError("multiple_validation_sets gives several losses, and one is compared; leave it out")
    for level in plan.levels:
        try:
            _check_level(plan, level, config, has_start=bool(start))
        except ConfigError as error:
            raise ConfigError(f"level {level}: {error}") from error
    return config


def _check_level(plan: RunPlan, level: str, common: Config, *, has_start: bool) -> None:
    _check_flags(plan.level_flags[level], _NO_FLAGS)
    given = parse_config([*plan.common_flags, *plan.level_flags[level]])
    _check_files_count(plan.level_flags[level], plan.common_flags, given)
    _check_starts_alike(given.checkpoint, has_start=has_start)
    if given.logging.tensorboard_dir is not None:
        raise ConfigError(
            f"tensorboard_dir({given.logging.tensorboard_dir}): all runs would write there; leave it out, and give "
            "--tensorboard for a folder of each run"
        )
    config = _config_of_run(plan.run_flags((level, plan.seeds[0]), plan.output_dir / "runs"))
    if differing := _differing_samples(config, common, plan.ranks_per_run):
        raise ConfigError(
            f"{differing}: all levels train and are validated on the same samples; leave it out of the level"
        )
    check_config(config, plan.ranks_per_run)
    steps = [one.train_iters(plan.ranks_per_run) for one in (config, common)]
    if steps[0] != steps[1]:
        raise ConfigError(
            f"it takes {steps[0]} steps, and the flags after -- say {steps[1]}; all levels take as many, so leave the "
            "length and the batch of the run out of the level"
        )


def _config_of_run(flags: Sequence[str]) -> Config:
    """The configuration of a run that trains on all its samples. Raises `ConfigError` if it would not, or as
    `run_command_line`."""
    line = run_command_line(flags, "pretrain_gpt.py")
    check_trains(line, "the runs of a comparison train")
    if line.config.training.rollback_on_loss_spike:
        raise ConfigError(
            "rollback_on_loss_spike: a run that goes back leaves out samples that the others train on; leave it out"
        )
    line.check_no_world_size()
    return line.config


def _check_flags(flags: Sequence[str], refused: dict[str, str]) -> None:
    """Raise `ConfigError` for a flag that sets one of the `refused` settings, with the reason that stands there."""
    for one in flags_of(flags):
        reason = refused.get(one.name) or refused.get(one.name.removeprefix("no_"))
        if reason is not None:
            raise ConfigError(f"{' '.join((one.flag, *one.words))}: {reason}; leave it out")


def _check_files_count(level: Sequence[str], common: Sequence[str], config: Config) -> None:
    """Check that `config`, of both, has what the files of a level say: flags of all runs override them.

    Raises:
        ConfigError: it has another value, of such a flag.
    """
    flags, own_flags = ({one.name: one.flag for one in flags_of(words)} for words in (common, level))
    said: Config | None = None
    stated: dict[str, str] = {}
    for path in (path for one in flags_of(level) if one.name == "config" for path in one.words):
        said = load_config(path, said)
        stated |= dict.fromkeys(stated_settings(path), path)
    for name, path in stated.items():
        flag = flags.get(name) or flags.get(f"no_{name}")
        if flag is None or name in own_flags or f"no_{name}" in own_flags or said is None:
            continue
        if _value(said, name) != _value(config, name):
            raise ConfigError(
                f"{name} of {path} has no effect beside {flag}, which stands behind --; give the level the flag "
                f"itself, or put {flag} into a file of --config"
            )


def _value(config: Config, name: str) -> Any:
    return next(getattr(section, name) for section in vars(config).values() if hasattr(section, name))


def _differing_samples(level: Config, common: Config, ranks_per_run: int) -> str | None:
    """What a level changes of the samples that it is trained or validated on, in words; None if nothing."""

    def samples(config: Config) -> dict[str, Any]:
        values = {name: value for name, value in asdict(config.data).items() if name not in _NOT_SAMPLES}
        training = {name: getattr(config.training, name) for name in _SAMPLES_OF_TRAINING}
        batch = config.global_batch_size(ranks_per_run)
        model = {name: getattr(config.model, name) for name in ("seq_length", "vocab_size")}
        return {**values, **training, **model, "global_batch_size": batch}

    ours, others = samples(level), samples(common)
    found = next((name for name in ours if ours[name] != others[name]), None)
    return None if found is None else f"{found}({ours[found]}) is not {others[found]}"


def _check_starts_alike(checkpoint: CheckpointConfig, *, has_start: bool) -> None:
    """Check that the flags of runs leave it to this command what they load, at first and after a time limit.

    Args:
        has_start: this command names a checkpoint that all runs start from.

    Raises:
        ConfigError: a flag says what to load, leaves something out of it, or takes settings from where there are none.
    """
    for name in _LOADING:
        value = getattr(checkpoint, name)
        if value is not None and value is not False:
            raise ConfigError(f"{name}({value}): {_LOADED}; leave it out")
    for name in ("load_optim", "load_rng", "save_optim", "save_rng"):
        if not getattr(checkpoint, name):
            raise ConfigError(f"no_{name}: a run goes on from its whole state; leave it out")
    if checkpoint.use_checkpoint_args and not has_start:
        raise ConfigError(
            "use_checkpoint_args has no effect without --continue-from or --finetune-from; give one of them, or leave "
            "it out"
        )
