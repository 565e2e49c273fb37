"""Environment variables: those of a launcher, and those that another program would read as settings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fp8_megatron.commands.environment import check_launcher, check_no_fp4, launched_ranks, take_mpi_ranks
from fp8_megatron.errors import UserError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["USE_W_SIMU_FP4", "USE_A_BACKWARD_SIMU_FP4", "MSAMP_USE_ACTIVATION_SIMULATE_FP4"])
def test_ms_amps_fp4_is_refused_by_name(name: str) -> None:
    with pytest.raises(UserError, match=rf"^{name}=1 asks for MS-AMP's FP4, which there is not; unset it"):
        check_no_fp4({"PATH": "/bin", name: "1"})
    check_no_fp4({name: "0", "USE_W_SIMU_FP8": "1", "NAME_USE_SIMU_FP4": "1"})


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ("WORLD_SIZE=2", "WORLD_SIZE=2 asks for several ranks, but RANK and MASTER_ADDR and MASTER_PORT are not set"),
        ("WORLD_SIZE=2 RANK=0", "WORLD_SIZE=2 asks for several ranks, but MASTER_ADDR and MASTER_PORT are not set; "),
        ("WORLD_SIZE=2 RANK=1 MASTER_ADDR=a", "WORLD_SIZE=2 asks for several ranks, but MASTER_PORT is not set; "),
        ("WORLD_SIZE=2 RANK=2 MASTER_ADDR=a MASTER_PORT=1", "RANK=2 and WORLD_SIZE=2 contradict each other; "),
        ("RANK=1", "RANK=1 and WORLD_SIZE=1 contradict each other; "),
        ("RANK=x", "RANK=x is not a whole number from 0 to "),
        ("WORLD_SIZE=", "WORLD_SIZE= is not a whole number from 1 to "),
    ],
)
def test_a_launcher_that_left_variables_unset_is_told_before_a_rank_waits(variables: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_launcher(dict(word.split("=") for word in variables.split()))


def test_ranks_of_a_launcher() -> None:
    check_launcher({})
    assert launched_ranks({}) == (0, 1)
    assert launched_ranks({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}) == (1, 2)


def test_its_script_stops_before_anything_starts() -> None:
    """The mode fp4 has the flags of the mode msamp."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "USE_W_SIMU_FP4": "1"}
    words = [sys.executable, "pretrain_gpt.py", "--msamp", "--dry-run", "--mock-data"]
    ended = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and "error: USE_W_SIMU_FP4=1 asks for MS-AMP's FP4" in ended.stderr


MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}


def test_ranks_of_mpirun_are_found() -> None:
    """As scripts with mpirun start them, which pass the place to meet on."""
    environment = {**MPI, "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    take_mpi_ranks(environment)
    assert launched_ranks(environment) == (5, 8)
    assert (environment["LOCAL_RANK"], environment["LOCAL_WORLD_SIZE"]) == ("1", "4")
    check_launcher(environment)
    alone = dict(MPI)
    take_mpi_ranks(alone)
    with pytest.raises(UserError, match=r"MASTER_ADDR and MASTER_PORT are not set; .* -x MASTER_ADDR=HOST -x MASTER_P"):
        check_launcher(alone)


@pytest.mark.parametrize("own", [{"RANK": "0", "WORLD_SIZE": "2"}, {"LOCAL_RANK": "0"}])
def test_a_launcher_goes_before_mpirun(own: dict[str, str]) -> None:
    """torchrun under mpirun, one a node."""
    environment = {**MPI, **own}
    take_mpi_ranks(environment)
    assert environment == {**MPI, **own}
