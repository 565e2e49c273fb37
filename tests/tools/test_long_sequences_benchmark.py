"""benchmarks/long_sequences.py on a CPU: forms of one run have one loss, and a form that is none is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest import mock

import pytest

from benchmarks import long_sequences

TINY = (
    "--num-layers 3 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 4 --num-query-groups 2 "
    "--vocab-size 512 --make-vocab-size-divisible-by 16"
)


def run(output: Path, *runs: str) -> int:
    words = ["long_sequences.py", "--steps", "1", "--warm-up", "1", "--output", str(output), "--runs", *runs]
    with mock.patch.object(sys, "argv", [*words, "--", *TINY.split()]):
        return long_sequences.main()


def test_forms_of_one_run_have_one_loss(tmp_path: Path) -> None:
    output = tmp_path / "long.json"
    assert run(output, "64:none", "64:mlp+offload", "64:full+offload") == 0
    report = json.loads(output.read_text())
    plain, *others = report["rows"]
    assert all(row["losses"] == plain["losses"] for row in others) and len(plain["losses"]) == 2
    assert [row["form"] for row in report["rows"]] == ["none", "mlp+offload", "full+offload"]
    assert all(row["tokens_per_second"] == pytest.approx(64 / row["seconds"], rel=1e-2) for row in report["rows"])


def test_a_form_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(tmp_path / "long.json", "64:half")
    assert "--runs 64:half: give a length and none, or some of mlp full offload chunks" in capsys.readouterr().err
