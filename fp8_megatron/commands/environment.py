"""Environment variables of a launcher, and training runs in processes of their own.

Such a run ends with the program that started it, by SIGKILL too. The program names itself in the environment of the
run, and the run asks Linux for SIGTERM at the end of its parent. A run that trains then saves after its step and ends.
A launcher passes SIGTERM on to its ranks (`launch`), which follow it in the same way. A run that is told no parent,
such as one behind a shell, follows none.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager

from ..device.variables import check_variables
from ..errors import UserError

#: Switches of MS-AMP's simulated FP4, for example USE_W_SIMU_FP4. Its scripts export them in the mode fp4.
_FP4 = re.compile(r"(MSAMP_)?USE_\w*SIMU(LATE)?_FP4")

#: What torchrun tells every rank.
_LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

#: What Open MPI's mpirun tells every process, under torchrun's names.
_OPEN_MPI = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}
#: Names the process that a run ends with.
_PARENT = "FP8_MEGATRON_PARENT"
#: Names an option of ``linux/prctl.h``.
_PR_SET_PDEATHSIG = 1


def take_mpi_ranks(environment: MutableMapping[str, str]) -> None:
    """Give a process of Open MPI's mpirun the variables that torchrun sets, unless a launcher set one of them.

    Each process would take itself for the only rank otherwise.
    """
    names = _OPEN_MPI.values()
    if not set(_OPEN_MPI) & set(environment) and all(environment.get(name, "").isdecimal() for name in names):
        environment.update({name: environment[theirs] for name, theirs in _OPEN_MPI.items()})


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that is no rank of the launch that this one may belong to."""
    told = {*_LAUNCHER, *_OPEN_MPI, *_OPEN_MPI.values()}
    return {name: v for name, v in environment.items() if name not in told and not name.startswith("TORCHELASTIC_")}


def launched_ranks(environment: Mapping[str, str]) -> tuple[int, int]:
    """(rank, world size) of this process. Without a launcher it is the only one.

    Raises:
        UserError: a variable that this program reads is not what it may be, or ranks contradict each other.
    """
    check_variables(environment)
    return int(environment.get("RANK", "0")), int(environment.get("WORLD_SIZE", "1"))


def check_launcher(environment: Mapping[str, str]) -> None:
    """Raise `UserError` if several ranks are asked for without a place to meet: this one would wait in vain."""
    _, world_size = launched_ranks(environment)
    missing = [name for name in _LAUNCHER if name not in environment]
    if world_size > 1 and missing:
        has_mpi = _OPEN_MPI["RANK"] in environment
        passed_on = "; mpirun passes it on with -x MASTER_ADDR=HOST -x MASTER_PORT=PORT" if has_mpi else ""
        raise UserError(
            f"the environment variable WORLD_SIZE={world_size} asks for several ranks, but {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set; unset it, or start with torchrun or fp8-megatron train"
            f"{passed_on}"
        )


def check_no_fp4(environment: Mapping[str, str]) -> None:
    """Raise `UserError` for a variable that turns MS-AMP's FP4 on: its script has no flag that says so."""
    for name, value in sorted(environment.items()):
        if _FP4.fullmatch(name) and value not in ("", "0"):
            raise UserError(f"{name}={value} asks for MS-AMP's FP4, which there is not; unset it to train in FP8")


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
