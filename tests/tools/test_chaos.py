"""The chaos run: its draw and its bookkeeping, and (slow) a short one."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import chaos
from benchmarks.chaos import summary, table
from benchmarks.chaos_faults import ACTIONS, GAP, Chaos, Fault, draw_faults
from benchmarks.chaos_job import Failed


def test_faults_are_drawn_by_seed_in_equal_numbers() -> None:
    faults = draw_faults(60, random.Random(5))
    assert faults == draw_faults(60, random.Random(5)) != draw_faults(60, random.Random(6))
    counts = Counter(fault.kind for fault in faults)
    assert set(counts) == set(ACTIONS) and set(counts.values()) <= {5, 6}
    gaps = [later.at - fault.at for fault, later in itertools.pairwise(faults)]
    assert GAP[0] <= min(gaps) < max(gaps) <= GAP[1]


@pytest.mark.parametrize(
    ("resumed", "announced", "older", "message"),
    [
        (40, 40, None, ""),
        (30, 40, None, "iteration 40 had been announced as saved"),
        (30, 30, None, "more than 10 steps are lost"),
        (30, 40, 30, ""),
        (20, 40, 30, "iteration 30 had been announced as saved"),
    ],
)
def test_what_was_announced_may_not_be_lost(
    tmp_path: Path, resumed: int, announced: int, older: int | None, message: str
) -> None:
    run = Chaos(tmp_path, 2, 100, random.Random(0))
    fault = Fault(1, "kill rank", 43, reached=45, resumed=resumed, lost=45 - resumed)
    if not message:
        run._check_lost(fault, announced, older)
        return
    with pytest.raises(Failed, match=message):
        run._check_lost(fault, announced, older)


def test_the_table_has_a_row_for_each_kind() -> None:
    faults = [Fault(1, "stop rank", 5, lost=3, seconds=60.0), Fault(2, "stop rank", 9, lost=7, seconds=70.0)]
    assert table(summary(faults)).splitlines()[2:] == ["| stop rank | 2 | 7 | 65, 70 |"]


@pytest.mark.slow
def test_a_short_chaos_run_ends_in_the_same_state(tmp_path: Path) -> None:
    output = tmp_path / "chaos.json"
    words = ["--ranks", "2", "--faults", "4", "--seed", "4", "--output", str(output), "--folder", str(tmp_path / "run")]
    status = chaos.main(words)
    result = json.loads(output.read_text())
    assert status == 0 and result["same_state_at_the_end"], result["problem"]
    assert len(result["faults"]) == 4
