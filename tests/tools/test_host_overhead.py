"""benchmarks/host_overhead.py without a GPU: every operator's call runs with kernels that do nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_run_without_a_gpu(tmp_path: Path) -> None:
    """In a process of its own, because it replaces the operators."""
    output = tmp_path / "host_overhead.json"
    program = [sys.executable, "benchmarks/host_overhead.py", "--no-op", "--output", str(output)]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads(output.read_text())
    assert written["command"] == f"python benchmarks/host_overhead.py --no-op --output {output}"
    assert written["device"] == "no-op kernels" and "torch" in written["versions"]
    rows = {row["name"]: row for row in written["rows"]}
    assert rows.keys() >= {"quantize_with_scale", "quantize_grad_output", "scaled_mm_into_", "adamw_step_"}
    for name, row in rows.items():
        assert min(row["direct_us"], row["dispatched_us"]) > 0, name
        assert name in done.stdout
