"""benchmarks/gemm_algorithms.py: its problems, and what it says without a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from benchmarks import gemm_algorithms


def test_the_problems_are_those_of_a_layer() -> None:
    problems = {
        gemm: sizes for _, gemm, *sizes in gemm_algorithms._problems("x", gemm_algorithms.LAYERS["gpt-30b-tp4"])
    }
    assert len(problems) == 12
    assert problems["fc1 forward"] == [1024, 7168, 7168] and problems["fc1 wgrad"] == [7168, 7168, 4096]
    assert problems["proj dgrad"] == [1024, 1792, 7168]
    for name in ("qkv", "proj", "fc1", "fc2"):
        m, n, k = problems[f"{name} forward"]
        assert problems[f"{name} dgrad"] == [m, k, n] and problems[f"{name} wgrad"] == [n, k, 4 * m]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says so where there is none")
def test_without_a_gpu_one_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.object(sys, "argv", ["gemm_algorithms.py"]):
        assert gemm_algorithms.main() == 2
    assert "needs a GPU" in capsys.readouterr().err


def test_the_sums_of_the_results_are_those_of_their_rows() -> None:
    path = Path(gemm_algorithms.__file__).parent / "results" / "gemm_algorithms_h100.json"
    report = json.loads(path.read_text())
    rows = [gemm_algorithms.Row(**row) for row in report["rows"]]
    for model, sums in report["sums"].items():
        assert gemm_algorithms._sums([row for row in rows if row.model == model]) == sums
    assert report["sums"].keys() == gemm_algorithms.LAYERS.keys()
