"""A real run on one node: what it listens at, and what becomes of it when its terminal or its launcher goes."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from fp8_megatron.checkpoint.files import saved_iterations
from fp8_megatron.reporting.run_log import EVENTS_FILE, read_events
from tests.harness.listening import beyond_loopback, listening
from tests.harness.runs import GPU_RUN, tiny_flags

ROOT = Path(__file__).parents[2]
#: Seconds. A busy machine starts a run in one minute.
STARTED_WITHIN = 240.0
#: Seconds that docs/failures.md gives ranks after their launcher has gone.
ENDED_WITHIN = 30.0


def environment(*, on_gpu: bool = False) -> dict[str, str]:
    hidden = {} if on_gpu else {"CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **hidden, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended."""
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@contextmanager
def tree(process: subprocess.Popen[bytes]) -> Iterator[list[psutil.Process]]:
    """A list for the processes below `process`. None of them outlives the test."""
    below: list[psutil.Process] = []
    try:
        yield below
    finally:
        with suppress(psutil.NoSuchProcess):
            below += psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        for one in alive(below):
            one.kill()


def trains(folder: Path, process: subprocess.Popen[bytes], log: Path) -> bool:
    """Whether the run in `folder` has made some steps. It must not have ended."""
    assert process.poll() is None, log.read_text()
    assert time.time() - psutil.Process(process.pid).create_time() < STARTED_WITHIN, log.read_text()
    metrics = folder / "metrics.jsonl"
    return metrics.exists() and metrics.read_text().count("\n") > 3


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["--cpu-ranks", "2"], marks=pytest.mark.slow),
        pytest.param(["--cpu-ranks", "2", "--restart"], marks=pytest.mark.slow),
        pytest.param(["--gpus", "0"], marks=pytest.mark.slow),
        pytest.param(["--gpus", "1"], marks=pytest.mark.gpu),
        pytest.param(["--gpus", "1", "--restart"], marks=pytest.mark.gpu),
        pytest.param(["--gpus", "2"], marks=pytest.mark.multigpu),
    ],
    ids=" ".join,
)
def test_a_run_of_one_node_listens_at_the_loopback_interface_alone(words: list[str], tmp_path: Path) -> None:
    on_gpu = words[0] == "--gpus" and words[1] != "0"
    flags = tiny_flags(tmp_path / "run", **(GPU_RUN if on_gpu else {}), train_iters=1_000_000)
    command = [sys.executable, "-m", "fp8_megatron.cli", "train", *words, *flags]
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment(on_gpu=on_gpu), stdout=log, stderr=log)
    with tree(process) as below:
        found: set[tuple[str, int]] = set()
        while not trains(tmp_path / "run", process, tmp_path / "log"):  # also what listens at the start alone
            below[:] = psutil.Process(process.pid).children(recursive=True)
            found |= beyond_loopback(process.pid, *(one.pid for one in below))
            time.sleep(0.05)
        assert found == set()
        stores = {"--cpu-ranks 2": 1, "--cpu-ranks 2 --restart": 1, "--gpus 2": 1, "--gpus 1 --restart": 0}
        if (num_stores := stores.get(" ".join(words))) is not None:
            assert len(listening(process.pid)) == num_stores, "of the launcher"


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--cpu-ranks", "2"], ["--gpus", "0"]])
def test_a_run_whose_terminal_closes_saves_and_ends(words: list[str], tmp_path: Path) -> None:
    """It has the terminal for its input and all its output, as at a prompt."""
    folder = tmp_path / "run"
    flags = tiny_flags(folder, save=folder / "saved", train_iters=1_000_000)
    command = [sys.executable, "-m", "fp8_megatron.cli", "train", *words, *flags]
    terminal, theirs = pty.openpty()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: _take_terminal(theirs),
    )
    os.close(theirs)
    log = tmp_path / "log"
    log.touch()
    with tree(process) as below:
        while not trains(folder, process, log):
            if select.select([terminal], [], [], 0.2)[0]:
                with open(log, "ab") as file:
                    file.write(os.read(terminal, 65536))
        below[:] = psutil.Process(process.pid).children(recursive=True)
        os.close(terminal)
        assert process.wait(60) in (0, 128 + signal.SIGHUP)
        _, left = psutil.wait_procs(below, timeout=ENDED_WITHIN)
        assert alive(left) == []
    (saved,) = saved_iterations(folder / "saved")
    last = read_events(folder / EVENTS_FILE)[-1]
    assert last["kind"] == "stop" and last["iteration"] == saved and "signal" in last["text"]


def _take_terminal(terminal: int) -> None:
    """Make it the controlling one of this session, which the kernel then tells of its end."""
    import fcntl
    import termios

    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
