"""What the runs of a comparison of precision levels are, as `fp8-megatron parity` was asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..checkpoint.files import TRACKER
from ..config.io import parse_command_line
from ..reporting.parity import RunKey

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
