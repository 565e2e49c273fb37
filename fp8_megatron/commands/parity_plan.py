"""What the runs of a comparison of precision levels are, and what is refused of them before the first one."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ..checkpoint.files import TRACKER, candidates, iteration_folder, named_checkpoint
from ..config.checks import ConfigError, check_config
from ..config.command_line import flags_of
from ..config.io import parse_command_line, parse_config
from ..config.schema import Config, DataConfig, PrecisionConfig
from ..errors import UserError
from ..reporting.parity import RunKey
from .run_settings import run_command_line

#: In --continue-from and --finetune-from: a run's seed.
SEED = "{seed}"

#: Flags of a run, each unless the flags or a file of the user state one of the settings beside it.
_UNLESS_STATED = (
    (("--keep-last", "1"), {"keep_last", "non_persistent_save_interval"}),
    (("--no-tensorboard",), {"tensorboard"}),
    (("--progress", "off"), {"progress"}),
)
_LOADING = ("load", "ckpt_step", "finetune", "pretrained_checkpoint", "exit_on_missing_checkpoint")
#: Settings that are parity's own, or that its runs cannot have, and why.
_REFUSED = {
    **dict.fromkeys(_LOADING, "--continue-from and --finetune-from say what runs load"),
    **dict.fromkeys(("load_optim", "load_rng", "save_optim", "save_rng"), "a run goes on from its whole state"),
    **dict.fromkeys(("skip_train", "dry_run"), "the runs of a comparison train"),
    "world_size": "--ranks-per-run says it",
    "rollback_on_loss_spike": "a run that goes back leaves out samples that the others train on",
    "multiple_validation_sets": "it gives several losses, and one is compared",
    "tensorboard_dir": "all runs would write there; --tensorboard gives each run a folder",
    "save_retain_interval": "the checkpoints of a finished run are removed",
    "seed": "--seeds says the seeds",
    "save": "each run saves below --output-dir",
    "output_dir": "it stands before --",
}
#: Refused settings that a file may have, as an earlier run's file has. The flags of a run override them.
_OVERRIDDEN = {"seed", "save", "output_dir"}
#: Settings of the run that say how long it is and on which samples. They are the same at all levels.
_SAMPLES = (
    *(one.name for one in fields(DataConfig)),
    *("seq_length", "vocab_size", "global_batch_size", "rampup_batch_size", "step_batch_size_schedule"),
    *("train_iters", "train_samples", "iterations_to_skip", "eval_interval", "eval_iters", "eval_fixed_samples"),
    "full_validation",
)
#: Sections whose settings are kept beside the results, and settings that may differ between calls.
_KEPT = ("model", "data", "training", "optimizer", "parallel", "precision")
_MAY_DIFFER = {"seed", "data_cache_path", "nccl_communicator_config_path", "distributed_timeout_minutes"}


@dataclass
class RunPlan:
    """The runs of a comparison, each of a level and a seed, and what there is to run them.

    Attributes:
        levels: flags of training by name, which stand behind `common_flags`; the first level is the reference.
        seeds: of data and weights.
        common_flags: of training, for all runs.
        output_dir: the folder of the results and of all runs.
        gpus: of all runs side by side; None for all GPUs.
        ranks_per_run: a GPU each, or a process on the CPU.
        time_limit: seconds of the whole command; None for no limit.
        finetune_from: the checkpoint whose weights every run starts from, with `SEED` in place of a run's seed.
        continue_from: the same of the checkpoint that every run continues. At most one of the two is given.
        starts: by path of a checkpoint to start from, the iteration that was found first.
        last_steps: by seed, the last iteration of a run.
    """

    levels: Mapping[str, Sequence[str]]
    seeds: Sequence[int]
    common_flags: Sequence[str]
    output_dir: Path
    gpus: int | None = None
    ranks_per_run: int = 1
    time_limit: float | None = None
    finetune_from: str | None = None
    continue_from: str | None = None
    starts: dict[str, int] = field(default_factory=dict)
    last_steps: dict[int, int] = field(default_factory=dict)

    @property
    def keys(self) -> list[RunKey]:
        """All runs. Seeds in the outer order: the levels of a seed are compared as soon as they are there."""
        return [(level, seed) for seed in self.seeds for level in self.levels]

    def folder(self, key: RunKey) -> Path:
        """The folder of a run's logs and checkpoints."""
        return self.output_dir / "runs" / f"{key[0]}_seed_{key[1]}"

    def start(self, seed: int) -> str | None:
        """The checkpoint that a run starts from; None from scratch."""
        path = self.finetune_from or self.continue_from
        return None if path is None else path.replace(SEED, str(seed))

    def steps_before(self, seed: int) -> int:
        """Steps of the run that a run continues."""
        return 0 if self.continue_from is None else self.starts.get(self.start(seed) or "", 0)

    def start_flags(self, seed: int) -> list[str]:
        """What a run without a checkpoint of its own loads: flags; none if it starts from scratch."""
        path = self.start(seed)
        if path is None:
            return []
        iteration = self.starts.get(path)  # no flag names iteration 0, of converted weights
        step = ["--ckpt-step", str(iteration)] if iteration else []
        return ["--load", path, *step, *([] if self.finetune_from is None else ["--finetune"])]

    def run_flags(self, key: RunKey, folder: Path) -> list[str]:
        """Flags of one run of pretrain_gpt.py, with its checkpoints and logs in `folder`.

        A run that has a checkpoint of its own goes on from it.
        """
        level, seed = key
        own = folder / "checkpoints"
        if (own / TRACKER).exists():
            load = ["--load", str(own), "--exit-on-missing-checkpoint"]  # one that is gone meanwhile: not from scratch
        else:
            load = self.start_flags(seed) or ["--load", str(own)]
        flags = [*self.common_flags, *self.levels[level]]
        stated = parse_command_line(flags).stated
        unless = [word for words, settings in _UNLESS_STATED if not stated & settings for word in words]
        return [*flags, "--seed", str(seed), "--output-dir", str(folder), "--save", str(own), *load, *unless]

    def config(self, level: str | None = None) -> Config:
        """The configuration of the runs of a level, or of what all runs have in common."""
        if level is None:
            flags = [*self.common_flags, *self.start_flags(self.seeds[0])]
        else:
            flags = self.run_flags((level, self.seeds[0]), self.output_dir / "runs")
        return run_command_line(flags, "pretrain_gpt.py").config

    def settings(self, config: Config) -> dict[str, Any]:
        """What the results of runs depend on, as plain values by name."""
        sections = json.loads(json.dumps(asdict(config), default=str))
        return {
            **{name: getattr(self, name) for name in ("ranks_per_run", "finetune_from", "continue_from")},
            **{name: value for one in _KEPT for name, value in sections[one].items() if name not in _MAY_DIFFER},
            "global_batch_size": config.global_batch_size(self.ranks_per_run),
        }


def check_levels(plan: RunPlan) -> Config:
    """The common configuration of the runs.

    Raises:
        ConfigError: a level cannot run with it, its precision is not the levels', it has not one validation loss, it
            says what parity says itself, or a level has other samples.
        CheckpointError: --use-checkpoint-args, and there is no checkpoint to take settings from.
    """
    refused = dict(_REFUSED)
    if plan.start(0) is None:
        refused["use_checkpoint_args"] = "it has no effect without --continue-from or --finetune-from"
    precision = dict.fromkeys((one.name for one in fields(PrecisionConfig)), "the levels set everything of precision")
    _check_refused(plan.common_flags, parse_config(plan.common_flags), {**refused, **precision})
    common = plan.config()
    training = common.training
    if training.eval_interval == 0 or (training.eval_iters == 0 and not training.full_validation):
        raise ConfigError(
            f"eval_interval({training.eval_interval}) and eval_iters({training.eval_iters}) must be above 0: "
            "validation losses are compared"
        )
    for level in plan.levels:
        try:
            _check_level(plan, level, common, refused)
        except ConfigError as error:
            raise ConfigError(f"level {level}: {error}") from error
    return common


def _check_level(plan: RunPlan, level: str, common: Config, refused: Mapping[str, str]) -> None:
    flags = plan.levels[level]
    given = parse_config([*plan.common_flags, *flags])
    _check_refused(flags, given, refused)
    alone = parse_command_line(flags)
    said, counts = alone.config.settings, given.settings
    for name in alone.stated & (_flag_names(plan.common_flags) - _flag_names(flags)):
        if said[name] != counts[name]:
            raise ConfigError(
                f"{name}({said[name]}) of its file has no effect beside the flag behind --; give the level the flag "
                "itself, or put that of all runs into a file of --config"
            )
    config = plan.config(level)
    check_config(config, plan.ranks_per_run)
    own, others = plan.settings(config), plan.settings(common)
    for name in _SAMPLES:
        if name in own and own[name] != others[name]:
            raise ConfigError(
                f"{name}({own[name]}) is not {others[name]}: all levels train and are validated on the same samples; "
                "leave it out of the level"
            )


def _check_refused(flags: Sequence[str], config: Config, refused: Mapping[str, str]) -> None:
    """Raise `ConfigError` for a flag of a refused setting, or a file with another value than the default."""
    given = {one.name.removeprefix("no_"): one for one in flags_of(flags)}
    defaults, values = Config().settings, config.settings
    for name, reason in refused.items():
        if name in given:
            raise ConfigError(f"{' '.join((given[name].flag, *given[name].words))}: {reason}; leave it out")
        if name not in _OVERRIDDEN and values.get(name) != defaults.get(name):
            raise ConfigError(f"{name}({values[name]}): {reason}; leave it out")


def _flag_names(flags: Sequence[str]) -> set[str]:
    return {one.name.removeprefix("no_") for one in flags_of(flags)}


def find_starts(plan: RunPlan, config: Config, finished: Container[RunKey]) -> None:
    """Find the checkpoints that unfinished runs start from, and the last steps of all runs, and let `plan` say them.

    The iteration that is found first is that of all runs of the checkpoint, also if its own run has saved more since.

    Raises:
        UserError: there is none. One to continue is of the last step, or of another seed than its run.
    """
    flag = "--continue-from" if plan.finetune_from is None else "--finetune-from"
    for seed in plan.seeds:
        plan.last_steps[seed] = config.train_iters(plan.ranks_per_run)
        path = plan.start(seed)
        if path is None or all((level, seed) in finished for level in plan.levels):
            continue
        root, iteration = named_checkpoint(Path(path), plan.starts.get(path))
        found = candidates(root, iteration)
        if not found:
            raise UserError(f"{flag} {path}: no checkpoint there; give the folder that a run's --save named")
        plan.starts[path] = found[0]
        if plan.continue_from is not None:
            plan.last_steps[seed] = _last_step(plan, config, seed, iteration_folder(root, found[0]))


def _last_step(plan: RunPlan, config: Config, seed: int, checkpoint: Path) -> int:
    """The last iteration of a run that continues this checkpoint. Raises as `find_starts`."""
    from ..checkpoint.saved_settings import saved_samples, saved_seed  # imports torch

    name, iteration = f"--continue-from {plan.start(seed)}", plan.steps_before(seed)
    consumed_samples = saved_samples(checkpoint) if config.counts_samples else 0
    last = config.train_iters(plan.ranks_per_run, iteration=iteration, consumed_samples=consumed_samples)
    if iteration >= last:
        raise UserError(f"{name}: iteration {iteration} is the end of these runs; name one before, as iter_0000100")
    saved = saved_seed(checkpoint)
    if saved not in (seed, None):
        raise UserError(f"{name}: that run has seed {saved}, and the order of data depends on it; give --seeds {saved}")
    return last
