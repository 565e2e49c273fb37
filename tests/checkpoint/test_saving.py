"""Saving in the background, and saving that fails."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from fp8_megatron.checkpoint import saving
from fp8_megatron.checkpoint.files import (
    META,
    TRACKER,
    CheckpointError,
    RunLockError,
    candidates,
    iteration_folder,
    saved_iterations,
)
from fp8_megatron.checkpoint.loading import load_checkpoint
from fp8_megatron.checkpoint.run_lock import LOCK, RunIdentity, RunLock, saved_by
from fp8_megatron.checkpoint.run_state import Progress, Snapshot
from fp8_megatron.checkpoint.saving import CheckpointWriter, Retention
from fp8_megatron.config.schema import ParallelConfig, PrecisionConfig
from fp8_megatron.dtypes import StorageDtype
from fp8_megatron.sharding.replicas import Replicas
from tests.harness.limits import files_limited_to
from tests.harness.ranks import RankPool
from tests.harness.tiny_checkpoint import run_tiny_on_a_rank, tiny_resumable, train_steps, whole_state
from tests.harness.tiny_gpt import GPT3_STYLE, tiny_config

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
        losses = train_steps(gpt, config, 2, 2, 2)
        assert candidates(root) == []
        gate.set()
        writer.finish()
        assert candidates(root) == [2]
        return losses, saved


@pytest.mark.parametrize("config", [O3, O1, SPLIT], ids=["O3", "O1", "split"])
def test_training_goes_on_while_a_snapshot_is_written(ranks: RankPool, tmp_path: Path, config: object) -> None:
    """The written state is that at the call of `save`, and training is not affected."""
    straight = ranks.run(run_tiny_on_a_rank, config, 4, None, None, num_ranks=2)[0]
    losses, saved = ranks.run(_train_while_saving, tmp_path, config, num_ranks=2)[0]
    assert losses == straight.losses[2:]
    for resumed in ranks.run(run_tiny_on_a_rank, config, 2, tmp_path, None, num_ranks=2):
        assert resumed.losses == straight.losses[2:]
        for name, value in saved.items():
            assert torch.equal(resumed.start[name], value), name
        for name, value in straight.end.items():
            assert torch.equal(resumed.end[name], value), name


def _save_on_a_full_disk(root: Path, in_background: bool, full_rank: int, limit: int) -> list[str]:
    """Save, save while one rank cannot write, train, save again. Returns what was logged and raised."""
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


class OneRank:
    """A topology of one rank, as far as a writer needs it."""

    rank, world_size = 0, 1

    class Group:
        def rank(self) -> int:
            return 0

    tp = pp = Group()
    replicas = Replicas.of(None, torch.device("cpu"))


class Run:
    """Saves checkpoints without tensors."""

    def __init__(
        self,
        root: Path,
        resumed_at: int | None,
        keep_last: int | None = 2,
        interval: int | None = None,
        identity: RunIdentity | None = None,
        lock: RunLock | None = None,
    ):
        self._writer = CheckpointWriter(
            root,
            OneRank(),  # type: ignore[arg-type]
            Retention(keep_last, interval),
            resumed_at=resumed_at,
            identity=identity,
            lock=lock,
        )

    def saves(self, *iterations: int) -> Run:
        for iteration in iterations:
            snapshot = Snapshot([], {}, {"iteration": iteration}, O3, ())
            with mock.patch.object(Snapshot, "of", return_value=snapshot):
                self._writer.save(None, Progress(iteration))  # type: ignore[arg-type]
            self._writer.finish()
        return self


def test_a_damaged_one_does_not_push_out_a_good_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Resumed from 3, because 5 is damaged: 5 is not one of the last two. Saved again, it is."""
    Run(tmp_path, 0).saves(1, 3, 5)
    run = Run(tmp_path, 3)
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}: not of the run that goes on from iteration 3, so neither counted nor removed as old: "
        "iter_0000005; remove what is not needed"
    ]
    run.saves(6)
    assert saved_iterations(tmp_path) == [3, 5, 6]
    assert candidates(tmp_path) == [6, 3]
    Run(tmp_path, 3).saves(5, 8)
    assert saved_iterations(tmp_path) == [5, 6, 8]
    assert candidates(tmp_path) == [8, 5]


def test_a_branch_that_was_left_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of 2, 4, 6 the run goes back to 2, stops, and resumes on the new branch. Saves then keep 4 and 6."""
    Run(tmp_path, 0, keep_last=3).saves(2, 4, 6)
    Run(tmp_path, 2).saves(3)
    assert candidates(tmp_path) == [3, 2]
    Run(tmp_path, 3).saves(5)
    assert saved_iterations(tmp_path) == [3, 4, 5, 6]
    assert candidates(tmp_path) == [5, 3]  # not 4
    caplog.clear()
    Run(tmp_path, 5).saves(7)
    assert saved_iterations(tmp_path) == [4, 5, 6, 7]
    assert "iter_0000004, iter_0000006; remove" in caplog.text
    # Back on the old branch: checkpoints of other branches are kept.
    Run(tmp_path, 6).saves(8, 9)
    assert saved_iterations(tmp_path) == [5, 7, 8, 9]
    assert candidates(tmp_path) == [9, 8]


def test_a_run_from_scratch_removes_no_others(tmp_path: Path) -> None:
    """The same holds for a run that takes only weights (--finetune) from the folder that it saves into."""
    Run(tmp_path, 0).saves(2, 4)
    Run(tmp_path, 0).saves(1, 3, 5)
    assert saved_iterations(tmp_path) == [2, 3, 4, 5]


def test_a_folder_of_an_earlier_version_is_one_run(tmp_path: Path) -> None:
    """Its checkpoints do not say what is before them: all are counted; later ones are not."""
    Run(tmp_path, 0, keep_last=9).saves(1, 2, 3, 4)
    for number in (1, 2, 3, 4):
        (iteration_folder(tmp_path, number) / META).write_text('{"format_version": 3}')
    Run(tmp_path, 3).saves(5)
    assert saved_iterations(tmp_path) == [3, 4, 5]


def test_a_save_that_fails_owns_nothing(tmp_path: Path) -> None:
    """The folder of that iteration is still the one that was left."""
    Run(tmp_path, 0, keep_last=3).saves(2, 4)
    run = Run(tmp_path, 2, keep_last=1)
    with mock.patch.object(saving, "publish", side_effect=OSError("full")), pytest.raises(CheckpointError):
        run.saves(4)
    run.saves(5)
    assert saved_iterations(tmp_path) == [4, 5] and (tmp_path / TRACKER).read_text() == "5"


def test_a_run_that_lost_its_folder_saves_nothing_more(tmp_path: Path) -> None:
    """Another process took the lock between the start of a save and its publication."""
    locks = [RunLock(tmp_path, RunIdentity.drawn(digit * 16)) for digit in "12"]
    assert locks[0].attempt() is None
    run = Run(tmp_path, 0, lock=locks[0]).saves(1)
    write_own = saving._write_own

    def while_another_takes_over(*args: object) -> object:
        (tmp_path / LOCK).unlink()
        assert locks[1].attempt() is None
        return write_own(*args)  # type: ignore[arg-type]

    with (
        mock.patch.object(saving, "_write_own", while_another_takes_over),
        pytest.raises(RunLockError, match=r"iter_0000002 was not saved: .* was taken over by process .* run 2222"),
    ):
        run.saves(2)
    assert saved_iterations(tmp_path) == [1] and (tmp_path / TRACKER).read_text() == "1"
    assert not list(tmp_path.glob("*.tmp"))
    with pytest.raises(RunLockError, match="was not saved"):
        run.saves(3)
    Run(tmp_path, 0, lock=locks[1]).saves(3)
    assert saved_iterations(tmp_path) == [1, 3]
    for lock in locks:
        lock.release()


def _save_without_the_lock(root: Path, in_background: bool) -> str:
    """Two ranks; the first one's lock is taken away. Every rank's next save raises."""
    with tiny_resumable(O3, 2) as (gpt, state):
        lock = RunLock(root, RunIdentity.drawn()) if gpt.topology.rank == 0 else None
        assert lock is None or lock.attempt() is None
        writer = CheckpointWriter(root, gpt.topology, in_background=in_background, lock=lock)
        writer.save(state, Progress(1))
        writer.finish()
        if lock is not None:
            (root / LOCK).unlink()
        with pytest.raises(RunLockError) as error:
            writer.save(state, Progress(2))
            writer.save(state, Progress(3))
        torch.distributed.barrier()
        assert saved_iterations(root) == [1]
        return str(error.value)


@pytest.mark.parametrize("in_background", [False, True], ids=["at_once", "in_background"])
def test_every_rank_learns_of_a_lost_lock(ranks: RankPool, tmp_path: Path, in_background: bool) -> None:
    for error in ranks.run(_save_without_the_lock, tmp_path, in_background, num_ranks=2):
        assert "iter_0000002 was not saved: " in error and "is gone: another run took it" in error


def test_a_checkpoint_names_its_run_and_launch(tmp_path: Path) -> None:
    """Sessions of a run write under their own names aside, and leave none."""
    identity = RunIdentity("1" * 16, "job", "2" * 16)
    start_writing, seen = saving.start_writing, []

    def note(*args: object) -> Path:
        seen.append(start_writing(*args))  # type: ignore[arg-type]
        return seen[-1]

    with mock.patch.object(saving, "start_writing", note):
        Run(tmp_path, 0, identity=identity).saves(7)
    assert [path.name for path in seen] == [f"iter_0000007.{'2' * 16}.tmp"]
    assert saved_by(iteration_folder(tmp_path, 7)) == ("1" * 16, "job")


def _spoil(path: Path) -> None:
    """Change one byte behind the writer's back."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _save_what_reads_back_differently(root: Path, in_background: bool) -> str:
    """Two ranks; one file of the second is spoiled after it was written and synced."""
    write_chunks = saving.write_chunks

    def and_spoil(folder: Path, rank: int, *args: object, **kwargs: object) -> object:
        result = write_chunks(folder, rank, *args, **kwargs)  # type: ignore[arg-type]
        if rank == 1:
            _spoil(folder / result[1][0].name)
        return result

    with tiny_resumable(O3, 2) as (gpt, state):
        writer = CheckpointWriter(root, gpt.topology, in_background=in_background)
        writer.save(state, Progress(1))
        writer.finish()
        with mock.patch.object(saving, "write_chunks", and_spoil):
            writer.save(state, Progress(2))
            with pytest.raises(CheckpointError) as error:
                writer.finish()
        torch.distributed.barrier()
        assert candidates(root) == [1] and not list(root.glob("*.tmp"))
        return str(error.value)


@pytest.mark.parametrize("in_background", [False, True], ids=["at_once", "in_background"])
def test_a_file_that_reads_back_differently_is_not_announced(
    ranks: RankPool, tmp_path: Path, in_background: bool
) -> None:
    errors = ranks.run(_save_what_reads_back_differently, tmp_path, in_background, num_ranks=2)
    for error in errors:
        assert "iter_0000002 was not saved: rank 1: it was read back after writing, and checkpoint file " in error
        assert "__1_0.distcp is damaged: its crc32 is" in error


@pytest.mark.parametrize("name", ["checkpoint.json", "config.yaml", ".metadata", "manifest.json"])
def test_the_first_ranks_own_files_are_read_back(tmp_path: Path, name: str) -> None:
    run = Run(tmp_path, 0).saves(1)
    write_manifest = saving.write_manifest

    def and_spoil(folder: Path, records: object) -> None:
        write_manifest(folder, records)  # type: ignore[arg-type]
        _spoil(folder / name)

    with mock.patch.object(saving, "write_manifest", and_spoil), pytest.raises(CheckpointError, match=name):
        run.saves(2)
    assert saved_iterations(tmp_path) == [1]


def test_what_is_published_is_read_once_more(tmp_path: Path) -> None:
    """The folder gets its name and holds something else: it is taken back, and the older one stays."""
    run = Run(tmp_path, 0).saves(1, 2)
    before = (iteration_folder(tmp_path, 2) / "manifest.json").read_bytes()
    published = CheckpointWriter._check_published

    def spoiled(self: CheckpointWriter, folder: Path, records: list) -> None:
        _spoil(folder / "manifest.json")
        published(self, folder, records)

    with (
        mock.patch.object(CheckpointWriter, "_check_published", spoiled),
        pytest.raises(CheckpointError, match="damaged"),
    ):
        run.saves(2)
    assert (iteration_folder(tmp_path, 2) / "manifest.json").read_bytes() == before
    assert candidates(tmp_path) == [2, 1] and sorted(tmp_path.glob("iter_*")) == [
        iteration_folder(tmp_path, 1),
        iteration_folder(tmp_path, 2),
    ]
