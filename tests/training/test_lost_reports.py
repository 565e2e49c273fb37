"""A run whose output folder is damaged goes on to its end. Each file is one line of the log."""

from __future__ import annotations

import logging
import math
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fp8_megatron.config.io import parse_config
from fp8_megatron.reporting import report
from fp8_megatron.training import training_run
from fp8_megatron.training.trainer import Trainer
from tests.harness.runs import tiny_flags


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("only root mounts a disk")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def train(folder: Path, damage: Callable[[], None], monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    """Eight steps with all reports; the damage comes before the fourth."""
    step = training_run.train_step
    num_calls = 0

    def damaged(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 4:
            damage()
        return step(*args, **kwargs)

    monkeypatch.setattr(training_run, "train_step", damaged)
    every = {"fp8_health_interval": 1, "tensorboard": True, "profile": True, "profile_trace": True}
    flags = tiny_flags(folder, train_iters=8, eval_interval=3, eval_iters=1, **every, **settings)
    Trainer(parse_config([*flags, "--profile-step-start", "5", "--profile-step-end", "7"])).fit()


def check_log(caplog: pytest.LogCaptureFixture, *, at_most: int) -> str:
    """No traceback, lines for files, the last step; returns the summary, which names files that are there."""
    assert not any(record.exc_info for record in caplog.records)
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert 0 < len(told) <= at_most and all("\n" not in line for line in told), told
    assert any("training ends at iteration 8 of 8" in message for message in caplog.messages)
    summary = caplog.messages[-1]
    assert summary.startswith("training summary")
    for word in summary.split():
        assert not word.startswith("/") or Path(word).exists(), word
    return summary


def test_the_folder_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(report, "_REMOVAL_SECONDS", math.inf)  # the eight steps may take longer
    folder = tmp_path / "out"
    train(folder, lambda: shutil.rmtree(folder), monkeypatch)
    assert "written" not in check_log(caplog, at_most=9)
    assert (folder / "profile_rank0.json").exists()


def test_the_disk_is_full(full_disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    def damage() -> None:
        with (full_disk / "other").open("wb", buffering=0) as file:
            while True:
                try:
                    file.write(bytes(4096))
                except OSError:
                    return

    train(full_disk / "out", damage, monkeypatch)
    check_log(caplog, at_most=14)
