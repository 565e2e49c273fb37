"""The inspection's report, against what was saved."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fp8_megatron.checkpoint.torch_dist import TorchDistReader
from fp8_megatron.commands import inspect_checkpoint
from fp8_megatron.conversion.safetensors_files import SafetensorsWriter, TensorSpec
from fp8_megatron.dtypes import E4M3
from tests.harness.ranks import RankPool
from tests.harness.tiny_checkpoint import run_tiny_on_a_rank
from tests.harness.tiny_gpt import LLAMA_STYLE, tiny_config

QKV = "decoder.layers.self_attention.linear_qkv.weight"


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run")
    ranks.run(run_tiny_on_a_rank, tiny_config(LLAMA_STYLE), 2, None, root, num_ranks=1)
    return root


def test_ours(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect_checkpoint.main([str(saved), "--values", "--verify", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["format"] == "ours" and report["description"]["iteration"] == 2
    assert report["description"]["level"] == "O3"
    lines = {line["name"]: line for line in report["tensors"]}
    value = TorchDistReader(saved / "iter_0000002").read_whole(QKV)
    line = lines[QKV]
    assert (line["shape"], line["dtype"], line["nbytes"]) == (list(value.shape), "float16", 2 * value.numel())
    assert line["amax"] == value.abs().max().item() and line["num_not_finite"] == 0
    assert line["rms"] == pytest.approx(value.square().mean().sqrt().item(), rel=1e-5)
    assert line["e4m3_scale"] == pytest.approx(line["amax"] / 448)
    assert "optimizer.exp_avg." + QKV in lines and any(name.startswith("rank_tp00") for name in lines)


def test_the_table_and_its_sums(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect_checkpoint.main([str(saved), "--filter", "linear_qkv.weight", "--verify"]) == 0
    text = capsys.readouterr().out
    num_elements = 2 * (4 + 2 * 2) * 32 * 128
    assert f"weights: 1 tensors, {num_elements:,} elements, {2 * num_elements / 1e6:.3f} MB" in text
    assert "optimizer.exp_avg_sq: 1 tensors" in text and "every file is as the manifest says" in text
    assert "iteration = 2" in text and "linear_fc1" not in text


def test_damage_is_reported(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = Path(shutil.copytree(saved, tmp_path / "copy"))
    file = root / "iter_0000002" / "config.yaml"
    file.write_bytes(file.read_bytes().replace(b"O3", b"O2", 1))
    assert inspect_checkpoint.main([str(root), "--verify"]) == 1
    assert "config.yaml is damaged" in capsys.readouterr().out
    assert inspect_checkpoint.main([str(tmp_path)]) == 2
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize("flags", [(), ("--verify",)], ids=["plain", "verify"])
def test_a_truncated_file_of_a_rank_is_reported(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    root = Path(shutil.copytree(saved, tmp_path / "copy"))
    (file,) = (root / "iter_0000002").glob("rank_*.safetensors")
    file.write_bytes(file.read_bytes()[:-10])
    assert inspect_checkpoint.main([str(root), "--json", *flags]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["problems"] and all(f"{file.name} is damaged" in problem for problem in report["problems"])
    names = {line["name"] for line in report["tensors"]}
    assert QKV in names and not any(name.startswith("rank_") for name in names)


def test_hugging_face_in_fp8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weight, scale = torch.randn(8, 4).to(E4M3), torch.tensor([0.25])
    specs = [TensorSpec("a.weight", E4M3, (8, 4)), TensorSpec("a.weight_scale", torch.float32, (1,))]
    with SafetensorsWriter(tmp_path, specs, max_shard_bytes=100) as writer:
        writer.write("a.weight", weight)
        writer.write("a.weight_scale", scale)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": {"a": 1}}))
    assert inspect_checkpoint.main([str(tmp_path), "--values", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    payload, stored_scale = sorted(report["tensors"], key=lambda line: line["name"])
    assert (report["format"], payload["dtype"], payload["nbytes"]) == ("hf", "float8_e4m3fn", 32)
    assert payload["amax"] == weight.float().abs().max().item() and stored_scale["amax"] == 0.25
    assert report["description"]["quantization_config"] == {"a": 1}


def test_names_are_shown_with_escapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither a terminal nor rich obeys a name or a setting of a foreign file."""
    name = "i\x1b[31m\nerror: all is lost [red]x[/] [/]"
    save_file({name: torch.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "a\x1b[2J\nb[/]"}))
    assert inspect_checkpoint.main([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert r"i\x1b[31m\nerror: all is lost [red]x[/] [/]" in shown and r"model_type = a\x1b[2J\nb[/]" in shown
    assert "\x1b" not in shown
    assert inspect_checkpoint.main([str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tensors"][0]["name"] == name
