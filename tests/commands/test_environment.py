"""Environment variables that another program would read as settings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fp8_megatron.commands.environment import check_no_fp4
from fp8_megatron.errors import UserError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["USE_W_SIMU_FP4", "USE_A_BACKWARD_SIMU_FP4", "MSAMP_USE_ACTIVATION_SIMULATE_FP4"])
def test_ms_amps_fp4_is_refused_by_name(name: str) -> None:
    with pytest.raises(UserError, match=rf"^{name}=1 asks for MS-AMP's FP4, which there is not; unset it"):
        check_no_fp4({"PATH": "/bin", name: "1"})
    check_no_fp4({name: "0", "USE_W_SIMU_FP8": "1", "NAME_USE_SIMU_FP4": "1"})


def test_its_script_stops_before_anything_starts() -> None:
    """The mode fp4 has the flags of the mode msamp."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "USE_W_SIMU_FP4": "1"}
    words = [sys.executable, "pretrain_gpt.py", "--msamp", "--dry-run", "--mock-data"]
    ended = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and "error: USE_W_SIMU_FP4=1 asks for MS-AMP's FP4" in ended.stderr
