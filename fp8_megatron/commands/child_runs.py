"""Training runs in processes of their own. They end with the program that started them, by SIGKILL too.

The program names itself in the environment of the run, and the run asks Linux for SIGTERM at the end of its parent. A
run that trains then saves after its step and ends. A launcher passes SIGTERM on to its ranks (`stop_request`), and its
ranks follow it in the same way. A run that is told no parent, such as one behind a shell, follows none.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from .environment import without_launcher

#: Names the process that a run ends with.
_PARENT = "FP8_MEGATRON_PARENT"
#: Of ``linux/prctl.h``.
_PR_SET_PDEATHSIG = 1


def training_command(flags: Sequence[str], num_ranks: int, *, on_gpus: bool) -> list[str]:
    """The command that trains on so many GPUs or processes of this machine. Several ranks get a launcher."""
    program = ["pretrain_gpt"] if num_ranks == 1 else ["train", "--gpus" if on_gpus else "--cpu-ranks", str(num_ranks)]
    return [sys.executable, "-m", f"{__package__}.{program[0]}", *program[1:], *flags]


def run_environment() -> dict[str, str]:
    """The environment of a run that follows this process. The thread that starts it must not end before it."""
    return {**without_launcher(os.environ), _PARENT: str(os.getpid())}


@contextmanager
def followed() -> Iterator[None]:
    """What starts in here in the environment of this process follows it."""
    os.environ[_PARENT] = str(os.getpid())
    try:
        yield
    finally:
        del os.environ[_PARENT]


def follow_parent() -> None:
    """Get SIGTERM at the end of the process that started this run; at once if it has ended already.

    A program calls it first. Processes that it starts do not follow it by that.
    """
    parent = os.environ.pop(_PARENT, None)
    if not parent:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM))
    if str(os.getppid()) != parent:  # it ended before the kernel knew
        signal.raise_signal(signal.SIGTERM)
