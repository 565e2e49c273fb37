"""Training runs end with the program that started them, by SIGKILL too, and save before they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from fp8_megatron.checkpoint.files import iteration_folder, saved_iterations
from fp8_megatron.checkpoint.manifest import problem_with, read_manifest
from fp8_megatron.reporting.metrics_file import METRICS_FILE, read_rows

ROOT = Path(__file__).parents[2]
#: Seconds. A busy machine starts a run in one minute.
STARTED_WITHIN = 240.0
#: Seconds. A step of these runs takes some hundredths, and their checkpoint little more.
ENDED_WITHIN = 60.0
MODEL = "--vocab-size 64 --num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16"
STEPS = "--micro-batch-size 2 --train-iters 1000000 --eval-interval 1000000 --eval-iters 1 --lr 1e-3"
TRAINING = ["--mock-data", "--num-workers", "1", *MODEL.split(), *STEPS.split()]
#: Says that it lives, and what it was told. Without a parent to follow it ends by itself.
FOLLOWER = """
import os, signal, sys, time
from fp8_megatron.commands.environment import follow_parent
follow_parent()
signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b"told\\n"), sys.exit()))  # whole lines of two ranks
os.write(1, b"lives\\n")
time.sleep(30)
"""


def lives(process: psutil.Process) -> bool:
    """A process that has ended but that nobody has asked for does not."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def wait_until(happened: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not happened() and time.monotonic() < end:
        time.sleep(0.1)
    return happened()


@contextmanager
def started(command: list[str], **settings) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:  # type: ignore[no-untyped-def]
    """A process, and a list of those below it, which the caller fills. None of them outlives the test."""
    process = subprocess.Popen(command, cwd=ROOT, text=True, **settings)
    below: list[psutil.Process] = []
    try:
        yield process, below
    finally:
        with suppress(psutil.NoSuchProcess):
            below += psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        for one in below:
            with suppress(psutil.NoSuchProcess):
                one.kill()


def test_a_run_whose_parent_has_died_before_it_looks_ends_at_once() -> None:
    parent = subprocess.Popen([sys.executable, "-S", "-c", ""])
    parent.wait()
    environment = {**os.environ, "FP8_MEGATRON_PARENT": str(parent.pid), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", FOLLOWER], env=environment, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "")


def test_a_run_is_told_that_its_parent_was_killed(tmp_path: Path) -> None:
    (tmp_path / "follower.py").write_text(FOLLOWER)
    parent = f"""
import subprocess, sys
from fp8_megatron.commands.environment import run_environment
subprocess.run([sys.executable, {str(tmp_path / "follower.py")!r}], env=run_environment())
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with started([sys.executable, "-c", parent], stdout=subprocess.PIPE, env=environment) as (process, below):
        assert process.stdout is not None and process.stdout.readline() == "lives\n"
        below += psutil.Process(process.pid).children()
        process.kill()
        assert process.stdout.read() == "told\n"  # until nobody can write there


def test_a_run_that_nobody_started_follows_nobody() -> None:
    """Such as one in the background of a shell that ends."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    shell = ["sh", "-c", f'{sys.executable} -c "$0" & sleep 3; kill -9 $$', FOLLOWER]
    with started(shell, stdout=subprocess.PIPE, env=environment) as (process, below):
        assert process.stdout is not None and process.stdout.readline() == "lives\n"
        below += psutil.Process(process.pid).children()
        process.wait()
        time.sleep(1)
        assert lives(next(one for one in below if "python" in one.name()))


#: Ranks of a run, and the fewest processes below the command: a launcher of several ranks, ranks, a loader of each.
@pytest.mark.parametrize(("num_ranks", "num_below"), [(1, 2), pytest.param(2, 5, marks=pytest.mark.slow)])
def test_runs_of_parity_save_and_end_when_it_is_killed(num_ranks: int, num_below: int, tmp_path: Path) -> None:
    """The command alone is killed, while its first run trains on the CPU."""
    metrics = tmp_path / "runs" / "bf16_seed_1" / METRICS_FILE
    words = ["--output-dir", str(tmp_path), "--levels", "bf16", "O3", "--seeds", "1", "--ranks-per-run", str(num_ranks)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-m", "fp8_megatron.cli", "parity", *words, "--", *TRAINING]
    with started(program, env=environment) as (process, below):
        trains = wait_until(lambda: metrics.exists() and len(read_rows(metrics)) > 20, STARTED_WITHIN)
        below += psutil.Process(process.pid).children(recursive=True)
        assert trains and len(below) >= num_below
        process.kill()
        process.wait()
        assert wait_until(lambda: not any(map(lives, below)), ENDED_WITHIN), [one for one in below if lives(one)]
    checkpoints = metrics.parent / "checkpoints"
    (saved,) = saved_iterations(checkpoints)
    last = iteration_folder(checkpoints, saved)
    assert [problem for one in read_manifest(last) if (problem := problem_with(last, one))] == []
    assert saved == max(record["iteration"] for record in read_rows(metrics))


def test_ranks_are_told_that_their_launcher_was_killed(tmp_path: Path) -> None:
    (tmp_path / "follower.py").write_text(FOLLOWER)
    launcher = (
        "from fp8_megatron.commands.launch import NodeRanks, run_ranks\n"
        "run_ranks('follower', [], NodeRanks(2, on_cpu=True))"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    with started([sys.executable, "-c", launcher], stdout=subprocess.PIPE, env=environment) as (process, below):
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["lives\n"] * 2
        below += psutil.Process(process.pid).children()
        process.kill()
        assert process.stdout.read() == "told\n" * 2
