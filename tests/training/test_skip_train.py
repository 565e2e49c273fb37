"""--skip-train: a checkpoint's losses are those that training reported, and nothing else is written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fp8_megatron.checkpoint.files import CheckpointError
from fp8_megatron.config.checks import ConfigError, check_config
from fp8_megatron.config.io import parse_command_line, parse_config
from fp8_megatron.mcore.runtime import runtime
from fp8_megatron.mcore.topology import initialized
from fp8_megatron.reporting.metrics_file import METRICS_FILE, read_rows
from fp8_megatron.training.build import build_training_state, measured_storage
from fp8_megatron.training.evaluation import EVALUATIONS_FILE
from fp8_megatron.training.trainer import Trainer
from tests.harness.ranks import RankPool
from tests.harness.runs import tiny_flags
from tests.harness.token_files import write_token_files

SCRIPT = {
    "global_batch_size": 4,
    "train_iters": 4,
    "eval_interval": 2,
    "eval_iters": 3,
    "eval_fixed_samples": True,
    "save_interval": 2,
}
SPLIT = {"main_params_dtype": "split", "exp_avg_dtype": "int8", "exp_avg_sq_dtype": "uint8"}
CPU = torch.device("cpu")


def fit(folder: Path, output: str = "out", **settings: Any) -> None:
    flags = tiny_flags(folder / output, **{**SCRIPT, "save": folder / "saved", **settings})
    Trainer(parse_config(flags)).fit()


def evaluations(folder: Path, output: str = "out") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / output / EVALUATIONS_FILE).read_text().splitlines()]


def reported(folder: Path) -> list[dict[str, Any]]:
    """The validations and the test of the training run."""
    return [record for record in read_rows(folder / "out" / METRICS_FILE) if record["kind"] == "eval"]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    "settings", [{"precision": "bf16"}, {"opt_level": "O2"}, {}, {"fp8_recipe": "tensorwise"}, SPLIT]
)
def test_the_losses_are_those_of_training(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Bit for bit, with the script of the training run and its --save; of two checkpoints."""
    fit(tmp_path, **settings)
    before = contents(tmp_path)
    load = {"load": tmp_path / "saved", "skip_train": True}
    fit(tmp_path, "evaluated", **settings, **load)
    fit(tmp_path, "evaluated", **settings, **load, ckpt_step=2)
    after = contents(tmp_path)
    assert {name: value for name, value in after.items() if name in before} == before
    assert after.keys() - before.keys() == {f"evaluated/{EVALUATIONS_FILE}"}
    trained = {(one["iteration"], one["split"]): one["loss"] for one in reported(tmp_path)}
    found = {(one["iteration"], one["split"]): one["loss"] for one in evaluations(tmp_path, "evaluated")}
    assert {(2, "valid"), (4, "valid")} <= found.keys() and found == {key: trained[key] for key in found}
    assert [Path(one["checkpoint"]).name for one in evaluations(tmp_path, "evaluated")][-1] == "iter_0000002"


def test_beside_the_run_in_its_own_folder(tmp_path: Path) -> None:
    """Its metrics, curve and settings stay, also if an earlier checkpoint is evaluated."""
    fit(tmp_path)
    before = contents(tmp_path)
    fit(tmp_path, load=tmp_path / "saved", ckpt_step=2, skip_train=True)
    after = contents(tmp_path)
    assert after.pop(f"out/{EVALUATIONS_FILE}") and after == before
    fit(tmp_path, load=tmp_path / "saved", train_iters=6)  # the run goes on as if nothing had been
    steps = [one["iteration"] for one in read_rows(tmp_path / "out" / METRICS_FILE) if one["kind"] == "train"]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_the_folder_of_saves_is_that_of_the_losses_too(tmp_path: Path) -> None:
    """As for the logs of training; without either they are shown alone, and the note says so."""
    fit(tmp_path)
    flags = tiny_flags(tmp_path, **SCRIPT, save=tmp_path / "saved", load=tmp_path / "saved", skip_train=True)[2:]
    Trainer(parse_config(flags)).fit()
    assert [one["split"] for one in evaluations(tmp_path, "saved")] == ["valid"]
    (note,) = (note for note in parse_command_line(flags).notes if "nothing is trained or saved" in note)
    assert f"added to evaluations.jsonl of {tmp_path / 'saved'}" in note
    line = parse_command_line([*flags, "--save", "none", "--save-interval", "none"])
    assert line.config.logging.output_dir is None and any("losses are shown alone" in note for note in line.notes)


@pytest.mark.parametrize("settings", [{"precision": "bf16"}, {}, SPLIT], ids=["bf16", "O3", "5-byte"])
def test_takes_no_memory_for_gradients_and_moments(settings: dict[str, Any], tmp_path: Path) -> None:
    config = parse_config(tiny_flags(tmp_path, load=tmp_path, skip_train=True, **settings))
    trained = replace(config, training=replace(config.training, skip_train=False))
    with runtime(CPU), initialized(config.parallel, config.model.num_layers, CPU) as topology:
        kept = measured_storage(build_training_state(config, 64, topology, CPU))
        all_of_it = measured_storage(build_training_state(trained, 64, topology, CPU))
    found, whole = kept.linear + kept.rest, all_of_it.linear + all_of_it.rest
    assert (found.weights, found.master_weights) == (whole.weights, whole.master_weights) and found.weights > 0
    assert found.gradients == sum(found.states.values()) == 0
    assert min(whole.gradients, *whole.states.values()) > 0


def test_a_checkpoint_without_moments_needs_no_flag(tmp_path: Path) -> None:
    """The scales of casts come with the weights, also under the flags that Megatron's scripts give."""
    fit(tmp_path, save_optim=False)
    fit(tmp_path, load=tmp_path / "saved", skip_train=True)
    fit(tmp_path, load=tmp_path / "saved", skip_train=True, load_optim=False, load_rng=False)
    assert [one["loss"] for one in evaluations(tmp_path)] == 2 * [reported(tmp_path)[-1]["loss"]]
    with pytest.raises(CheckpointError, match="holds weights alone; give --finetune, or --no-load-optim"):
        fit(tmp_path, load=tmp_path / "saved", train_iters=6)


def test_in_another_precision_and_of_the_weights_alone(tmp_path: Path) -> None:
    fit(tmp_path)
    for settings in ({"precision": "bf16", "load_optim": False}, {"finetune": True}):
        fit(tmp_path, load=tmp_path / "saved", skip_train=True, **settings)
    trained = reported(tmp_path)[-1]["loss"]
    bf16, weights = evaluations(tmp_path)
    assert (bf16["precision"], bf16["iteration"], weights["precision"], weights["iteration"]) == ("bf16", 4, "O3", 0)
    assert bf16["loss"] == pytest.approx(trained, rel=0.01) and weights["loss"] == pytest.approx(trained, rel=0.01)


def test_the_test_data_and_the_whole_validation(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("train", "valid", "test"):
        write_token_files(tmp_path / name, [rng.integers(63, size=40).tolist() for _ in range(30)])
    files = {f"{name}_data_path": tmp_path / name for name in ("train", "valid", "test")}
    settings = {**files, "mock_data": None, "tokenizer_type": "NullTokenizer", "full_validation": True}
    fit(tmp_path, **settings)
    fit(tmp_path, load=tmp_path / "saved", skip_train=True, **{**settings, "eval_interval": 0})
    found = {one["split"]: one["loss"] for one in evaluations(tmp_path)}
    assert found == {one["split"]: one["loss"] for one in reported(tmp_path) if one["iteration"] == 4}
    assert found.keys() == {"valid", "test"}


@pytest.mark.parametrize(
    "layout",
    [
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"pipeline_model_parallel_size": 2},
        {},
    ],
    ids=["tensor", "pipeline", "data"],
)
def test_over_two_ranks(ranks: RankPool, tmp_path: Path, layout: dict[str, Any]) -> None:
    settings = {"hidden_size": 64, "seq_length": 32, **layout}
    ranks.run(_fit, tmp_path, settings, num_ranks=2)
    ranks.run(_fit, tmp_path, {**settings, "load": tmp_path / "saved", "skip_train": True}, num_ranks=2)
    (found,) = evaluations(tmp_path)
    assert found["loss"] == reported(tmp_path)[-1]["loss"]


def _fit(folder: Path, settings: dict[str, Any]) -> None:
    fit(folder, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "skip_train evaluates a checkpoint; give --load"),
        ({"load": "x", "eval_iters": 0}, r"skip_train with eval_iters\(0\) evaluates nothing"),
        (
            {"load": "x", "mock_data": None, "tokenizer_type": "NullTokenizer", "train_data_path": "x"},
            "skip_train with train_data_path needs valid_data_path; give it$",
        ),
        (
            {"load": "x", "mock_data": None, "tokenizer_type": "NullTokenizer", "data_path": "x", "split": "1,0,1"},
            r"split\(1,0,1\) leaves nothing to validate on skip_train; raise its second weight$",
        ),
    ],
)
def test_what_cannot_be_evaluated(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        check_config(parse_config(tiny_flags(tmp_path, skip_train=True, **settings)), 1)


def test_a_folder_without_a_checkpoint_and_the_settings_of_saving(tmp_path: Path) -> None:
    """--load that equals --save may be empty for training, and not here. Nothing of saving is read."""
    settings = {"save": tmp_path, "load": tmp_path, "save_interval": 2, "rollback_on_loss_spike": True}
    line = parse_command_line(tiny_flags(tmp_path / "out", skip_train=True, **settings))
    assert line.config.checkpoint.save is None and not line.config.training.rollback_on_loss_spike
    assert any("nothing is trained or saved" in note for note in line.notes)
    with pytest.raises(CheckpointError, match=r"load\(.*\) holds no checkpoint"):
        Trainer(line.config).fit()
