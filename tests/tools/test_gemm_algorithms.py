"""benchmarks/gemm_algorithms.py: its problems, and what it says without a GPU."""

from __future__ import annotations

import sys
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
