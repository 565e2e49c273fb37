"""benchmarks/kept_inputs.py: what FP8 layers keep of their inputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import kept_inputs


def test_sharing_and_recomputation_keep_less(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    output = tmp_path / "kept.json"
    kept_inputs.main(["--models", "bert-large", "--tiny", "--output", str(output)])
    (row,) = json.loads(output.read_text())["rows"]
    # Two layers of width 64 see 64 tokens. A layer's projections of query, key and value have one input, their output
    # and the first of the MLP have one each, and the second of the MLP four times as much. The head has one in FP8.
    unit = 64 * 64 / 1e6
    assert row["own_mb"] == pytest.approx((2 * (3 + 1 + 1 + 4) + 1) * unit)
    assert row["shared_mb"] == pytest.approx((2 * (1 + 1 + 1 + 4) + 1) * unit)
    assert row["recomputed_mb"] == pytest.approx((2 * (1 + 1 + 1) + 1) * unit)
    assert "bert-large" in capsys.readouterr().out
