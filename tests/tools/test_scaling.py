"""benchmarks/scaling.py: what it runs, and what it makes of the figures."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import scaling
from benchmarks.scaling import Layout, plan, rows


def test_plan() -> None:
    assert plan([4, 1, 2], [1, 2, 4], num_micro_batches=2) == [
        Layout("weak", 1, 1, 2),
        Layout("weak", 2, 1, 2),
        Layout("weak", 4, 1, 2),
        Layout("strong", 1, 1, 8),  # 8 micro-batches a step in all, as 4 GPUs have
        Layout("strong", 2, 1, 4),
        Layout("tp", 4, 2, 4),
        Layout("tp", 4, 4, 8),
    ]
    with pytest.raises(ValueError, match=r"3 does not divide the most GPUs \(4\)"):
        plan([3, 4], [], 1)


def result(name: str, speed: float) -> dict[str, Any]:
    return {"name": name, "tokens_per_second_per_gpu": speed, "step_ms": 1.0, "peak_gb": 2.0}


def test_efficiency_is_against_the_fewest_gpus_of_a_kind() -> None:
    layouts = plan([1, 2], [2], num_micro_batches=1)
    speeds = {"weak-1gpus": 100.0, "weak-2gpus": 90.0, "strong-1gpus": 120.0, "tp-2gpus-tp2": 45.0}
    table = rows({layout: [result("O3", speeds[layout.name])] for layout in layouts})
    assert [(row["kind"], row["gpus"], row["efficiency"]) for row in table] == [
        ("weak", 1, 1.0),
        ("weak", 2, 0.9),
        ("strong", 1, 1.0),
        ("strong", 2, 0.75),  # the most GPUs are a point of both
        ("tp", 2, 0.5),
    ]


def test_bad_numbers_are_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", "7b", "--gpus", "2", "3", "--output-dir", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["scaling.py", *arguments])
    with pytest.raises(SystemExit, match="2"):
        scaling.main()
    assert "2 does not divide the most GPUs (3)" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
