"""Which Python makes the environment."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "setup_venv.sh"


def set_up(tmp_path: Path, python: str) -> subprocess.CompletedProcess[str]:
    """The script with a shim of a version manager on PATH, and Python 3.12 where pyenv keeps it. It gets no pip."""
    found, kept = tmp_path / "bin", tmp_path / "pyenv" / "versions" / "3.12.1" / "bin"
    found.mkdir()
    kept.mkdir(parents=True)
    for command in ("bash", "dirname"):
        (found / command).symlink_to(shutil.which(command) or command)
    shim = found / "python3.12"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    (kept / "python3").symlink_to(sys.executable)
    environment = {
        "PATH": str(found),
        "PYENV_ROOT": str(tmp_path / "pyenv"),
        "PYTHON": python,
        "VENV": str(tmp_path / "venv"),
        "VENV_ARGS": "--without-pip",
    }
    return subprocess.run(["bash", SCRIPT], env=environment, capture_output=True, text=True, timeout=60)


def test_a_python_that_pyenv_keeps_is_found(tmp_path: Path) -> None:
    ended = set_up(tmp_path, "python3.12")
    assert f"({tmp_path}/pyenv/versions/3.12.1/bin/python3)" in ended.stdout, ended
    assert (tmp_path / "venv" / "bin" / "python").exists()


def test_no_python_is_one_line(tmp_path: Path) -> None:
    ended = set_up(tmp_path, "python3.9")
    assert ended.returncode == 1 and ended.stdout == ""
    assert ended.stderr.startswith("no working Python 3.11, 3.12 or 3.13 with venv among: python3.9; install one")
    assert ended.stderr.count("\n") == 1
