"""One schema reads what a checkpoint says of its run: a forged field is one line with file, field, value and fix."""

from __future__ import annotations

import argparse
import errno
import json
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fp8_megatron.checkpoint import files
from fp8_megatron.checkpoint.description import check_rank_tensors, read_description
from fp8_megatron.checkpoint.files import META, CheckpointError
from fp8_megatron.checkpoint.loading import LoadOptions
from fp8_megatron.checkpoint.manifest import FileEntry, problem_with, read_manifest, write_manifest
from fp8_megatron.checkpoint.megatron_loading import open_megatron_checkpoint
from fp8_megatron.checkpoint.pickles import read_megatron_file
from fp8_megatron.commands import inspect_checkpoint
from fp8_megatron.config.precision import PrecisionConfig
from tests.harness.ranks import RankError, RankPool
from tests.harness.tiny_checkpoint import run_tiny_on_a_rank
from tests.harness.tiny_gpt import tiny_config

CONFIG = tiny_config(precision=PrecisionConfig(fp8_recipe="delayed"))


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one checkpoint, of iteration 2."""
    root = tmp_path_factory.mktemp("run")
    ranks.run(run_tiny_on_a_rank, CONFIG, 2, None, root, num_ranks=1)
    return root


#: Fields of checkpoint.json by their path → a forged value, and what has to be there.
FORGED: list[tuple[str, Any, str]] = [
    ("iteration", -5, "a whole number of at least 0 and up to"),
    ("iteration", 10**25, "a whole number of at least 0 and up to"),
    ("iteration", True, "a whole number"),
    ("consumed_samples", "x", "a whole number"),
    ("consumed_samples", 1.5, "a whole number"),
    ("consumed_samples", -5, "a whole number of at least 0"),
    ("consumed_samples", 10**25, "a whole number of at least 0 and up to"),
    ("consumed_samples", None, "a whole number"),
    ("consumed_samples", math.nan, "a whole number"),
    ("skipped_steps", [1], "a whole number"),
    ("scheduled_samples", "many", "a whole number"),
    ("left_out_samples", -1, "a whole number of at least 0"),
    ("tokens_of_next_step", 0, "a whole number of at least 1"),
    ("vocab_size", 0, "a whole number of at least 1"),
    ("padded_vocab_size", 2**60, "a whole number of at least 1 and up to"),
    ("level", 3, "text that can be printed"),
    ("level", "O3\x1b[31m\nerror: lost", "text that can be printed"),
    ("topology", [], "a dict"),
    ("topology.data_parallel_size", -1, "a whole number of at least 1"),
    ("topology.pipeline_model_parallel_size", 10**9, "a whole number of at least 1 and up to"),
    ("topology.pipeline_model_parallel_layout", 5, "text"),
    ("schedule", "linear", "a dict"),
    ("schedule.lr", math.inf, "a finite number"),
    ("schedule.decay_samples", 0, "a whole number of at least 1"),
    ("schedule.decay_style", "up", "one of "),
    ("schedule.global_batch_size", 2.5, "a whole number"),
    ("optimizer", "exp_avg", "a list"),
    ("due", 5, "a list"),
]


@pytest.mark.parametrize(
    ("field", "value", "expected"), FORGED, ids=[f"{field}-{value!r}" for field, value, _ in FORGED]
)
def test_a_forged_field_is_refused(saved: Path, tmp_path: Path, field: str, value: Any, expected: str) -> None:
    folder = Path(shutil.copytree(saved / "iter_0000002", tmp_path / "iter_0000002"))
    description = json.loads((folder / META).read_text())
    description["schedule"] = {"lr": 1.0, "global_batch_size": 2}
    section, _, name = field.rpartition(".")
    (description[section] if section else description)[name] = value
    (folder / META).write_text(json.dumps(description))
    with pytest.raises(CheckpointError, match=r"checkpoint.json is damaged: .*; use another iteration$") as raised:
        read_description(folder)
    text = str(raised.value)
    assert f"{field} is " in text and f", not {expected}" in text and "\n" not in text and "\x1b" not in text


def test_forged_lists_and_schedules_are_refused(saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved / "iter_0000002", tmp_path / "iter_0000002"))
    good = json.loads((folder / META).read_text())
    changes: list[tuple[dict[str, Any], str]] = [
        ({"ancestors": [1, "2"]}, "ancestors holds '2', not a whole number"),
        ({"due": [-1]}, "due holds -1, not a whole number of at least 0"),
        ({"schedule": {"lr": 1.0}}, "schedule has no global_batch_size"),
        (
            {"schedule": {"global_batch_size": 1, "warmup_samples": 8, "decay_samples": 8}},
            r"schedule.warmup_samples\(8\) is not below 8 of decay",
        ),
        ({"iteration": 3}, "is of iteration 3, its folder is named after 2"),
    ]
    for change, problem in changes:
        (folder / META).write_text(json.dumps({**good, **change}))
        with pytest.raises(CheckpointError, match=problem):
            read_description(folder)
    (folder / META).write_text(json.dumps(good))
    assert read_description(folder) == good


def _rewritten(saved: Path, root: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """A copy of a checkpoint with other tensors of its rank, and a manifest that fits them."""
    shutil.copytree(saved, root)
    folder = root / "iter_0000002"
    (path,) = folder.glob("rank_*.safetensors")
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    records = [record for record in read_manifest(folder) if record.name != path.name]
    found = problem_with(folder, FileEntry(path.name, path.stat().st_size, "00000000"))
    assert found is not None
    checksum = found.partition("crc32 is ")[2][:8]
    write_manifest(folder, [*records, FileEntry(path.name, path.stat().st_size, checksum)])
    return root


HISTORY = "amax_history.0/history"
#: What is forged in the tensors of a rank → the error.
TENSORS: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "step -5": (lambda of: of.update(step_count=torch.tensor([-5.0])), "step_count holds -5.0, not finite numbers"),
    "step nan": (lambda of: of["step_count"].fill_(math.nan), "step_count holds nan, not finite"),
    "steps": (lambda of: of.update(step_count=torch.ones(2)), r"step_count is float32 \[2\], not float32 \[1\]"),
    "amax nan": (lambda of: of[HISTORY].view(-1)[3:4].fill_(math.nan), "history holds nan, not finite numbers"),
    "amax -1": (
        lambda of: of[HISTORY].view(-1)[3:4].fill_(-1.0),
        "history holds -1.0, not finite numbers of at least 0",
    ),
    "amax flat": (lambda of: of.update({HISTORY: torch.ones(4)}), r"history is float32 \[4\], not float32 \[n, n\]"),
    "amax wide": (lambda of: of.update({HISTORY: torch.ones(16, 3)}), "history has 3 slots, and .*scale is "),
    "amax int": (lambda of: of.update({HISTORY: of[HISTORY].long()}), "history is int64 "),
    "no scale": (lambda of: of.pop("amax_history.0/scale"), "history has .* slots, and amax_history.0/scale is none"),
    "scale inf": (lambda of: of["amax_history.0/scale"].fill_(math.inf), "scale holds inf, not finite numbers of at"),
    "slots": (lambda of: of.update({"amax_history.0/slots": torch.ones(2).long()}), r"/slots is \[2\]"),
    "rng dtype": (lambda of: of.update({"rng/cpu": torch.ones(5056)}), r"rng/cpu is float32 .*; give --no-load-rng"),
    "rng short": (
        lambda of: of.update({"rng/cpu": of["rng/cpu"][:100]}),
        "rng/cpu has 100 bytes, not 5056; give --no-load",
    ),
    "rng noise": (lambda of: of["rng/cpu"].fill_(255), "is damaged: .*; give --no-load-rng"),
    "rng gone": (
        lambda of: of.pop("rng/tracker/model-parallel-rng"),
        "rng/tracker/model-parallel-rng is missing; give",
    ),
}


@pytest.mark.parametrize("forged", TENSORS)
def test_a_forged_tensor_of_a_rank_is_refused(ranks: RankPool, saved: Path, tmp_path: Path, forged: str) -> None:
    """Although its manifest fits: who forges a file forges that too."""
    change, problem = TENSORS[forged]
    root = _rewritten(saved, tmp_path / "forged", change)
    with pytest.raises(RankError, match=rf"CheckpointError.*{problem}"):
        ranks.run(run_tiny_on_a_rank, CONFIG, 1, root, None, num_ranks=1)
    if forged == "rng short":
        ranks.run(run_tiny_on_a_rank, CONFIG, 1, root, None, LoadOptions(rng=False), num_ranks=1)


def test_every_tensor_of_a_rank_has_a_row_in_the_schema(saved: Path) -> None:
    """A tensor that training saves and the schema does not know would pass unchecked."""
    (path,) = (saved / "iter_0000002").glob("rank_*.safetensors")
    for name, tensor in load_file(path).items():
        with pytest.raises(CheckpointError, match=f"{re.escape(name)} is .*, not "):
            check_rank_tensors(path, {name: tensor[None, None, None]})


#: Megatron's counts and sizes, forged.
COUNTS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"iteration": "x"}, {}, "iteration is 'x', not a whole number"),
    ({"iteration": 1.5}, {}, "iteration is 1.5, not a whole number"),
    ({"iteration": 10**25}, {}, "iteration is 1000.*, not a whole number of at least 0 and up to"),
    ({"opt_param_scheduler": {"num_steps": -1}}, {}, "num_steps is -1, not a whole number"),
    ({}, {"consumed_train_samples": 10**25}, "consumed_train_samples is 1000.*, not a whole number"),
    ({}, {"tensor_model_parallel_size": "x"}, "tensor_model_parallel_size is 'x', not a whole number"),
    ({}, {"pipeline_model_parallel_size": 0}, "pipeline_model_parallel_size is 0, not a whole number of at least 1"),
    ({"model": {5: torch.zeros(1)}}, {}, "its model names a parameter 5"),
    ({"model": {"a\x1b[31m": torch.zeros(1)}}, {}, r"its model names a parameter 'a\\x1b\[31m'"),
]


@pytest.mark.parametrize(("content", "arguments", "problem"), COUNTS, ids=[problem[:40] for _, _, problem in COUNTS])
def test_forged_fields_of_megatron_are_refused(
    tmp_path: Path, content: dict[str, Any], arguments: dict[str, Any], problem: str
) -> None:
    path = tmp_path / "mp_rank_00" / "model_optim_rng.pt"
    path.parent.mkdir()
    arguments = {"swiglu": True, **arguments}
    torch.save({"args": argparse.Namespace(**arguments), "model": {}, "iteration": 1, **content}, path)
    with pytest.raises(CheckpointError, match=rf"{tmp_path} is damaged: {problem}"):
        open_megatron_checkpoint(tmp_path)


@pytest.mark.parametrize("step", ["x", -1, 1.5, math.nan, torch.tensor(math.inf), torch.ones(2), 10**25])
def test_a_forged_step_of_megatron_is_refused(tmp_path: Path, step: Any) -> None:
    path = tmp_path / "mp_rank_00" / "model_optim_rng.pt"
    path.parent.mkdir()
    layer = {"decoder.layers.0.mlp.linear_fc1.weight": torch.zeros(2, 2)}
    torch.save({"model": layer, "iteration": 1, "optimizer": {"optimizer": {"param_groups": [{"step": step}]}}}, path)
    with pytest.raises(CheckpointError, match="is damaged: step is "):
        assert open_megatron_checkpoint(tmp_path).step_count == 0


@pytest.mark.parametrize("name", [META, "manifest.json"])
def test_a_checkpoint_is_read_through_stale_handles(saved: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(files, "_STALE_WAIT_SECONDS", 0.0)
    opened, left = files.opened, [name]

    def stale(path: Path) -> BinaryIO:
        if path.name in left:
            left.remove(path.name)
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return opened(path)

    monkeypatch.setattr(files, "opened", stale)
    folder = saved / "iter_0000002"
    assert read_description(folder)["iteration"] == 2 and read_manifest(folder)
    assert not left


@pytest.mark.parametrize("name", ["manifest.json", ".metadata", "rank_tp00_pp000_dp0000.safetensors"])
def test_a_pipe_in_the_place_of_a_file_is_refused(saved: Path, tmp_path: Path, name: str) -> None:
    """Reading it would wait for ever."""
    root = Path(shutil.copytree(saved, tmp_path / "copy"))
    (root / "iter_0000002" / name).unlink()
    os.mkfifo(root / "iter_0000002" / name)
    assert inspect_checkpoint.main([str(root), "--verify", "--values"]) != 0
    os.mkfifo(tmp_path / META)
    with pytest.raises(CheckpointError, match=r"checkpoint.json cannot be read .*not an ordinary file"):
        read_description(tmp_path)


def test_a_pipe_in_the_place_of_a_file_of_megatron_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "distrib_optim.pt")
    with pytest.raises(CheckpointError, match=r"distrib_optim.pt is damaged .*it is not an ordinary file"):
        read_megatron_file(tmp_path / "distrib_optim.pt")
