"""What is refused of a comparison of precision levels before its first run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..config.checks import ConfigError, check_config
from ..config.command_line import setting_name, split_flags
from ..config.io import parse_config
from ..config.schema import CheckpointConfig, Config, PrecisionConfig
from .levels import training_config
from .parity_plan import RunPlan
from .run_settings import run_command_line

#: Settings that this command gives each run, and where a user says them.
_SET_BY_COMMAND = {
    "seed": "--seeds says the seeds",
    "save": "each run saves below --output-dir",
    "output_dir": "it stands before --",
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
    "full_validation",
    "rampup_batch_size",
    "step_batch_size_schedule",
)


def check_levels(plan: RunPlan) -> Config:
    """The common configuration of the runs.

    Raises:
        ConfigError: a level cannot run with it, its precision is not the levels', it has not one validation loss, it
            says what to load or what this command sets, or a level has other samples.
    """
    config = training_config(plan.common_flags)
    if config.precision != PrecisionConfig():
        default = asdict(PrecisionConfig())
        name = next(name for name, value in asdict(config.precision).items() if value != default[name])
        raise ConfigError(f"{name}: the levels set everything of precision; leave it out")
    training = config.training
    if training.eval_interval == 0 or (training.eval_iters == 0 and not training.full_validation):
        raise ConfigError(
            f"eval_interval({training.eval_interval}) and eval_iters({training.eval_iters}) must be above 0: the "
            "losses compared are of a validation after the last step"
        )
    if training.multiple_validation_sets:
        raise ConfigError("multiple_validation_sets gives several losses, and one is compared; leave it out")
    for level in plan.levels:
        words = [*plan.common_flags, *plan.level_flags[level]]
        _check_own_flags(level, words)
        given = parse_config(words)
        _check_starts_alike(level, given.checkpoint)
        if differing := _differing_samples(given, config, plan.ranks_per_run):
            raise ConfigError(
                f"level {level}: {differing}: all levels train and are validated on the same samples; leave it out of "
                "the level"
            )
        try:
            flags = plan.run_flags((level, plan.seeds[0]), plan.output_dir / "runs")
            own = run_command_line(flags, "pretrain_gpt.py").config
            check_config(own, plan.ranks_per_run)
        except ConfigError as error:
            raise ConfigError(f"level {level}: {error}") from error
        steps = [one.train_iters(plan.ranks_per_run) for one in (own, config)]
        if steps[0] != steps[1]:
            raise ConfigError(
                f"level {level} takes {steps[0]} steps and the flags after -- say {steps[1]}; all levels take as many, "
                "so leave the length and the batch of the run out of the level"
            )
    return config


def _check_own_flags(level: str, flags: Sequence[str]) -> None:
    """Check that no flag says what this command sets for each run. A file of --config may.

    Raises:
        ConfigError: one does.
    """
    for flag, _, _ in split_flags(flags):
        if flag is not None and (instead := _SET_BY_COMMAND.get(setting_name(flag))) is not None:
            raise ConfigError(f"level {level}: {flag}: {instead}; leave it out")


def _differing_samples(level: Config, common: Config, ranks_per_run: int) -> str | None:
    """What a level changes of the samples that it is trained or validated on, in words; None if nothing."""

    def samples(config: Config) -> dict[str, Any]:
        values = {name: value for name, value in asdict(config.data).items() if name not in _NOT_SAMPLES}
        training = {name: getattr(config.training, name) for name in _SAMPLES_OF_TRAINING}
        batch = config.global_batch_size(ranks_per_run)
        return {**values, **training, "seq_length": config.model.seq_length, "global_batch_size": batch}

    ours, others = samples(level), samples(common)
    found = next((name for name in ours if ours[name] != others[name]), None)
    return None if found is None else f"{found}({ours[found]}) is not {others[found]}"


def _check_starts_alike(level: str, checkpoint: CheckpointConfig) -> None:
    """Check that the flags of a level leave it to this command what its run loads, at first and after a time limit.

    Raises:
        ConfigError: a flag says what to load, or leaves something out of it.
    """
    for name in ("load", "ckpt_step", "finetune", "pretrained_checkpoint"):
        value = getattr(checkpoint, name)
        if value is not None and value is not False:
            raise ConfigError(
                f"level {level}: {name}({value}): --continue-from and --finetune-from say what runs load; leave it out"
            )
    for name in ("load_optim", "load_rng", "save_optim", "save_rng"):
        if not getattr(checkpoint, name):
            raise ConfigError(f"level {level}: no_{name}: a run goes on from its whole state; leave it out")
