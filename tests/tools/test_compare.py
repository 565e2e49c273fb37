"""benchmarks/compare.py: a peer's figures are read, written and drawn; one that fails is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FIGURES = {
    "tok_s_gpu": 10.5,
    "step_ms": 5.0,
    "tflops_gpu": 2.0,
    "tflops_causal": 1.5,
    "mem_gb": 3.25,
    "losses": [3.0, 2.0],
}


def compare(folder: Path, script: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "compare.py"), "--model", "345m", "--runs"]
    command += ["--peer", f"stub-bf16={sys.executable} {script}", "--output-dir", str(folder), *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)


def test_a_peer_takes_part(tmp_path: Path) -> None:
    script = tmp_path / "peer.py"
    script.write_text(f"print('noise')\nprint('JSON ' + {json.dumps(json.dumps(FIGURES))})\n")
    done = compare(tmp_path / "out", script)
    assert done.returncode == 0, done.stderr
    (result,) = json.loads((tmp_path / "out" / "comparison.json").read_text())["results"]
    assert (result["name"], result["tokens_per_second_per_gpu"], result["peak_gb"]) == ("stub-bf16", 10.5, 3.25)
    assert (result["final_loss"], result["causal_tflops_per_gpu"]) == (2.0, 1.5)
    assert "stub-bf16" in (tmp_path / "out" / "comparison.md").read_text()
    assert (tmp_path / "out" / "comparison.png").stat().st_size > 1000


def test_speed_without_a_loss_is_an_error(tmp_path: Path) -> None:
    script = tmp_path / "peer.py"
    figures = {**FIGURES, "losses": [3.0, float("nan"), 2.0, float("nan")]}
    script.write_text(f"print('JSON ' + {json.dumps(json.dumps(figures))})\n")
    done = compare(tmp_path / "out", script)
    assert done.returncode == 1 and "stub-bf16 has no finite loss in steps [2, 4]" in done.stderr
    (result,) = json.loads((tmp_path / "out" / "comparison.json").read_text())["results"]
    assert result["losses"] == [3.0, None, 2.0, None] and "NaN" in (tmp_path / "out" / "comparison.md").read_text()


def test_a_peer_that_fails_is_named(tmp_path: Path) -> None:
    script = tmp_path / "peer.py"
    script.write_text("print('the reason'); raise SystemExit(3)\n")
    done = compare(tmp_path / "out", script)
    assert done.returncode == 1
    assert "stub-bf16 ended with status 3" in done.stderr and "the reason" in done.stderr


def test_a_peer_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    script = tmp_path / "peer.py"
    script.write_text(
        f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(100)\n"
    )
    done = compare(tmp_path / "out", script, "--timeout", "2")
    assert done.returncode == 1 and "stub-bf16 took longer than 2 s" in done.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
