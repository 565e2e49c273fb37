"""fp8-megatron train --max-restarts on a run that diverges for good: it goes back, tries again, and gives up."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from fp8_megatron.checkpoint.files import saved_iterations
from fp8_megatron.reporting.run_log import EVENTS_FILE, read_events
from tests.harness.runs import tiny_flags

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_run_that_diverges_for_good_ends_with_a_report(tmp_path: Path) -> None:
    """The second step has a learning rate of 1e29: the third overflows, and so does every later one."""
    saving = {"save": tmp_path, "save_interval": 1, "keep_last": 2}
    flags = tiny_flags(tmp_path, train_iters=20, precision="bf16", max_skipped_steps=3, lr=1e30, **saving)
    flags += ["--lr-warmup-init", "1e-6", "--lr-warmup-iters", "10", "--clip-grad", "0"]
    command = [sys.executable, "-m", "fp8_megatron.cli", "train", "--cpu-ranks", "1", "--max-restarts", "3", *flags]
    run = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert run.returncode not in (0, None), run.stderr
    events = read_events(tmp_path / EVENTS_FILE)
    kinds = Counter(found["kind"] for found in events)
    faults = [found for found in events if found["kind"] == "fault"]
    assert [found["fault"] for found in faults] == ["diverged"] * 3 and len({f["iteration"] for f in faults}) == 1
    assert (kinds["restart"], kinds["give_up"]) == (3, 2), kinds  # the fourth attempt, then the launcher
    # All attempts began at the same checkpoint, the last before the streak of skipped steps.
    resumed = [found["iteration"] for found in events if found["kind"] == "resume"]
    first_skipped = min(found["iteration"] for found in events if found["kind"] == "skip")
    assert resumed == [max(saved_iterations(tmp_path))] * len(resumed) and resumed[0] < first_skipped
    last = run.stderr[run.stderr.index("faults of this job") :]
    assert "failed 3 times in the same way (diverged)" in run.stderr
    assert last.count("iteration ") >= 3 and "loss or gradient was not finite" in last
