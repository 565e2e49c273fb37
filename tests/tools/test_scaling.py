"""benchmarks/scaling.py: what it runs, and what it makes of the figures."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import scaling
from benchmarks.scaling import Layout, plan, rounds, rows


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


def test_points_that_need_few_gpus_share_a_round() -> None:
    layouts = plan([1, 2, 4], [2], num_micro_batches=1)
    apart = rounds(layouts, 4, side_by_side=False)
    assert [[(layout, gpus)] for layout, gpus in (entry for part in apart for entry in part)] == apart
    assert [part[0][0] for part in apart] == layouts and all(part[0][1][0] == 0 for part in apart)
    shared = [[(point.name, gpus) for point, gpus in part] for part in rounds(layouts, 4, side_by_side=True)]
    assert shared == [
        [("weak-4gpus", [0, 1, 2, 3])],
        [("tp-4gpus-tp2", [0, 1, 2, 3])],
        [("weak-2gpus", [0, 1]), ("strong-2gpus", [2, 3])],
        [("weak-1gpus", [0]), ("strong-1gpus", [1])],
    ]


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


def test_a_point_that_failed_leaves_the_others() -> None:
    layouts = plan([1, 2], [], num_micro_batches=1)
    table = rows({layouts[1]: [result("O3", 90.0)]})
    assert [(row["kind"], row["efficiency"]) for row in table] == [("weak", 1.0)]


def test_bad_numbers_are_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", "7b", "--gpus", "2", "3", "--output-dir", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["scaling.py", *arguments])
    with pytest.raises(SystemExit, match="2"):
        scaling.main()
    assert "2 does not divide the most GPUs (3)" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_figures_of_an_older_point_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older = tmp_path / "weak-1gpus" / "comparison.json"
    older.parent.mkdir()
    older.write_text(json.dumps({"results": [result("O3", 90.0)]}))
    monkeypatch.setattr(scaling, "_command", lambda *_: [sys.executable, "-c", "raise SystemExit(1)"])
    monkeypatch.setattr(sys, "argv", ["scaling.py", "--model", "7b", "--gpus", "1", "--output-dir", str(tmp_path)])
    assert scaling.main() == 1
    assert not older.exists() and not (tmp_path / "scaling.json").exists()
