"""Environment variables: those of a launcher, and those that another program would read as settings."""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping

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
