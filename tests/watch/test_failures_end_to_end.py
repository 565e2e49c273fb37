"""The real program on two ranks, one of which is killed or stopped in the middle of a step."""

from __future__ import annotations

import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import pretrain_gpt
from fp8_megatron.reporting.metrics_file import METRICS_FILE
from fp8_megatron.watch.failures import EXIT_STATUS
from tests.harness.runs import tiny_flags

pytestmark = pytest.mark.slow

ROOT = Path(pretrain_gpt.__file__).parent
#: Seconds. A rank that is killed breaks the others' connections: three missed beats of 2 s, and one to notice, name it.
#: torchrun ends what is left within 30 s more. On a busy machine, twice that.
KILLED_WITHIN = 60.0
#: A rank that is stopped breaks nothing: the collective's timeout must not be needed.
TIMEOUT_SECONDS = 30.0
Start = Callable[..., "Run"]


class Run:
    """A run of two ranks, started by torchrun or rank by rank; its steps, its processes and what they say."""

    def __init__(self, folder: Path, *, torchrun: bool) -> None:
        self.folder = folder
        flags = tiny_flags(folder, train_iters=100_000, distributed_timeout_minutes=TIMEOUT_SECONDS / 60)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        if torchrun:
            self.processes = [self._popen([*launcher, "pretrain_gpt.py", *flags], environment, "log")]
            return
        port = _free_port()
        self.processes = []
        for rank in range(2):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            command = [sys.executable, "pretrain_gpt.py", *flags]
            self.processes.append(self._popen(command, environment | place, f"log{rank}"))

    def wait_for_steps(self, count: int) -> None:
        metrics = self.folder / METRICS_FILE
        deadline = time.monotonic() + 180.0
        while not metrics.exists() or metrics.read_text().count("\n") < count:
            assert time.monotonic() < deadline, self.said()
            assert all(process.poll() is None for process in self.processes), self.said()
            time.sleep(0.1)

    def ranks(self) -> list[int]:
        """Process ids of the ranks."""
        if len(self.processes) > 1:
            return [process.pid for process in self.processes]
        children = psutil.Process(self.processes[0].pid).children()
        found = {int(child.environ()["RANK"]): child.pid for child in children if "RANK" in child.environ()}
        return [found[0], found[1]]

    def said(self, rank: int | None = None) -> str:
        """What all ranks wrote, or one that has a log of its own."""
        return "".join(log.read_text() for log in sorted(self.folder.glob("log*" if rank is None else f"log{rank}")))

    def _popen(self, command: list[str], environment: dict[str, str], log: str) -> subprocess.Popen[bytes]:
        with (self.folder / log).open("wb") as file:
            return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    runs: list[Run] = []

    def start(*, torchrun: bool) -> Run:
        runs.append(Run(tmp_path, torchrun=torchrun))
        return runs[-1]

    yield start
    for run in runs:
        for process in run.processes:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def assert_names(said: str, dead: int, process: int, folder: Path) -> None:
    """What the survivor says: who is gone, the collective it was in, and its flight recorder."""
    survivor = 1 - dead
    message = said.partition(f"error on rank {survivor}: ")[2]
    assert message.startswith(f"rank {dead} (host "), said
    assert f", process {process};" in message.splitlines()[0]
    place = message.partition(f"Rank {survivor} was training, iteration ")[2].splitlines()[0]
    of_a_group = r"(all_reduce|all_to_all|all_gather|reduce_scatter)\w* of \w+ \(ranks 0, 1\), number \d+ on "
    assert re.search(of_a_group, place) or "in forward and backward by a CUDA graph among ranks 0, 1" in place
    recorded = folder / f"flight_recorder_rank_{survivor}"
    assert f"Flight recorder: {recorded}." in place
    assert pickle.loads(recorded.read_bytes())["entries"]


def test_killed_under_torchrun(start: Start, tmp_path: Path) -> None:
    run = start(torchrun=True)
    run.wait_for_steps(20)
    ranks = run.ranks()
    os.kill(ranks[1], signal.SIGKILL)
    assert run.processes[0].wait(timeout=KILLED_WITHIN) != 0
    assert not any(psutil.pid_exists(process) for process in ranks)
    assert_names(run.said(), 1, ranks[1], tmp_path)


@pytest.mark.parametrize("dead", [1, 0], ids=["rank_1", "rank_0_which_keeps_the_store"])
def test_killed_where_no_agent_sees_it(start: Start, tmp_path: Path, dead: int) -> None:
    run = start(torchrun=False)
    run.wait_for_steps(20)
    ranks = run.ranks()
    os.kill(ranks[dead], signal.SIGKILL)
    assert run.processes[1 - dead].wait(timeout=KILLED_WITHIN) == EXIT_STATUS
    assert_names(run.said(1 - dead), dead, ranks[dead], tmp_path)


@pytest.mark.parametrize("stopped", [1, 0], ids=["rank_1", "rank_0_which_keeps_the_store"])
def test_stopped(start: Start, tmp_path: Path, stopped: int) -> None:
    """The other ends before the collective's timeout; the stopped one, when it goes on, ends too."""
    run = start(torchrun=False)
    run.wait_for_steps(20)
    ranks = run.ranks()
    os.kill(ranks[stopped], signal.SIGSTOP)
    assert run.processes[1 - stopped].wait(timeout=TIMEOUT_SECONDS) == EXIT_STATUS
    assert_names(run.said(1 - stopped), stopped, ranks[stopped], tmp_path)
    os.kill(ranks[stopped], signal.SIGCONT)
    assert run.processes[stopped].wait(timeout=KILLED_WITHIN) == EXIT_STATUS
