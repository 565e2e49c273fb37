"""scripts/slurm/ under a real Slurm of one node: what preempts a job or ends its time changes no bit of its result."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fp8_megatron.checkpoint.files import iteration_folder
from fp8_megatron.checkpoint.manifest import read_manifest
from fp8_megatron.reporting.run_log import EVENTS_FILE, read_events
from fp8_megatron.watch.restarts import report
from tests.harness.runs import tiny_flags
from tests.harness.slurm import Slurm, running_slurm

ROOT = Path(__file__).parents[2]
BATCH_SCRIPT = ROOT / "scripts" / "slurm" / "venv.sbatch"
RECIPE = ROOT / "scripts" / "pretrain_gpt_345m.sh"
STEPS = 500
#: Waits for a signal. Slurm sends it to the sleep as well, so the shell waits again.
WAITING = "while true; do sleep 1 & wait; done"
#: One node without GPUs; the node's CPU has more ranks than it has cores.
PLACED = ("--gpus-per-node=0", "--nodes=1")


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with tempfile.TemporaryDirectory(prefix="slurm", dir="/tmp") as folder, running_slurm(Path(folder)) as cluster:
        yield cluster


def flags(folder: Path, **overrides: object) -> list[str]:
    """Two ranks whose steps last long enough together that a test can interfere."""
    run = {"train_iters": STEPS, "global_batch_size": 4, "fp8_recipe": "delayed", "num_workers": 1, **overrides}
    return ["--cpu-ranks", "2", *tiny_flags(folder, save=folder, save_interval=150, **run)]


def losses(folder: Path) -> dict[int, float]:
    """Iteration → loss, of all starts together."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["iteration"]: line["loss"] for line in lines if "loss" in line}


def state(folder: Path) -> dict[str, object]:
    """File → checksum, of the last checkpoint: masters, moments, scales, generators."""
    files = read_manifest(iteration_folder(folder, STEPS))
    return {file.name: file for file in files if file.name.endswith((".distcp", ".safetensors"))}


def wait_until(condition: Callable[[], bool], log: Path, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, log.read_text() if log.exists() else "no log"
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_that_is_preempted_and_told_to_stop_ends_as_an_undisturbed_one(slurm: Slurm, tmp_path: Path) -> None:
    undisturbed, disturbed, log = tmp_path / "undisturbed", tmp_path / "disturbed", tmp_path / "log"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    subprocess.run([RECIPE, "fp8", *flags(undisturbed)], cwd=ROOT, env=environment, check=True, capture_output=True)

    job = slurm.submit(*PLACED, f"--output={log}", BATCH_SCRIPT, RECIPE, "fp8", *flags(disturbed), cwd=ROOT)

    def has_started(number: int) -> bool:
        """Whether start `number` has trained some steps."""
        if not (disturbed / "metrics.jsonl").exists():
            return False
        begins = [e["iteration"] for e in read_events(disturbed / EVENTS_FILE) if e["kind"] in ("start", "resume")]
        return len(begins) > number and max(losses(disturbed), default=0) >= begins[number] + 5

    wait_until(lambda: has_started(0), log)
    slurm.submit("--partition=urgent", "--nodes=1", "--exclusive", "--wrap=true", "--output=/dev/null", cwd=ROOT)
    wait_until(lambda: has_started(1), log)
    slurm.run("scancel", "--signal=TERM", job)  # what the header's --signal sends before the time limit
    assert slurm.wait_for_end(job, 300) == "COMPLETED", log.read_text()

    events = read_events(disturbed / EVENTS_FILE)
    resumed = [event["iteration"] for event in events if event["kind"] == "resume"]
    stopped = [event["iteration"] for event in events if event["kind"] == "stop"]
    assert len(resumed) == 2 and resumed == stopped[:2] and stopped[2] == STEPS, events
    assert not any(iteration % 150 == 0 for iteration in resumed), "a stop that falls on a save tests nothing"
    assert [event["kind"] for event in events if event["kind"] in ("fault", "rollback", "restart")] == []
    assert losses(disturbed) == losses(undisturbed) and len(losses(disturbed)) == STEPS
    assert state(disturbed) == state(undisturbed)


def submit_stand_in(slurm: Slurm, folder: Path, body: str, *words: str, **variables: str) -> str:
    """A job whose recipe is a few lines of bash; the job's number. Its log is ``folder/log``."""
    command = folder / "command.sh"
    command.write_text(f"#!/usr/bin/env bash\n{body}\n")
    command.chmod(0o755)
    return slurm.submit(*PLACED, *words, f"--output={folder / 'log'}", BATCH_SCRIPT, command, cwd=ROOT, **variables)


@pytest.mark.slow
def test_the_time_limits_signal_comes_early_and_requeues(slurm: Slurm, tmp_path: Path) -> None:
    """The header asks for SIGTERM 600 s before the limit of three minutes, so Slurm sends it within its 30 s."""
    body = '[ "$SLURM_RESTART_COUNT" = 1 ] && exit 0; trap "echo told; exit 143" TERM; ' + WAITING
    job = submit_stand_in(slurm, tmp_path, body, "--time=3")
    assert slurm.wait_for_end(job, 150) == "COMPLETED", (tmp_path / "log").read_text()
    log = (tmp_path / "log").read_text()
    assert slurm.field(job, "Restarts") == "1" and log.count("told\n") == 1, log
    assert f"slurm job {job}: stopped by a signal and saved; requeued" in log
    assert log.rstrip().endswith(f"slurm job {job}: done")


@pytest.mark.slow
def test_a_lost_rank_requeues_without_the_node_that_failed_twice(slurm: Slurm, tmp_path: Path) -> None:
    fault = {"kind": "fault", "time": "", "hosts": ["other.example.org"]}
    line = report([fault, fault], num_nodes=2).splitlines()[-1]
    body = f'[ "$SLURM_RESTART_COUNT" = 1 ] && exit 0; echo "{line}"; exit 75'
    job = submit_stand_in(slurm, tmp_path, body)
    assert slurm.wait_for_end(job, 60) == "COMPLETED", (tmp_path / "log").read_text()
    assert slurm.field(job, "Restarts") == "1" and slurm.field(job, "ExcNodeList") == "other"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "restarts", "status"),
    [
        ("exit 2", 0, 2),
        ("exit 1", 0, 1),
        ("exit 75", 1, 75),
        ('echo "error: no more restarts: iteration 7 failed 3 times in the same way"; exit 75', 0, 75),
    ],
)
def test_a_mistake_is_not_requeued_and_a_lost_rank_not_for_ever(
    body: str, restarts: int, status: int, slurm: Slurm, tmp_path: Path
) -> None:
    job = submit_stand_in(slurm, tmp_path, body, MAX_REQUEUES="1")
    assert slurm.wait_for_end(job, 60) == "FAILED", (tmp_path / "log").read_text()
    assert slurm.field(job, "Restarts") == str(restarts) and slurm.field(job, "ExitCode") == f"{status}:0"


@pytest.mark.slow
def test_a_cancelled_job_stays_cancelled(slurm: Slurm, tmp_path: Path) -> None:
    job = submit_stand_in(slurm, tmp_path, 'trap "exit 143" TERM; echo begun; ' + WAITING)
    log = tmp_path / "log"
    wait_until(lambda: log.exists() and "begun" in log.read_text(), log)
    slurm.run("scancel", job)
    assert slurm.wait_for_end(job, 60) == "CANCELLED"
    assert slurm.field(job, "Restarts") == "0"
