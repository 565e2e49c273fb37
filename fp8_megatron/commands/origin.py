"""What results of a comparison say of their origin."""

from __future__ import annotations

import platform
import subprocess
from typing import Any

from .program import clone


def origin() -> dict[str, Any]:
    """The commit of this project, None outside of a clone or without git, the device, and versions."""
    import torch

    return {
        "commit": _commit(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def _commit() -> str | None:
    root = clone()
    if root is None:  # a repository around an installed package is another one
        return None
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None
