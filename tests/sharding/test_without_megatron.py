"""The core stands on torch alone: it imports, and trains a plain module, where megatron-core cannot be imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run_ranks(num_ranks: int, folder: Path) -> list[dict[str, Any]]:
    """What each rank printed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.harness.plain_torch", str(rank), str(num_ranks), str(folder / "rendezvous")],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        outputs = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_trains_without_megatron(num_ranks: int, tmp_path: Path) -> None:
    ranks = run_ranks(num_ranks, tmp_path)
    for rank in ranks:
        assert rank["loaded"] == []
        assert rank["num_modules"] > 60
        # It starts at the targets' mean square, about 0.9, and has room to fit them.
        assert rank["losses"][-1] < 0.5 * rank["losses"][0], rank["losses"]
    assert len({rank["weights"] for rank in ranks}) == 1, "replicas differ"
