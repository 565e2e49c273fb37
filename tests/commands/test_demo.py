"""fp8-megatron demo: both losses, their memory and picture, and what it says to type next."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fp8_megatron.commands import demo

ROOT = Path(__file__).parents[2]


def fp8_megatron(words: str, folder: Path) -> str:
    """What a command prints in `folder`."""
    done = subprocess.run(
        [sys.executable, "-m", "fp8_megatron.cli", *shlex.split(words)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=840,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_it_trains_both_and_says_what_is_next(tmp_path: Path) -> None:
    printed = fp8_megatron("demo --train-iters 40", tmp_path)
    lines = re.findall(r"^ +(\d+) +(\d\.\d{4}) +(\d\.\d{4}) +([-+]\d+\.\d\d)%$", printed, re.MULTILINE)
    assert [int(step) for step, *_ in lines] == [10, 20, 30, 40]
    losses = [(float(bf16), float(fp8)) for _, bf16, fp8, _ in lines]
    # From about 6.9, the logarithm of the vocabulary. Losses of one step differ by up to 1.2% by chance.
    assert losses[-1][0] < 6.0 and all(abs(fp8 / bf16 - 1) < 0.03 for bf16, fp8 in losses), losses
    total = re.search(r"^.*\btotal\b.*", printed, re.MULTILINE)
    assert total is not None and "18.000" in total[0], "BF16's bytes a parameter"
    (folder,) = (tmp_path / "runs").iterdir()
    assert (folder / "loss.png").stat().st_size > 10_000
    (generate,) = re.findall(r"^ +fp8-megatron (generate .*)", printed, re.MULTILINE)
    assert "import os" in fp8_megatron(generate, tmp_path)


def test_a_folder_with_files_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").touch()
    assert demo.main(["--output-dir", str(tmp_path)]) == 2
    assert "is not empty; give a new folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_the_error_of_a_run_is_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "_make_data", lambda folder: 0)
    assert demo.main(["--output-dir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert re.match(r"error: the run in (BF16|FP8): .*tokenizer\.model", error) and error.count("\n") == 1
