"""Shared by all programs: display of errors, exit status, and preparations for the import of megatron-core."""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from ..errors import USER_ERROR_STATUS, UserError

#: Seconds that other ranks wait before they exit with an error. torchrun ends all ranks when the first one exits, and
#: rank 0, which has the same error, must print it first.
_OTHERS_WAIT_SECONDS = 5.0


def exit_status(body: Callable[[], int], *errors: type[Exception]) -> int:
    """Run a program.

    Args:
        body: the program; returns its exit status.
        errors: exceptions besides `UserError` that are the user's, such as `OSError` if a program only handles files.

    Returns:
        The exit status: that of `body`; `USER_ERROR_STATUS` after one line on stderr for a user's error; a shell's
        status of SIGPIPE if nobody reads stdout.
    """
    users: tuple[type[Exception], ...] = (UserError, *errors)
    try:
        return body()
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _stdout_is_closed():
            return 128 + signal.SIGPIPE
        if not isinstance(error, users):
            raise
        show(error)
        return USER_ERROR_STATUS


def _stdout_is_closed() -> bool:
    """Whether the reader of stdout has left, as `head` does. Python then writes nothing more to it at its exit."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def show(error: Exception) -> None:
    """Print the error on stderr, with the rank unless it is rank 0."""
    rank = int(os.environ.get("RANK", "0"))
    if rank != 0:
        time.sleep(_OTHERS_WAIT_SECONDS)
    print(f"error: {error}" if rank == 0 else f"error on rank {rank}: {error}", file=sys.stderr, flush=True)


def prepare_megatron() -> None:
    """Call before the first import of megatron-core. Selects the right cuDNN, hides warnings on optional packages."""
    from ..device.cudnn import load_bundled

    load_bundled()
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")
    logging.getLogger("megatron").setLevel(logging.ERROR)


def share_import_path() -> None:
    """Let child Python programs import this package from a clone that is not installed."""
    root = Path(__file__).parents[2]
    if not (root / "pyproject.toml").is_file():
        return
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(root) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(root), *filter(None, paths)])
