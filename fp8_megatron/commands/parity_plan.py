"""What the runs of a comparison of precision levels are, as `fp8-megatron parity` was asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ..checkpoint.files import TRACKER
from ..config.checks import ConfigError, check_config
from ..config.command_line import flags_of
from ..config.io import load_config, parse_command_line, parse_config, stated_settings
from ..config.schema import CheckpointConfig, Config, PrecisionConfig
from ..reporting.parity import RunKey
from .levels import check_trains
from .run_settings import run_command_line

#: Flags of a run, each unless the flags or a file of the user state one of the settings beside it.
_UNLESS_STATED = (
    (("--keep-last", "1"), {"keep_last", "non_persistent_save_interval"}),
    (("--no-tensorboard",), {"tensorboard"}),
    (("--progress", "off"), {"progress"}),
)
#: In --continue-from: a run's seed.
SEED = "{seed}"


@dataclass(frozen=True)
class RunPlan:
    """The runs of a comparison, each of a level and a seed, and what there is to run them.

    Attributes:
        levels: names; the first is the reference.
        seeds: of data and weights.
        common_flags: of training, for all runs.
        level_flags: of training by level, behind `common_flags`: those of `levels`, and of others that parity.json has.
        output_dir: the folder of the results and of all runs.
        num_gpus: of all runs side by side; None for all GPUs.
        ranks_per_run: a GPU each, or a process on the CPU.
        time_limit: seconds of the whole command; None for no limit.
        whole_runs: no run starts that would not end in the time left.
        finetune_from: the checkpoint whose weights every run starts from.
        continue_from: the checkpoint that every run continues, with `SEED` in place of a run's seed. At most one of the
            two is given.
        finetune_iteration: that of the checkpoint of `finetune_from`, once it is found.
        steps_before: by seed, the iteration of the checkpoint of `continue_from`, once it is found.
        num_steps: by seed, the last iteration of runs that continue a checkpoint.
        level_settings: by level, what its flags and files say at the start of this call (`settings_of_level`), or of
            the one that had the level last.
    """

    levels: Sequence[str]
    seeds: Sequence[int]
    common_flags: Sequence[str]
    level_flags: Mapping[str, Sequence[str]]
    output_dir: Path
    num_gpus: int | None = None
    ranks_per_run: int = 1
    time_limit: float | None = None
    whole_runs: bool = False
    finetune_from: str | None = None
    continue_from: str | None = None
    finetune_iteration: int | None = None
    steps_before: Mapping[int, int] = field(default_factory=dict)
    num_steps: Mapping[int, int] = field(default_factory=dict)
    level_settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def keys(self) -> list[RunKey]:
        """All runs. Seeds in the outer order: the levels of a seed are compared as soon as they are there."""
        return [(level, seed) for seed in self.seeds for level in self.levels]

    def folder(self, key: RunKey) -> Path:
        """Of a run's logs and checkpoints."""
        return self.output_dir / "runs" / f"{key[0]}_seed_{key[1]}"

    def run_flags(self, key: RunKey, folder: Path) -> list[str]:
        """Flags of one run of pretrain_gpt.py, with its checkpoints and logs in `folder`.

        A run that has a checkpoint of its own goes on from it. Otherwise `finetune_from` or `continue_from` say its
        start.
        """
        level, seed = key
        own = folder / "checkpoints"
        if (own / TRACKER).exists():
            load = ["--load", str(own), "--exit-on-missing-checkpoint"]  # one that is gone meanwhile: not from scratch
        else:
            load = self.start_flags(seed) or ["--load", str(own)]
        flags = [*self.common_flags, *self.level_flags[level]]
        stated = parse_command_line(flags).stated
        unless = [word for words, settings in _UNLESS_STATED if not stated & settings for word in words]
        return [*flags, "--seed", str(seed), "--output-dir", str(folder), "--save", str(own), *load, *unless]

    def start_flags(self, seed: int) -> list[str]:
        """What a run without a checkpoint of its own loads: flags; none if it starts from scratch."""
        if self.finetune_from is not None:
            # No flag names iteration 0, of converted weights.
            step = ["--ckpt-step", str(self.finetune_iteration)] if self.finetune_iteration else []
            return ["--load", self.finetune_from, "--finetune", *step]
        if self.continue_from is not None:
            step = ["--ckpt-step", str(self.steps_before[seed])] if seed in self.steps_before else []
            return ["--load", self.continue_from.replace(SEED, str(seed)), *step]
        return []


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
