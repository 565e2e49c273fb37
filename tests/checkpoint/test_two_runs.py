"""The real program twice over one folder: while the first lives, was orphaned by its torchrun, or is frozen."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import pretrain_gpt
from fp8_megatron.checkpoint.files import iteration_folder, saved_iterations
from fp8_megatron.checkpoint.manifest import problem_with, read_manifest
from fp8_megatron.checkpoint.run_lock import LOCK
from tests.harness.runs import tiny_flags

pytestmark = pytest.mark.slow

ROOT = Path(pretrain_gpt.__file__).parent
#: Seconds. A busy machine starts a run in one minute.
STARTED_WITHIN = 240.0
#: A second run that waits for 20 s instead of 60, and takes the first one for dead after 15 s without a beat, not 30.
IMPATIENT = [
    "-c",
    """
import runpy, sys
from fp8_megatron.checkpoint import run_lock
from fp8_megatron.training import run_start
run_lock.DEAD_AFTER_SECONDS, run_start._WAIT_SECONDS = 15.0, 20.0
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
""",
]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


class Run:
    """A resumable run that saves every 20 steps."""

    def __init__(self, folder: Path, name: str, *, launcher: list[str], train_iters: int) -> None:
        self.log = folder / f"{name}.log"
        saving = {"save": folder / "saved", "load": folder / "saved", "save_interval": 20, "keep_last": 3}
        flags = tiny_flags(folder / name, train_iters=train_iters, lr_decay_iters=10**6, **saving)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with self.log.open("wb") as file:
            command = [sys.executable, *launcher, "pretrain_gpt.py", *flags]
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)

    def said(self) -> str:
        """Its log."""
        return self.log.read_text()

    def wait_until(self, text: str) -> None:
        """Wait for a text in the log of a run that lives."""
        deadline = time.monotonic() + STARTED_WITHIN
        while text not in self.said():
            assert self.process.poll() is None and time.monotonic() < deadline, self.said()
            time.sleep(0.1)


Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start runs over one folder; they end with the test."""
    runs: list[Run] = []

    def begin(name: str, *, launcher: list[str] | None = None, train_iters: int = 10**6) -> Run:
        runs.append(Run(tmp_path, name, launcher=launcher or [], train_iters=train_iters))
        return runs[-1]

    yield begin
    for run in runs:
        if run.process.poll() is None:
            for process in [*psutil.Process(run.process.pid).children(recursive=True), run.process]:
                process.kill()
        run.process.wait()


def assert_whole(root: Path) -> None:
    """Every checkpoint there is as its manifest says, and nothing else is left."""
    for iteration in saved_iterations(root):
        folder = iteration_folder(root, iteration)
        assert [problem for record in read_manifest(folder) if (problem := problem_with(folder, record))] == []
    assert all(path.name.startswith(("iter_", "latest_")) for path in root.iterdir())
    assert not list(root.glob("iter_*.*"))


def announced(run: Run) -> list[int]:
    """Iterations that a run reported as saved."""
    return [int(line.split("iter_")[1].split()[0]) for line in run.said().splitlines() if line.startswith("saved ")]


def test_the_second_run_is_refused_and_the_first_is_undisturbed(tmp_path: Path, start: Start) -> None:
    first = start("first")
    first.wait_until("iter_0000040 in")
    second = start("second", launcher=IMPATIENT)
    assert second.process.wait(timeout=STARTED_WITHIN + 90.0) == 2
    lines = [line for line in second.said().splitlines() if "saved is in use by process" in line or "error:" in line]
    assert len(lines) == 2 and f"process {first.process.pid} on " in lines[0] and "waiting up to 20 s" in lines[0]
    assert lines[1].startswith(f"error: save({tmp_path / 'saved'}) is in use by process {first.process.pid} on ")
    assert "stop that run, or give another --save" in lines[1] and announced(second) == []
    first.process.send_signal(signal.SIGTERM)
    assert first.process.wait(timeout=60.0) == 0
    numbers = announced(first)
    assert numbers[:2] == [20, 40] and saved_iterations(tmp_path / "saved") == numbers[-3:]
    assert_whole(tmp_path / "saved")


def test_workers_that_outlive_their_torchrun_are_waited_for(tmp_path: Path, start: Start) -> None:
    first = start("first", launcher=TORCHRUN)
    first.wait_until("iter_0000020 in")
    workers = psutil.Process(first.process.pid).children()
    first.process.kill()
    first.process.wait()
    assert any(worker.is_running() for worker in workers)
    at_kill = max(announced(first))
    second = start("second", launcher=TORCHRUN, train_iters=at_kill + 10_000)
    second.wait_until("resumed from")
    assert not any(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in workers)
    resumed = int(second.said().split("at iteration ")[1].split()[0])
    assert resumed == max(announced(first)) >= at_kill
    second.wait_until(f"iter_{resumed // 20 * 20 + 40:07d} in")
    second.process.send_signal(signal.SIGTERM)
    second.process.wait(timeout=120.0)
    assert_whole(tmp_path / "saved")


def test_a_frozen_run_is_taken_over_and_stops_when_it_wakes_up(tmp_path: Path, start: Start) -> None:
    first = start("first")
    first.wait_until("iter_0000020 in")
    first.process.send_signal(signal.SIGSTOP)
    at_stop = max(announced(first))
    second = start("second", launcher=IMPATIENT)
    second.wait_until("taking over ")
    second.wait_until("resumed from")
    resumed = int(second.said().split("at iteration ")[1].split()[0])
    assert resumed >= at_stop
    second.wait_until(f"iter_{resumed // 20 * 20 + 20:07d} in")
    first.process.send_signal(signal.SIGCONT)
    assert first.process.wait(timeout=120.0) == 2
    error = first.said().splitlines()[-1]
    assert error.startswith("error: ") and f"was taken over by process {second.process.pid} on " in error
    assert max(announced(first)) <= resumed
    second.process.send_signal(signal.SIGTERM)
    assert second.process.wait(timeout=60.0) == 0
    assert not (tmp_path / "saved" / LOCK).exists()
    assert_whole(tmp_path / "saved")
