"""benchmarks/tensor_parallel.py on two CPU ranks: times, checks and writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_two_ranks_over_gloo(tmp_path: Path) -> None:
    output = tmp_path / "out" / "rows.json"
    flags = ["--tokens", "32", "--hidden", "64", "--check-exchanges", "2", "--output", str(output)]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "benchmarks/tensor_parallel.py", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "fc2 [64, 128]" in done.stdout and "0 of 2 exchanges wrong" in done.stdout
    report = json.loads(output.read_text())
    assert [row["name"] for row in report["rows"]] == ["qkv", "fc1", "proj", "fc2"]
    assert all(row["alone"] > 0 and row["by_parts"] is None for row in report["rows"])
    gathered = [row["name"] for row in report["rows"] if (row["cast_then_gathered"] or 0) > 0]
    assert gathered == [row["name"] for row in report["rows"] if (row["gathered_then_cast"] or 0) > 0] == ["qkv", "fc1"]
