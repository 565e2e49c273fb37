"""benchmarks/any_model.py: models of transformers under several runs."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import any_model

ROOT = Path(__file__).parents[2]


def results_of(folder: Path, *flags: str) -> list[any_model.Result]:
    """What the benchmark wrote for tiny models with these flags."""
    pytest.importorskip("transformers")
    output = folder / "any_model.json"
    command = [sys.executable, "benchmarks/any_model.py", "--tiny", "--steps", "1", *flags, "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(output.read_text())
    assert report["device"] == "cpu" and "transformers" in report["versions"]
    names = [result.pop("name") for result in report["results"]]
    results = [any_model.Result(**result) for result in report["results"]]
    assert [result.name for result in results] == names
    return results


def test_what_is_measured() -> None:
    """Compiled runs follow --runs unless they are named; recorded ones may stand alone."""
    usual = any_model.cases(any_model.parse(["--runs", "O1", "O2"]))
    assert usual == [("O1", False, False), ("O2", False, False), ("O2", True, False)]
    named = any_model.parse("--runs --compiled-runs O3 --recorded-runs O2".split())
    assert any_model.cases(named) == [("O3", True, False), ("O2", False, True)]
    with pytest.raises(SystemExit):
        any_model.parse(["--runs"])


def test_documented_commands_are_taken() -> None:
    text = (ROOT / "docs" / "evidence.md").read_text().replace("\\\n", " ")
    commands = re.findall(r"^python benchmarks/any_model.py (.*)", text, re.MULTILINE)
    assert commands and all(any_model.cases(any_model.parse(shlex.split(words))) for words in commands)


@pytest.mark.slow
def test_runs_start_from_the_same_weights(tmp_path: Path) -> None:
    flags = ("--models", "bert-large", "--runs", "bf16-amp", "O2", "--compiled-runs", "--recorded-runs", "O2")
    amp, o2, recorded = results_of(tmp_path, *flags)
    assert (amp.model, amp.run, o2.run, o2.compiled) == ("bert-large", "bf16-amp", "O2", False)
    # log 256 = 5.55 at the start. FP8 moves the first loss by far less than other weights would.
    assert amp.losses[0] == pytest.approx(o2.losses[0], abs=0.02) and amp.losses[0] > 5.3
    assert recorded.recorded and not o2.recorded and recorded.losses == o2.losses
    assert amp.step_ms > 0 and o2.samples_per_second > 0


@pytest.mark.slow
@pytest.mark.parametrize("model", ["swin-1b", "vit-1.2b", "gpt2-xl", "llama-1b"])
def test_every_model_takes_fp8(model: str, tmp_path: Path) -> None:
    results = results_of(tmp_path, "--models", model, "--runs", "O1", "O3", "--compiled-runs")
    assert [(result.run, result.error) for result in results] == [("O1", None), ("O3", None)]
