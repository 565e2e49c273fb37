"""What a file of results says of its origin: the command, the commit, the device, versions of packages."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fp8_megatron.outputs import write_output


def commit() -> str | None:
    """Of the checkout that this file is in."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent, timeout=10
        )
    except OSError:
        return None
    return done.stdout.strip() or None


def device_name() -> str:
    """The GPU's name, or ``cpu``."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Versions of Python and of those packages that are installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def write_rows(output: Path, program: str, words: Sequence[str] | None, rows: Sequence[Any], *, device: str) -> None:
    """Write a table of results and its origin as JSON.

    Args:
        output: what ``--output`` gives.
        program: the path of the script in the repository.
        words: its arguments; None: those of this process.
        rows: dataclasses, one for each row of the table.
        device: what was measured.
    """
    result = {
        "command": shlex.join(["python", program, *(sys.argv[1:] if words is None else words)]),
        "commit": commit(),
        "device": device,
        "versions": versions(("torch", "triton")),
        "rows": [asdict(row) for row in rows],
    }
    write_output(output, (json.dumps(result, indent=1) + "\n").encode(), "--output")
