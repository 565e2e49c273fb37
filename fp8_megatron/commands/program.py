"""What the programs share: how an error is shown, the exit status, and what comes before megatron-core is imported."""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from ..errors import USER_ERROR_STATUS, UserError

#: torchrun ends all ranks when the first one exits: the others wait so long with an error that rank 0 shares.
_OTHERS_WAIT_SECONDS = 5.0


def exit_status(body: Callable[[], int], *errors: type[Exception]) -> int:
    """Run a program.

    Args:
        body: the program; returns its exit status.
        errors: exceptions that are the user's besides `UserError`, such as `OSError` where files are all that it does.

    Returns:
        The exit status: that of `body`, or `USER_ERROR_STATUS` after one line on stderr for a user's error.
    """
    users: tuple[type[Exception], ...] = (UserError, *errors)
    try:
        return body()
    except users as error:
        show(error)
        return USER_ERROR_STATUS


def show(error: Exception) -> None:
    """Say on stderr what is wrong, with the rank where it is not rank 0."""
    rank = int(os.environ.get("RANK", "0"))
    if rank != 0:
        time.sleep(_OTHERS_WAIT_SECONDS)
    print(f"error: {error}" if rank == 0 else f"error on rank {rank}: {error}", file=sys.stderr, flush=True)


def prepare_megatron() -> None:
    """Call before the first import of megatron-core: the right cuDNN, and no word of optional packages it lacks."""
    from ..device.cudnn import load_bundled

    load_bundled()
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")
    logging.getLogger("megatron").setLevel(logging.ERROR)


def share_import_path() -> None:
    """Let Python programs that this one starts import the package of a clone that is not installed."""
    root = Path(__file__).parents[2]
    if not (root / "pyproject.toml").is_file():
        return
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(root) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(root), *filter(None, paths)])
