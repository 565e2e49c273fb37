"""What is saved, where a run starts and which checkpoints stay, under Megatron's checkpoint options."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fp8_megatron.checkpoint.files import CheckpointError, saved_iterations
from fp8_megatron.checkpoint.saved_run import SavedRun
from fp8_megatron.commands.run_settings import run_command_line
from fp8_megatron.config.checks import ConfigError, check_config
from fp8_megatron.config.io import parse_config
from fp8_megatron.reporting.metrics_file import METRICS_FILE, read_rows
from fp8_megatron.training.trainer import Trainer
from tests.harness.ranks import RankError, RankPool
from tests.harness.runs import tiny_flags


def _fit(output_dir: Path, overrides: dict) -> dict[int, float]:
    Trainer(parse_config(tiny_flags(output_dir, **overrides))).fit()
    records = read_rows(output_dir / METRICS_FILE)
    return {record["iteration"]: record["loss"] for record in records if record["kind"] == "train"}


@pytest.fixture
def fit(ranks: RankPool, tmp_path: Path):
    def run(name: str, **overrides: object) -> dict[int, float]:
        return ranks.run(_fit, tmp_path / name, {"hidden_dropout": 0.1, **overrides}, num_ranks=1)[0]

    return run


def test_no_save_optim_saves_weights_that_a_run_goes_on_from_only_if_asked(fit, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    whole = fit("whole", train_iters=4, save=tmp_path / "all", save_interval=2)
    fit("first", train_iters=4, exit_interval=2, save=saved, save_optim=False, save_rng=False)
    full, lean = SavedRun(tmp_path / "all" / "iter_0000002"), SavedRun(saved / "iter_0000002")
    assert {key for key in full.reader.shapes if not key.startswith("optimizer.")} == set(lean.reader.shapes)
    for key in lean.reader.shapes:
        assert torch.equal(lean.reader.read_whole(key), full.reader.read_whole(key)), key
    with pytest.raises(RankError, match="it holds weights alone; give --finetune, or --no-load-optim"):
        fit("refused", train_iters=4, load=saved)
    resumed = fit("resumed", train_iters=4, load=saved, load_optim=False)
    assert list(resumed) == [3, 4], "iteration and data position are those of the checkpoint"
    without_state = fit(
        "reference", train_iters=4, load=tmp_path / "all", ckpt_step=2, load_optim=False, load_rng=False
    )
    assert resumed == without_state
    assert resumed[4] != whole[4]


def test_a_restarted_run_finds_its_own_lean_checkpoint(fit, tmp_path: Path, monkeypatch) -> None:
    """torchrun restarts the ranks without --load: they take what they saved, as they saved it. The next forward is that
    of the whole run, because the scales of casts come with the weights.
    """
    saved = tmp_path / "saved"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one launch")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    settings = {"train_iters": 4, "save": saved, "save_optim": False}
    fit_here = lambda name, **more: _fit(tmp_path / name, {**settings, **more})  # noqa: E731  the environment is ours
    whole = fit_here("whole", save=tmp_path / "all")
    fit_here("first", exit_interval=2)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    second = fit_here("second")
    assert list(second) == [3, 4] and second[3] == whole[3] and second[4] != whole[4]


def test_the_newest_non_persistent_checkpoint_stays_beside_all_persistent_ones(fit, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    flags = {"save": saved, "save_interval": 4, "non_persistent_save_interval": 1, "non_persistent_ckpt_type": "global"}
    fit("run", train_iters=10, exit_interval=7, **flags)
    assert saved_iterations(saved) == [4, 7]
    resumed = fit("resumed", train_iters=10, load=saved, **flags)
    assert list(resumed) == [8, 9, 10] and saved_iterations(saved) == [4, 8, 10]


def test_a_persistent_checkpoint_that_was_late_stays(fit, tmp_path: Path) -> None:
    """Iteration 4 is left out, so its checkpoint is saved at 5."""
    saved = tmp_path / "saved"
    flags = {"train_iters": 9, "iterations_to_skip": [4], "save": saved, "save_interval": 4}
    fit("run", exit_interval=6, non_persistent_save_interval=1, **flags)
    assert saved_iterations(saved) == [5, 6]
    fit("resumed", load=saved, non_persistent_save_interval=1, **flags)
    assert saved_iterations(saved) == [5, 8, 9]
    flags |= {"save": tmp_path / "retained", "save_interval": 1, "save_retain_interval": 4}
    fit("retained", **flags)
    assert saved_iterations(tmp_path / "retained") == [5, 8, 9]


def test_pretrained_weights_start_a_run_once(fit, tmp_path: Path) -> None:
    weights, saved = tmp_path / "weights", tmp_path / "saved"
    fit("before", train_iters=3, save=weights)
    flags = {"train_iters": 4, "save": saved, "load": saved, "pretrained_checkpoint": weights}
    first = fit("first", exit_interval=2, **flags)
    assert list(first) == [1, 2]
    assert first == fit("finetune", train_iters=4, exit_interval=2, load=weights, finetune=True)
    assert list(fit("second", **flags)) == [3, 4], "its own checkpoint comes before the pretrained one"
    assert list(fit("alone", train_iters=4, exit_interval=2, pretrained_checkpoint=weights)) == [1, 2]
    with pytest.raises(RankError, match=r"pretrained_checkpoint\(.*nothing\) holds no checkpoint"):
        fit("none", train_iters=4, pretrained_checkpoint=tmp_path / "nothing")


def test_the_settings_of_a_checkpoint_are_below_files_and_flags(fit, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    fit("before", train_iters=2, save=saved, hidden_size=96, num_attention_heads=3)
    words = ["--use-checkpoint-args", "--load", str(saved), "--mock-data", "--train-iters", "3"]
    words += ["--micro-batch-size", "2", "--lr", "1e-3"]
    model = run_command_line(words, "train").config.model
    assert (model.hidden_size, model.num_attention_heads, model.seq_length) == (96, 3, 16)
    (tmp_path / "model.yaml").write_text("hidden_size: 128\n")
    model = run_command_line(
        [*words, "--config", str(tmp_path / "model.yaml"), "--seq-length", "8"], "train"
    ).config.model
    assert (model.hidden_size, model.num_attention_heads, model.seq_length) == (128, 3, 8)
    with pytest.raises(CheckpointError, match=r"use_checkpoint_args: load\(.*nothing\) holds no checkpoint"):
        run_command_line(["--use-checkpoint-args", "--load", str(tmp_path / "nothing")], "train")
    same = str(tmp_path / "nothing")
    words = [*tiny_flags(tmp_path / "out"), "--use-checkpoint-args", "--load", same, "--save", f"{same}/"]
    assert any("no checkpoint yet" in note for note in run_command_line(words, "train").notes)


def test_settings_of_a_damaged_checkpoint_are_not_taken(fit, tmp_path: Path) -> None:
    """The run would pass over it, and train an older one under its changed settings."""
    fit("before", train_iters=2, save=tmp_path / "saved", save_interval=1, attention_dropout=0.25)
    words = ["--use-checkpoint-args", "--load", str(tmp_path / "saved"), "--mock-data", "--train-iters", "3"]
    words += ["--micro-batch-size", "2", "--lr", "1e-3"]
    for iteration, expected in ((2, 0.25), (1, None)):
        path = tmp_path / "saved" / f"iter_{iteration:07d}" / "config.yaml"
        path.write_text(path.read_text().replace("attention_dropout: 0.25", "attention_dropout: 0.75"))
        if expected is not None:
            assert run_command_line(words, "train").config.model.attention_dropout == expected
    with pytest.raises(CheckpointError, match=r"checkpoint file .*iter_0000002/config.yaml is damaged"):
        run_command_line(words, "train")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--keep-last 2", "keep_last(2) has no effect without save"),
        ("--save X --non-persistent-save-interval 5 --keep-last 2", "both say which checkpoints are kept; drop one"),
        ("--use-checkpoint-args", "use_checkpoint_args takes settings from load, which is not given"),
        ("--save X --save-interval 1 --no-save-optim --rollback-on-loss-spike", "rollback_on_loss_spike needs the"),
    ],
)
def test_options_that_contradict_each_other(flags: str, message: str, tmp_path: Path) -> None:
    config = parse_config([*tiny_flags(tmp_path / "out"), *flags.split()])
    with pytest.raises(ConfigError) as error:
        check_config(config, 1)
    assert message in str(error.value)
