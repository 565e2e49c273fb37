"""The casts of the logits' gradient: the orderings that docs/ablations.md states."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import lm_head


def test_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """512 tokens: the mean of a sum's rounding errors, 4.1% of a few elements each, is below 4.1% / √512 = 0.2%."""
    output = tmp_path / "lm_head.json"
    assert lm_head.main(["--tokens", "512", "--vocabulary", "2048", "--width", "128", "--output", str(output)]) == 0
    found = json.loads(output.read_text())["gradients"]
    one, token = found["E5M2, one scale"], found["E5M2, a scale a token"]
    assert one["sum_percent"] < -0.6 and abs(token["sum_percent"]) < 0.2
    assert token["input_db"] > one["input_db"] + 1 and token["weight_db"] > one["weight_db"] + 1
    assert found["E4M3, one scale"]["zeros"] > 0.2 > 0.01 > token["zeros"]
    assert found["16 bits"]["input_db"] > 40 and abs(found["16 bits"]["sum_percent"]) < 0.1
    assert "a scale a token" in capsys.readouterr().out


def test_a_size_that_a_gemm_does_not_take_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        lm_head.main(["--width", "40"])
    assert "--width 40 is not a multiple of 16" in capsys.readouterr().err
