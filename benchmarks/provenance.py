"""What a file of results says of its origin: the commit, the device, versions of packages."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch


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
