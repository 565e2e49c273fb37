"""Saving in the background, and saving that fails."""

from __future__ import annotations

import logging
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from fp8_megatron.checkpoint import saving
from fp8_megatron.checkpoint.files import CheckpointError, candidates
from fp8_megatron.checkpoint.loading import load_checkpoint
from fp8_megatron.checkpoint.run_state import Progress
from fp8_megatron.checkpoint.saving import CheckpointWriter, Retention
from fp8_megatron.config import ParallelConfig, PrecisionConfig
from fp8_megatron.formats import StorageDtype
from fp8_megatron.testing.ranks import RankPool
from fp8_megatron.testing.tiny_checkpoint import run_tiny_on_a_rank, tiny_resumable, train_steps, whole_state
from fp8_megatron.testing.tiny_gpt import GPT3_STYLE, tiny_config

BUCKETS = ParallelConfig(ddp_bucket_size=1 << 15)
O3 = tiny_config(replace(GPT3_STYLE, num_layers=1), parallel=BUCKETS)
SPLIT = replace(
    O3,
    precision=PrecisionConfig(
        main_params_dtype=StorageDtype.SPLIT, exp_avg_dtype=StorageDtype.INT8, exp_avg_sq_dtype=StorageDtype.UINT8
    ),
)
O1 = replace(O3, precision=PrecisionConfig(opt_level="O1"))


def _train_while_saving(root: Path, config: object) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Two steps, a save that does not get to write before two more steps are over; the state when it was called."""
    gate = threading.Event()
    write_chunks = saving.write_chunks

    def write_later(*args: object, **kwargs: object) -> object:
        gate.wait()
        return write_chunks(*args, **kwargs)  # type: ignore[arg-type]

    with mock.patch.object(saving, "write_chunks", write_later), tiny_resumable(config, 2) as (gpt, state):
        writer = CheckpointWriter(root, gpt.topology, in_background=True)
        train_steps(gpt, config, 0, 2, 2)
        saved = whole_state(gpt)
        writer.save(state, Progress(2, 4))
        assert writer.is_writing
        losses = train_steps(gpt, config, 2, 2, 2)
        assert candidates(root) == [] and writer.is_writing
        gate.set()
        writer.finish()
        assert candidates(root) == [2]
        return losses, saved


@pytest.mark.parametrize("config", [O3, O1, SPLIT], ids=["O3", "O1", "split"])
def test_training_goes_on_while_a_snapshot_is_written(ranks: RankPool, tmp_path: Path, config: object) -> None:
    """What is written is the state when `save` was called, not what it became; and nothing of training changes."""
    straight = ranks.run(run_tiny_on_a_rank, config, 4, None, None, num_ranks=2)[0]
    losses, saved = ranks.run(_train_while_saving, tmp_path, config, num_ranks=2)[0]
    assert losses == straight.losses[2:]
    for resumed in ranks.run(run_tiny_on_a_rank, config, 2, tmp_path, None, num_ranks=2):
        assert resumed.losses == straight.losses[2:]
        for name, value in saved.items():
            assert torch.equal(resumed.start[name], value), name
        for name, value in straight.end.items():
            assert torch.equal(resumed.end[name], value), name


@contextmanager
def files_limited_to(num_bytes: int) -> Iterator[None]:
    """No file of this process may be larger: what a full disk does to writing, by the kernel's hand."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def _save_on_a_full_disk(root: Path, in_background: bool, full_rank: int, limit: int) -> list[str]:
    """Save, save where one rank cannot write, train, save again: what was logged and raised."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fp8_megatron.checkpoint").addHandler(handler)
    with tiny_resumable(O3, 2) as (gpt, state):
        writer = CheckpointWriter(root, gpt.topology, in_background=in_background)
        writer.save(state, Progress(1))
        writer.finish()
        with files_limited_to(limit if gpt.topology.rank == full_rank else 1 << 40):
            writer.save(state, Progress(2))
            with pytest.raises(CheckpointError) as error:
                writer.finish()
        assert candidates(root) == [1] and not list(root.glob("*.tmp"))
        loaded = load_checkpoint(root, state)
        assert loaded is not None and loaded.iteration == 1
        train_steps(gpt, O3, 1, 1, 2)
        writer.save(state, Progress(3))
        writer.finish()
        torch.distributed.barrier()
        assert candidates(root) == [3, 1]
    logging.getLogger("fp8_megatron.checkpoint").removeHandler(handler)
    return [str(error.value), *lines]


@pytest.mark.parametrize("in_background", [False, True], ids=["at_once", "in_background"])
@pytest.mark.parametrize(("full_rank", "limit"), [(0, 20_000), (1, 20_000), (0, 100)])
def test_a_full_disk_leaves_the_last_one(
    ranks: RankPool, tmp_path: Path, in_background: bool, full_rank: int, limit: int
) -> None:
    """One of two ranks cannot write (at 100 bytes, no small file either); both know, and nobody waits."""
    results = ranks.run(_save_on_a_full_disk, tmp_path, in_background, full_rank, limit, num_ranks=2)
    for error, *_ in results:
        assert "iter_0000002 was not saved" in error and "earlier checkpoints are as they were" in error
    assert f"rank {full_rank}: " in results[0][0] and "File too large" in results[0][0]
    assert sum("was not saved" in line for line in results[0][1:]) == 1
    assert not any("was not saved" in line for line in results[1][1:])


def _retain(root: Path) -> None:
    with tiny_resumable(O3, 1) as (gpt, state):
        writer = CheckpointWriter(root, gpt.topology, Retention(keep_last=1, retain_interval=4), in_background=True)
        for iteration in (2, 4, 6, 8, 9):
            writer.save(state, Progress(iteration))
        writer.finish()


def test_retention_in_the_background(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(_retain, tmp_path, num_ranks=1)
    assert candidates(tmp_path) == [9, 8, 4]


def _stall(root: Path, in_background: bool) -> float:
    """Seconds that a save takes from training where writing takes one."""
    write_chunks = saving.write_chunks

    def write_slowly(*args: object, **kwargs: object) -> object:
        time.sleep(1.0)
        return write_chunks(*args, **kwargs)  # type: ignore[arg-type]

    with mock.patch.object(saving, "write_chunks", write_slowly), tiny_resumable(O3, 1) as (gpt, state):
        writer = CheckpointWriter(root, gpt.topology, in_background=in_background)
        seconds = writer.save(state, Progress(1))
        writer.finish()
        return seconds


def test_training_stands_still_for_the_copy_alone(ranks: RankPool, tmp_path: Path) -> None:
    (at_once,) = ranks.run(_stall, tmp_path, False, num_ranks=1)
    (in_background,) = ranks.run(_stall, tmp_path, True, num_ranks=1)
    assert at_once > 1.0 and in_background < 0.5
