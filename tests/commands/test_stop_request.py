"""SIGTERM or SIGHUP to a launcher of several ranks: each is told once, may take its time, and is not started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
_LAUNCHER = """
import sys
from fp8_megatron.commands.launch import NodeRanks, run_ranks
sys.exit(run_ranks("rank_program", [], NodeRanks(2, on_cpu=True, max_restarts=2)))
"""
#: Saves after it is told, as a rank does; a second SIGTERM would end it.
_SAVING = """
import os, signal, time
told = []
signal.signal(signal.SIGTERM, lambda *_: (told.append(1), signal.signal(signal.SIGTERM, signal.SIG_DFL)))
open(f"begun_{os.environ['RANK']}", "w").close()
while not told:
    time.sleep(0.05)
time.sleep(3)
open(f"saved_{os.environ['RANK']}", "w").close()
"""
#: Has no handler yet, as a rank that still imports.
_STARTING = """
import os, time
open(f"begun_{os.environ['RANK']}", "w").close()
open("starts", "a").write("x")
time.sleep(600)
"""


def start(folder: Path, program: str, **settings: Any) -> subprocess.Popen[bytes]:
    """A launcher whose two ranks have begun. It writes to `log`."""
    (folder / "rank_program.py").write_text(program)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{folder}"}
    with open(folder / "log", "wb") as log:
        command = [sys.executable, "-c", _LAUNCHER]
        launcher = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log, **settings)
    end = time.monotonic() + 120
    while len(list(folder.glob("begun_*"))) < 2:
        assert launcher.poll() is None and time.monotonic() < end
        time.sleep(0.1)
    return launcher


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_ranks_save_before_the_launcher_ends(number: signal.Signals, tmp_path: Path) -> None:
    launcher = start(tmp_path, _SAVING)
    launcher.send_signal(number)
    assert launcher.wait(60) == 128 + number
    assert len(list(tmp_path.glob("saved_*"))) == 2
    assert (tmp_path / "log").read_text() == f"{number.name} received: the ranks save and end\n"


@pytest.mark.slow
def test_nohup_is_obeyed(tmp_path: Path) -> None:
    launcher = start(tmp_path, _SAVING, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    launcher.send_signal(signal.SIGHUP)
    time.sleep(3)
    assert launcher.poll() is None and list(tmp_path.glob("saved_*")) == []
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(60) == 128 + signal.SIGTERM


@pytest.mark.slow
def test_ranks_that_have_not_begun_are_not_started_for_good(tmp_path: Path) -> None:
    launcher = start(tmp_path, _STARTING)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(120) == 128 + signal.SIGTERM
    assert len((tmp_path / "starts").read_text()) <= 6, "two ranks, started at most three times"


@pytest.mark.slow
def test_a_second_sigterm_does_not_wait_for_the_ranks(tmp_path: Path) -> None:
    launcher = start(tmp_path, _SAVING.replace("time.sleep(3)", "time.sleep(600)"))
    launcher.send_signal(signal.SIGTERM)
    time.sleep(2)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(60) == 128 + signal.SIGTERM
    assert list(tmp_path.glob("saved_*")) == []
