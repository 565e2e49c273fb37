"""Comparisons of levels: statistics against known values, and times to one loss of curves drawn by hand."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from fp8_megatron.reporting.metrics_file import METRICS_FILE
from fp8_megatron.reporting.parity import (
    RunResult,
    compare_runs,
    draw_parity,
    markdown_table,
    paired_t_test,
    read_run,
)


def result(level: str, seed: int, final: float, *, step_seconds: float = 1.0, start: float = 4.0) -> RunResult:
    """A run whose validation loss falls in a line from `start` at step 10 to `final` at step 30."""
    curve = [(10, start), (20, (start + final) / 2), (30, final)]
    return RunResult(level, seed, 30, final, final + 0.1, step_seconds, 100 / step_seconds, 1.0, 0, curve, curve)


@pytest.mark.parametrize(
    ("gaps", "p_value", "half_width"),
    [
        # Tables of Student's t: 12.706, 4.303 and 2.776 at 95% for 1, 2 and 4 degrees of freedom.
        ([1.0, 2.0], 2 * math.atan(1 / 3) / math.pi, 12.706 * 0.5),
        ([1.0, 2.0, 3.0], 0.0742, 4.303 / math.sqrt(3)),
        ([1.0, -1.0, 2.0, -2.0, 0.0], 1.0, 2.776 * math.sqrt(2.5 / 5)),
    ],
)
def test_the_paired_t_test(gaps: list[float], p_value: float, half_width: float) -> None:
    measured = paired_t_test(gaps)
    assert measured == pytest.approx((p_value, half_width), rel=1e-3)


def test_gaps_are_taken_in_pairs_of_a_seed() -> None:
    runs = [result("bf16", 1, 2.0), result("bf16", 2, 3.0), result("O3", 2, 3.03), result("O3", 1, 2.02)]
    parity = compare_runs(runs, "bf16")
    assert parity is not None
    base, level = parity.levels
    assert base.gaps == [0.0, 0.0] and base.seed_spread == pytest.approx(math.sqrt(0.5) / 2.5)
    assert level.seeds == [1, 2] and level.gap == pytest.approx(0.01) and level.half_width == pytest.approx(0, abs=1e-9)
    assert level.tail_gap == pytest.approx((2.12 / 2.1 + 3.13 / 3.1) / 2 - 1)
    assert parity.common_loss == pytest.approx(2.525)


def test_a_seed_without_its_pair_is_left_out() -> None:
    runs = [result("bf16", 1, 2.0), result("bf16", 2, 3.0), result("O3", 2, 3.3), result("O1", 3, 1.0)]
    parity = compare_runs(runs, "bf16")
    assert parity is not None and [one.level for one in parity.levels] == ["bf16", "O3"]
    level = parity.levels[1]
    assert level.gaps == [pytest.approx(0.1)] and level.p_value is None and level.seed_spread is None
    assert compare_runs(runs, "te") is None


def test_time_to_the_same_loss() -> None:
    """O3 ends at 2.5 after 30 steps of half a second. bf16 goes from 3 at step 20 to 2 at step 30, so it has 2.5 after
    25 steps of a second."""
    parity = compare_runs([result("bf16", 1, 2.0), result("O3", 1, 2.5, step_seconds=0.5)], "bf16")
    assert parity is not None and parity.common_loss == 2.5
    base, level = parity.levels
    assert (base.seconds_to_loss, level.seconds_to_loss) == (25.0, 15.0)
    assert level.speed_up == pytest.approx(25 / 15) and base.speed_up == 1.0


def _write_metrics(folder: Path, num_steps: int, final: float | None, *, left_out: int | None = None) -> None:
    steps = [
        {
            "kind": "train",
            "iteration": i,
            "loss": 5.0 - i / num_steps,
            "step_seconds": 9.0 if i < 10 else 0.5,
            "tokens_per_second_per_gpu": 100.0,
            "peak_memory_gib": 2.0,
            "skipped_steps": 1,
        }
        for i in range(1, num_steps + 1)
        if i != left_out
    ]
    last = {"kind": "eval", "split": "valid", "iteration": num_steps, "loss": final}
    (folder / METRICS_FILE).write_text("".join(json.dumps(record) + "\n" for record in [*steps, last]))


def test_a_run_is_read_when_it_has_ended(tmp_path: Path) -> None:
    assert read_run(tmp_path, "O3", 1, num_steps=500) is None
    _write_metrics(tmp_path, 500, 4.5)
    assert read_run(tmp_path, "O3", 1, num_steps=501) is None
    run = read_run(tmp_path, "O3", 1, num_steps=500)
    assert run is not None and (run.final_loss, run.step_seconds, run.skipped_steps) == (4.5, 0.5, 1)
    assert run.tail_loss == pytest.approx(4 + 24.5 / 500)
    assert len(run.training) == 167 and run.training[0] == (3, pytest.approx(5 - 2 / 500))
    assert RunResult.from_json(json.loads(json.dumps(asdict(run)))) == run


def test_a_run_that_diverged_has_no_loss_at_its_end(tmp_path: Path) -> None:
    _write_metrics(tmp_path, 20, None)
    run = read_run(tmp_path, "O3", 1, num_steps=20)
    assert run is not None and run.diverged and run.final_loss is None and run.validation == []
    assert run.tail_loss == pytest.approx(4 + 0.5 / 20) and len(run.training) == 20
    assert RunResult.from_json(json.loads(json.dumps(asdict(run)))) == run


def test_a_run_that_training_ended_has_diverged(tmp_path: Path) -> None:
    _write_metrics(tmp_path, 10, 4.5)
    assert read_run(tmp_path, "O3", 1, num_steps=20) is None
    run = read_run(tmp_path, "O3", 1, num_steps=20, ended_early=True)
    assert run is not None and run.diverged and run.validation == [(10, 4.5)]


def _diverged(level: str, seed: int) -> RunResult:
    """One that is finite up to step 20."""
    curve = [(10, 4.0), (20, 3.0)]
    return replace(result(level, seed, 2.0), final_loss=None, tail_loss=None, validation=curve, training=curve)


def test_a_pair_with_a_run_that_diverged_has_no_gap(tmp_path: Path) -> None:
    runs = [result("bf16", seed, 2.0) for seed in (1, 2)] + [_diverged("bf16", 3)]
    runs += [result("O3", 1, 2.02), _diverged("O3", 2), result("O3", 3, 9.0), *(_diverged("O1", s) for s in (1, 2, 3))]
    parity = compare_runs(runs, "bf16")
    assert parity is not None and parity.common_loss == 2.02
    base, o3, o1 = parity.levels
    assert (base.seeds, base.diverged) == ([1, 2], [3])
    assert (o3.seeds, o3.diverged, o3.final_loss) == ([1], [2], 2.02) and o3.gap == pytest.approx(0.01)
    assert (o1.seeds, o1.diverged, o1.gap, o1.tail_gap, o1.final_loss) == ([], [1, 2, 3], None, None, None)
    assert o1.speed_up is None and o3.speed_up is not None
    text = " ".join(markdown_table(parity).split())
    assert "| O3 | 1 (diverged: 2) | 2.0200 | +1.000% |" in text
    assert "| O1 | 0 (diverged: 1, 2, 3) | | |" in text
    draw_parity(runs, parity, tmp_path / "parity.png")
    assert (tmp_path / "parity.png").stat().st_size > 10_000


def test_the_report(tmp_path: Path) -> None:
    runs = [result("bf16", 1, 2.0), result("bf16", 2, 2.2), result("O3", 1, 2.01), replace(result("O3", 2, 2.21))]
    parity = compare_runs(runs, "bf16")
    assert parity is not None
    text = " ".join(markdown_table(parity).split())
    assert "| O3 | 2 | 2.1100 | +0.477% | ±0.289%" in text and "σ = 6.734%" in text
    draw_parity(runs, parity, tmp_path / "parity.png")
    assert (tmp_path / "parity.png").stat().st_size > 10_000
