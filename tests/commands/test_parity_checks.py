"""fp8-megatron parity: flags and configurations that it refuses, and what it makes of the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8_megatron.commands.parity_plan import check_levels
from fp8_megatron.commands.run_settings import LEVELS
from fp8_megatron.config.checks import ConfigError
from fp8_megatron.config.command_line import split_flags
from fp8_megatron.config.io import parse_config
from tests.harness.parity import TRAINING, plan_of

CONFIGS = Path(__file__).parents[2] / "configs"


def test_fast_is_the_configuration_of_that_name() -> None:
    assert parse_config(LEVELS["fast"]) == parse_config(["--config", str(CONFIGS / "fast.yaml")])


def test_default_is_what_fp8_does_by_itself() -> None:
    named, plain = (parse_config(flags) for flags in (LEVELS["default"], ["--precision", "fp8"]))
    assert named.fp8_summary == plain.fp8_summary


@pytest.mark.parametrize("model", ["gpt_125m", "llama_125m", "gpt_345m"])
def test_every_level_runs_a_model(model: str, tmp_path: Path) -> None:
    levels = [level for level in LEVELS if not level.startswith("te")]
    training = ["--config", str(CONFIGS / f"{model}.yaml"), "--mock-data", "--train-iters", "2000"]
    plan = plan_of(tmp_path, "--levels", *levels, training=[*training, "--eval-iters", "2"])
    assert check_levels(plan).training.train_iters == 2000


@pytest.mark.parametrize(
    ("words", "training", "message"),
    [
        ([], ["--fp8-recipe", "blockwise"], "--fp8-recipe blockwise: the levels set everything of precision; leave"),
        ([], ["--bf16"], r"precision\(bf16\): the levels set everything of precision; leave it out"),
        ([], ["--eval-interval", "0"], r"eval_interval\(0\) and eval_iters\(\d+\) must be above 0"),
        ([], ["--eval-iters", "0"], r"eval_interval\(10\) and eval_iters\(0\) must be above 0"),
        ([], ["--full-validation", "--multiple-validation-sets"], "multiple-validation-sets: it gives several losses"),
        (["--levels", "bf16", "O3-blockwise"], ["--hidden-size", "192"], "level O3-blockwise: "),
        ([], ["--dry-run"], "--dry-run: the runs of a comparison train"),
        (
            ["--levels", "bf16", "long", "--own-levels", "long=--precision fp8 --train-iters 40"],
            [],
            r"^level long: train_iters\(40\) is not 20: all levels train",
        ),
        (["--continue-from", "x", "--seeds", "1"], ["--finetune"], "^--finetune: --continue-from and"),
        ([], ["--no-load-optim"], "--no-load-optim: a run goes on from its whole state"),
        ([], ["--seed", "7"], "^--seed 7: --seeds says the seeds; leave it out"),
        ([], ["--save=x"], "^--save x: each run saves below --output-dir; leave it out"),
        (
            ["--levels", "bf16", "a", "--own-levels", "a=--precision fp8 --seed 7"],
            [],
            "level a: --seed 7: --seeds says the seeds; leave it out",
        ),
        (
            [],
            ["--save-interval", "5", "--save-retain-interval", "10"],
            "^--save-retain-interval 10: the checkpoints of a finished run are removed; leave it out",
        ),
        ([], ["--tensorboard-dir", "x"], "--tensorboard-dir x: all runs would write there; --tensorboard gives"),
        (
            [],
            ["--use-checkpoint-args"],
            "^--use-checkpoint-args: it has no effect without --continue-from or --finetune",
        ),
        *(
            (
                ["--levels", "bf16", "a", "--own-levels", f"a=--precision fp8 {flag} {value}"],
                [],
                f"level a: {words}: all",
            )
            for flag, value, words in (
                ("--eval-iters", 1, r"eval_iters\(1\) is not 2"),
                ("--seq-length", 64, r"seq_length\(64\) is not 32"),
                ("--global-batch-size", 4, r"global_batch_size\(4\) is not 2"),
                ("--split", "90,10,0", r"split\(90,10,0\) is not 969,30,1"),
            )
        ),
        *(
            (["--levels", "bf16", "a", "--own-levels", f"a=--precision fp8 {flags}"], [], f"^level a: {words}")
            for flags, words in (
                ("--no-save-optim", "--no-save-optim: a run goes on from its whole state"),
                ("--skip-train", "--skip-train: the runs of a comparison train; leave it out"),
                ("--rollback-on-loss-spike", "--rollback-on-loss-spike: a run that goes back leaves out samples"),
                ("--world-size 2", "--world-size 2: --ranks-per-run says it"),
                ("--iterations-to-skip 5", "iterations_to_skip"),
                ("--num-layrs 2", "unknown flag --num-layrs; did you mean --num-layers"),
            )
        ),
    ],
)
def test_a_configuration_that_cannot_be_compared(
    words: list[str], training: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_levels(plan_of(tmp_path, *words, training=[*TRAINING, *training]))


def test_a_flag_of_a_level_is_no_flag_of_all_runs(tmp_path: Path) -> None:
    for flags in map(list, LEVELS.values()):
        for flag, value, after in split_flags(flags):
            assert flag is not None and value is None
            with pytest.raises(ConfigError, match=f"{flag} ?{' '.join(after)}: the levels set everything of precision"):
                check_levels(plan_of(tmp_path, training=[*TRAINING, flag, *after]))


def test_what_a_file_says_of_a_run_is_done(tmp_path: Path) -> None:
    file = tmp_path / "all.yaml"
    file.write_text("{keep_last: 4, tensorboard: true, progress: 'on', seed: 7, save: x, output_dir: x}")
    plan = plan_of(tmp_path / "out", training=[*TRAINING, "--config", str(file)])
    check_levels(plan)
    config = parse_config(plan.run_flags(("O3", 1), tmp_path / "run"))
    assert (config.checkpoint.keep_last, config.logging.tensorboard, config.logging.progress) == (4, True, "on")
    assert config.training.seed == 1 and config.checkpoint.save == str(tmp_path / "run" / "checkpoints")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--levels", "bf16"], "give two or more"),
        (["--levels", "bf16", "O3", "bf16"], "names bf16 twice"),
        (["--seeds", "1", "1"], "names 1 twice"),
        (["--time-limit", "5"], "out of range; give more than 40"),
        (["--levels", "bf16", "head"], "--levels head: no such level; give --own-levels 'head=FLAGS' or one of bf16, "),
        (
            ["--levels", "bf16", "O3", "--own-levels", "head=--precision fp8"],
            "--own-levels head has no effect; name it in --levels, or leave it out",
        ),
        (["--own-levels", "O3=--precision fp8"], "give NAME=FLAGS with a new name"),
        (["--own-levels", "--precision fp8"], "give NAME=FLAGS"),
        (["--own-levels", "a/b=--precision fp8"], "give NAME=FLAGS"),
        (["--continue-from", "base"], "--continue-from base is of one seed; put {seed} into it"),
        (["--continue-from", "{seed}", "--finetune-from", "base"], "not allowed with argument"),
        (["--continue-from", "", "--seeds", "1"], "argument --continue-from: "),
        (["--finetune-from", ""], "argument --finetune-from: "),
    ],
)
def test_flags_that_are_refused(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        plan_of(tmp_path, *words)
    assert message in capsys.readouterr().err


def test_a_setting_that_is_not_given_is_found_before_the_first_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not given: --lr"):
        check_levels(plan_of(tmp_path, training=TRAINING[:-2]))


def test_a_file_of_a_level_that_flags_override_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("{precision: fp8, lr: 1e-4}")
    words = ["--levels", "bf16", "a", "--own-levels", f"a=--config {file}"]
    said = r"^level a: lr\(0.0001\) of its file has no effect beside the flag behind --; give the level the flag itself"
    with pytest.raises(ConfigError, match=said):
        check_levels(plan_of(tmp_path / "out", *words))
    file.write_text("{precision: fp8, weight_decay: 0.2, mock_data: true}")  # the last one as the flags say
    check_levels(plan_of(tmp_path / "out", *words))
