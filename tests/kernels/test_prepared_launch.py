"""`PreparedLaunch` without a GPU, where Triton is installed: it compiles for a GPU that need not be there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("launcher", ["Recorder", "CudaLauncher"])
def test_a_prepared_launch_passes_what_triton_passes(launcher: str) -> None:
    """In a process of its own, because it replaces Triton's driver."""
    pytest.importorskip("triton")
    program = [sys.executable, "-m", "tests.kernels.empty_launches", launcher]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
