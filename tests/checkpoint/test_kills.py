"""kill -9 while saving: the next run finds the newest checkpoint that was finished, or the one being finished."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from fp8_megatron.checkpoint.loading import load_checkpoint
from fp8_megatron.checkpoint.run_state import Progress
from fp8_megatron.checkpoint.saving import CheckpointWriter, Retention
from fp8_megatron.config.schema import ParallelConfig
from tests.harness.ranks import RankError, RankPool
from tests.harness.tiny_checkpoint import tiny_resumable, train_steps
from tests.harness.tiny_gpt import GPT3_STYLE, tiny_config

CONFIG = tiny_config(replace(GPT3_STYLE, num_layers=1), parallel=ParallelConfig(ddp_bucket_size=1 << 15))
BATCHES = 2


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _losses(num_steps: int) -> list[float]:
    with tiny_resumable(CONFIG, BATCHES) as (gpt, _):
        return train_steps(gpt, CONFIG, 0, num_steps, BATCHES)


def _run(root: Path, in_background: bool, delay: float | None, victim: int) -> tuple[int, list[float], float]:
    """Resume, then twice a step and a save; the victim is killed `delay` seconds after the first save has begun.

    Two facts are written down before the kill: where the run resumed, and that the first save is over. Returns that
    iteration, the losses and the seconds from the first save's begin to the second's end.
    """
    with tiny_resumable(CONFIG, BATCHES) as (gpt, state):
        progress = load_checkpoint(root / "saved", state) or Progress()
        is_first = gpt.topology.rank == 0
        if is_first:
            _note(root / "resumed_at", progress.iteration)
        writer = CheckpointWriter(
            root / "saved",
            gpt.topology,
            Retention(keep_last=2),
            in_background=in_background,
            resumed_at=progress.iteration,
        )
        losses = train_steps(gpt, CONFIG, progress.iteration, 1, BATCHES)
        torch.distributed.barrier()
        if delay is not None and gpt.topology.rank == victim:
            threading.Timer(delay, _die).start()
        started = time.monotonic()
        writer.save(state, Progress(progress.iteration + 1))
        losses += train_steps(gpt, CONFIG, progress.iteration + 1, 1, BATCHES)
        if in_background:
            writer.finish()
        if is_first:
            _note(root / "finished", progress.iteration + 1)
        writer.save(state, Progress(progress.iteration + 2))
        writer.finish()
        seconds = time.monotonic() - started
        if delay is not None:
            time.sleep(max(0.0, delay - seconds) + 0.1)
        return progress.iteration, losses, seconds


def _note(path: Path, number: int) -> None:
    """Write a number atomically: if the process dies, the file holds the old one or the new one."""
    aside = path.with_suffix(".new")
    aside.write_text(str(number))
    aside.replace(path)


def kill_and_resume(
    ranks: RankPool, root: Path, *, num_ranks: int, num_kills: int, in_background: bool, seed: int
) -> dict[str, int]:
    """Kill and resume again and again; how often each outcome came up."""
    generator = random.Random(seed)
    straight = ranks.run(_losses, 2 * num_kills + 4, num_ranks=num_ranks)[0]
    _, _, seconds = ranks.run(_run, root, in_background, None, 0, num_ranks=num_ranks)[0]
    outcomes = {"first lost": 0, "first kept": 0, "second kept": 0}
    kills = 0
    while kills < num_kills:
        delay, victim = generator.uniform(0.0, 1.1 * seconds), generator.randrange(num_ranks)
        try:
            ranks.run(_run, root, in_background, delay, victim, num_ranks=num_ranks, timeout_seconds=60.0)
        except RankError as error:
            assert "the process died" in str(error), error
            kills += 1
        before, finished = (int((root / name).read_text()) for name in ("resumed_at", "finished"))
        resumed = ranks.run(_resumes_at, root / "saved", num_ranks=num_ranks)[0]
        # Between the last finished and the last begun save of the killed run; training continues from there.
        assert max(before, finished) <= resumed <= before + 2, (finished, resumed, before)
        outcomes[["first lost", "first kept", "second kept"][resumed - before]] += 1
    iteration, losses, _ = ranks.run(_run, root, in_background, None, 0, num_ranks=num_ranks)[0]
    assert losses == straight[iteration : iteration + 2]
    assert len(list((root / "saved").glob("iter_*"))) <= 2
    return outcomes


@pytest.mark.parametrize("in_background", [False, True], ids=["at_once", "in_background"])
def test_kills_at_random_instants(ranks: RankPool, tmp_path: Path, in_background: bool) -> None:
    kill_and_resume(ranks, tmp_path, num_ranks=1, num_kills=3, in_background=in_background, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("in_background", [False, True], ids=["at_once", "in_background"])
@pytest.mark.parametrize(("num_ranks", "num_kills"), [(1, 15), (2, 6)])
def test_many_kills_at_random_instants(
    ranks: RankPool, tmp_path: Path, num_ranks: int, num_kills: int, in_background: bool
) -> None:
    outcomes = kill_and_resume(
        ranks, tmp_path, num_ranks=num_ranks, num_kills=num_kills, in_background=in_background, seed=num_ranks
    )
    print(f"{num_kills} kills of {num_ranks} ranks: {outcomes}")
    assert sum(count > 0 for count in outcomes.values()) >= 2, outcomes  # the instants are spread


class _DieAt:
    """Counts calls that change the disk, and kills the process right before or after the n-th."""

    def __init__(self, number: int) -> None:
        self.number, self.count = number, 0

    def around(self, function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            self._pass()
            result = function(*args, **kwargs)
            self._pass()
            return result

        return call

    def _pass(self) -> None:
        if self.count == self.number:
            _die()
        self.count += 1


def _save_and_die(root: Path, number: int) -> int:
    """Resume, save the next iteration, dying at the n-th instant; how many there were."""
    with tiny_resumable(CONFIG, BATCHES) as (gpt, state):
        progress = load_checkpoint(root, state) or Progress()
        writer = CheckpointWriter(root, gpt.topology, Retention(keep_last=1), resumed_at=progress.iteration)
        instants = _DieAt(number)
        with (
            mock.patch("os.replace", instants.around(os.replace)),
            mock.patch("os.fsync", instants.around(os.fsync)),
            mock.patch("shutil.rmtree", instants.around(shutil.rmtree)),
            mock.patch("pathlib.Path.mkdir", instants.around(Path.mkdir)),
            mock.patch("pathlib.Path.unlink", instants.around(Path.unlink)),
        ):
            # The same iteration again, so that a folder is replaced; and one that pushes an older one out.
            writer.save(state, progress)
            writer.save(state, Progress(progress.iteration + 1))
        writer.finish()
        return instants.count


def _resumes_at(root: Path) -> int:
    with tiny_resumable(CONFIG, BATCHES) as (_, state):
        progress = load_checkpoint(root, state)
        assert progress is not None
        return progress.iteration


def _check_instants(ranks: RankPool, root: Path, every: int) -> None:
    ranks.run(_save_and_die, root / "saved", -1, num_ranks=1)
    (count,) = ranks.run(_save_and_die, root / "saved", -1, num_ranks=1)
    assert count > 60
    (iteration,) = ranks.run(_resumes_at, root / "saved", num_ranks=1)
    for number in range(0, count, every):
        shutil.copytree(root / "saved", root / "copy")
        with pytest.raises(RankError, match="the process died"):
            ranks.run(_save_and_die, root / "copy", number, num_ranks=1)
        (resumed,) = ranks.run(_resumes_at, root / "copy", num_ranks=1)
        assert resumed in (iteration, iteration + 1), number
        shutil.rmtree(root / "copy")


def test_kills_at_some_changes_of_the_disk(ranks: RankPool, tmp_path: Path) -> None:
    _check_instants(ranks, tmp_path, every=17)


@pytest.mark.slow
def test_kills_at_every_change_of_the_disk(ranks: RankPool, tmp_path: Path) -> None:
    _check_instants(ranks, tmp_path, every=1)
