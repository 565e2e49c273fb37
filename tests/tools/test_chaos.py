"""The chaos run: its draw and its bookkeeping, and (slow) a short one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import chaos


@pytest.mark.slow
def test_a_short_chaos_run_ends_in_the_same_state(tmp_path: Path) -> None:
    output = tmp_path / "chaos.json"
    words = ["--ranks", "2", "--faults", "4", "--seed", "4", "--output", str(output), "--folder", str(tmp_path / "run")]
    status = chaos.main(words)
    result = json.loads(output.read_text())
    assert status == 0 and result["same_state_at_the_end"], result["problem"]
    assert len(result["faults"]) == 4
