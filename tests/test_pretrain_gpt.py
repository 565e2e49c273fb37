"""Errors that a user sees: one clear message that names the value and the fix, and a status ≠ 0."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import pretrain_gpt
from fp8_megatron.device.device import UnsupportedDeviceError, check_fp8_support
from tests.harness.runs import tiny_flags
from tests.harness.token_files import write_token_files

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Call the entry point with the tiny run's flags and overrides; its exit status and what it printed as an error."""

    def call(*extra: str, world_size: int = 1, **overrides: object) -> tuple[int, str]:
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        flags = tiny_flags(tmp_path / "out", **{"train_iters": 2, **overrides})
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *flags, *extra])
        try:
            status = pretrain_gpt.main()
        except SystemExit as error:
            status = int(error.code or 0)
        monkeypatch.delenv("WORLD_SIZE")
        return status, capsys.readouterr().err

    return call


@pytest.mark.parametrize(
    ("overrides", "world_size", "expected"),
    [
        ({"tensor_model_parallel_size": 3}, 4, ["tensor_model_parallel_size(3)", "WORLD_SIZE(4)"]),
        ({"tensor_model_parallel_size": 2, "num_attention_heads": 1}, 2, ["num_attention_heads(1)"]),
        (
            {"hidden_size": 48, "tensor_model_parallel_size": 2},
            2,
            ["FP8 GEMM", "= 48 is not a multiple of 16 × tensor_model_parallel_size(2)"],
        ),
        ({"global_batch_size": 5}, 1, ["global_batch_size(5)", "micro_batch_size(2)"]),
        ({"pipeline_model_parallel_size": 2, "num_layers": 3}, 2, ["num_layers(3)"]),
    ],
    ids=["sizes", "heads", "hidden", "batch", "layers"],
)
def test_impossible_layouts(run: Run, overrides: dict, world_size: int, expected: list[str]) -> None:
    status, message = run(world_size=world_size, **overrides)
    assert status == 2
    assert all(text in message for text in expected), message


def test_a_typo_in_a_flag_suggests_the_nearest(run: Run) -> None:
    status, message = run("--num-layrs", "4")
    assert status == 2
    assert "--num-layers" in message


def test_an_unknown_yaml_key_suggests_the_nearest(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "typo.yaml"
    path.write_text("model:\n  num_layer: 4\n")
    status, message = run("--config", str(path))
    assert status == 2
    assert "num_layer" in message and "num_layers" in message and str(path) in message


def _good(prefix: Path) -> None:
    write_token_files(prefix, [list(range(60)) for _ in range(20)])


def _truncate(path: Path, keep: float) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda p: p.with_suffix(".bin").unlink(), ".bin"),
        (lambda p: p.with_suffix(".idx").unlink(), ".idx"),
        (lambda p: p.with_suffix(".bin").write_bytes(b""), ".bin"),
        (lambda p: p.with_suffix(".idx").write_bytes(b""), ".idx"),
        (lambda p: _truncate(p.with_suffix(".bin"), 0.5), ".bin"),
        (lambda p: _truncate(p.with_suffix(".idx"), 0.5), ".idx"),
        (lambda p: write_token_files(p, [[63, 64, 70] * 20] * 20), "70"),
    ],
    ids=["no-bin", "no-idx", "empty-bin", "empty-idx", "short-bin", "short-idx", "token-beyond-vocabulary"],
)
def test_bad_token_files(run: Run, tmp_path: Path, damage: Callable[[Path], object], expected: str) -> None:
    prefix = tmp_path / "tokens"
    _good(prefix)
    damage(prefix)
    flags = {"mock_data": None, "data_path": [prefix], "tokenizer_type": "NullTokenizer", "split": "100,0,0"}
    status, message = run(**flags)
    assert status == 2
    assert str(prefix) in message and expected in message, message


def test_files_of_two_datasets(run: Run, tmp_path: Path) -> None:
    """A .bin beside another dataset's .idx."""
    _good(tmp_path / "tokens")
    write_token_files(tmp_path / "other", [list(range(50)) for _ in range(7)])
    (tmp_path / "other.bin").rename(tmp_path / "tokens.bin")
    flags = {"mock_data": None, "data_path": [tmp_path / "tokens"], "tokenizer_type": "NullTokenizer"}
    status, message = run(split="100,0,0", **flags)
    assert status == 2
    assert "tokens.bin" in message, message


def test_good_token_files_train(run: Run, tmp_path: Path) -> None:
    """Guards the two tests above: it is the damage that is refused."""
    _good(tmp_path / "tokens")
    flags = {"mock_data": None, "data_path": [tmp_path / "tokens"], "tokenizer_type": "NullTokenizer"}
    status, message = run(split="100,0,0", **flags)
    assert status == 0, message


def test_checkpoint_of_another_shape(run: Run, tmp_path: Path) -> None:
    """The flag is named with both values before anything is built."""
    assert run(save=tmp_path / "saved")[0] == 0
    status, message = run(load=tmp_path / "saved", ffn_hidden_size=64)
    assert status == 2
    assert "ffn_hidden_size(None), this run has ffn_hidden_size(64), another model; give --ffn-hidden-size" in message


def test_truncated_checkpoint(run: Run, tmp_path: Path) -> None:
    assert run(save=tmp_path / "saved")[0] == 0
    (file,) = (tmp_path / "saved").glob("iter_*/*.safetensors")
    _truncate(file, 0.6)
    status, message = run(load=tmp_path / "saved")
    assert status == 2
    assert str(file) in message and "damaged" in message, message


def test_te_says_what_to_install(run: Run) -> None:
    if __import__("importlib").util.find_spec("transformer_engine") is not None:
        pytest.skip("Transformer Engine is installed")
    status, message = run(precision="te")
    assert status == 2
    assert "pip install" in message and "transformer_engine" in message, message


@pytest.mark.parametrize(
    ("capability", "expected"), [((8, 0), "--precision bf16"), ((7, 5), "nothing here")], ids=["ampere", "turing"]
)
def test_fp8_on_a_gpu_without_fp8(capability: tuple[int, int], expected: str) -> None:
    with pytest.raises(UnsupportedDeviceError, match=f"{capability[0]}.{capability[1]}") as error:
        check_fp8_support(torch.device("cuda"), capability)
    assert expected in str(error.value)


def test_hopper_has_fp8() -> None:
    check_fp8_support(torch.device("cuda"), (9, 0))


def test_exit_status_of_the_program(tmp_path: Path) -> None:
    """The real program under torchrun: status 1, the message on stderr, no Python traceback of ours."""
    flags = tiny_flags(tmp_path, train_iters=2, tensor_model_parallel_size=2)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "pretrain_gpt.py", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    root = Path(pretrain_gpt.__file__).parent
    result = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=root, timeout=120, check=False
    )
    assert result.returncode == 1  # torchrun's own status, for any status of the ranks
    assert "error: tensor_model_parallel_size(2)" in result.stderr
    assert "trainer.py" not in result.stderr


def test_another_models_checkpoint_is_refused_before_anything_starts(run: Run, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    assert run(save=saved)[0] == 0
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    for setting, own, other in (("num_layers", 2, 1), ("hidden_size", 32, 64)):
        status, message = run(load=saved, **{setting: other})
        assert status == 2
        flag = "--" + setting.replace("_", "-")
        expected = f"was saved with {setting}({own}), this run has {setting}({other}), another model; give {flag} {own}"
        assert expected in message
        assert not (tmp_path / "out").exists()
