"""fp8-megatron train on two nodes (two launchers of this machine): a rank that dies restarts the ranks of both."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from fp8_megatron.checkpoint.files import saved_iterations
from fp8_megatron.reporting.run_log import EVENTS_FILE, read_events
from tests.harness.runs import tiny_flags

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_both_nodes_restart_and_go_on_from_the_checkpoint(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tmp_path / "run"
    placed = ["--cpu-ranks", "1", "--nnodes", "2", "--master-addr", "localhost", "--master-port", str(port)]
    flags = tiny_flags(folder, save=folder, save_interval=20, train_iters=60)
    command = [sys.executable, "-m", "fp8_megatron.cli", "train", *placed, "--max-restarts", "2", *flags]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "SLURM_JOB_ID": "9"}
    launchers = []
    for node in range(2):
        with open(tmp_path / f"log{node}", "wb") as log:
            words = [*command, "--node-rank", str(node)]
            launchers.append(subprocess.Popen(words, cwd=ROOT, env=environment, stdout=log, stderr=log))
    try:
        end = time.monotonic() + 240
        while not (folder.exists() and saved_iterations(folder)):
            assert time.monotonic() < end and launchers[1].poll() is None, (tmp_path / "log1").read_text()
            time.sleep(0.2)
        [rank] = psutil.Process(launchers[1].pid).children()
        rank.send_signal(signal.SIGKILL)
        assert [launcher.wait(400) for launcher in launchers] == [0, 0], (tmp_path / "log0").read_text()
    finally:
        for launcher in launchers:
            launcher.terminate()
    events = [event for event in read_events(folder / EVENTS_FILE) if event["kind"] not in ("save", "rollback")]
    assert [event["kind"] for event in events] == ["start", "fault", "restart", "resume", "stop"]
    assert events[1]["fault"] == "rank_lost" and events[3]["iteration"] >= 20
    assert {event["launch"] for event in events if "launch" in event} == {"9.0"}


def test_a_port_that_is_taken_is_one_line(tmp_path: Path) -> None:
    """The first node's launcher opens the port on which the nodes meet."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        placed = ["--cpu-ranks", "1", "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port]
        command = [sys.executable, "-m", "fp8_megatron.cli", "train", *placed, *tiny_flags(tmp_path / "run")]
        ended = subprocess.run(
            command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120
        )
    assert ended.returncode == 2
    line = f"error: --master-port {port} is in use on this node; give another one, the same on every node\n"
    assert ended.stderr.endswith(line) and "Traceback" not in ended.stderr
