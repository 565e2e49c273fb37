"""Saving: every rank writes its part, and the first rank describes and publishes the checkpoint.

A checkpoint is announced as saved only after every file was read back from the disk. Writing and reading back take
place in the foreground or in the background. Ranks meet in a separate gloo group, apart from training's collectives.
They meet three times: when the folder exists, when every rank has written, and to learn the result. A rank that cannot
write reports it at a meeting, and no rank waits for it.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import safetensors.torch

from ..config.io import config_text
from ..config.schema import Config
from ..mcore.topology import Topology
from ..outputs import sync
from ..reporting.run_log import EventKind, event
from ..watch.flight_recorder import BACKGROUND_GROUP
from .files import (
    ANCESTORS,
    CONFIG,
    DUE,
    META,
    CheckpointError,
    RunLockError,
    ancestors,
    iteration_folder,
    publish,
    rank_file,
    remove_old,
    saved_iterations,
    start_writing,
    temporary_folder,
)
from .manifest import NUM_READERS, FileEntry, read_back, read_back_manifest, write_file, write_manifest
from .ranks import Ranks
from .run_lock import LAUNCH, RUN, RunIdentity, RunLock
from .run_state import Progress, Resumable, Snapshot
from .torch_dist import NUM_FILES, Written, write_chunks, write_metadata

logger = logging.getLogger(__name__)

#: How long ranks wait for the slowest writer.
_TIMEOUT = timedelta(hours=2)


@dataclass(frozen=True)
class Retention:
    """Which of a run's checkpoints are kept: the newest `keep_last` (None: all), and multiples of `retain_interval`."""

    keep_last: int | None = None
    retain_interval: int | None = None

    @property
    def removes(self) -> bool:
        """Whether any checkpoint is ever removed."""
        return self.keep_last is not None or self.retain_interval is not None


class CheckpointWriter:
    """Saves a run's checkpoints under one folder. Every rank makes one and calls the same methods in the same order.

    Args:
        in_background: `save` returns as soon as the state is copied to the host. One save is written at a time. A save
            in the foreground copies pieces, and takes little memory.
        resumed_at: iteration of the checkpoint under `root` that the run resumed from; 0: none. Only this checkpoint
            and its ancestors are counted and removed; others are left until the run itself saves their iterations.
            None: all existing checkpoints belong to the run.
        identity: equal on all ranks; None draws one.
        lock: of `root`, held by rank 0. Nothing is changed under `root` after it is lost.
    """

    def __init__(
        self,
        root: Path,
        topology: Topology,
        retention: Retention | None = None,
        *,
        in_background: bool = False,
        resumed_at: int | None = None,
        identity: RunIdentity | None = None,
        lock: RunLock | None = None,
    ) -> None:
        self.root = root
        self._topology = topology
        self._retention = retention or Retention()
        self._in_background = in_background
        self._ranks = Ranks.apart(topology, BACKGROUND_GROUP, _TIMEOUT)
        self._identity = identity or self._ranks.first_says(RunIdentity.drawn)
        self._lock = lock
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None
        self._own = self._own_at_start(resumed_at) if topology.rank == 0 else []

    def prepare(self, state: Resumable) -> None:
        """Pin the host memory of a save in the background; torch keeps it. Pinning takes seconds, once."""
        if self._in_background and state.device.type == "cuda":
            Snapshot.of(state, Progress(), copies=True).wait()

    def save(self, state: Resumable, progress: Progress, *, due: Sequence[int] = ()) -> float:
        """Save the checkpoint of this iteration; called by all ranks together.

        A save that fails is logged by the first rank and leaves the earlier checkpoints as they are; `finish` raises it
        unless a later one succeeds.

        Args:
            due: the iterations at which it was due. It is kept as long as theirs would be.

        Returns:
            Seconds that training was stopped.

        Raises:
            RunLockError: the folder belongs to another run. With `in_background`, the next call raises it.
        """
        started = time.monotonic()
        self._join()
        self._raise_lost_lock()
        snapshot = Snapshot.of(state, progress, copies=self._in_background)
        snapshot.description[DUE] = list(due)
        if self._in_background:
            self._thread = threading.Thread(
                target=self._write, args=(snapshot, started), name="checkpoint writer", daemon=True
            )
            self._thread.start()
        else:
            self._write(snapshot, started)
            self._raise_lost_lock()
        return time.monotonic() - started

    def finish(self) -> None:
        """Wait for a save in the background.

        Raises:
            CheckpointError: the last save failed.
        """
        self._join()
        if self._error is not None:
            raise self._error

    def _own_at_start(self, resumed_at: int | None) -> list[int]:
        """Iterations of the checkpoints that belong to the run at its start; a warning names the others."""
        saved = saved_iterations(self.root)
        if resumed_at is None:
            return saved
        own = [*ancestors(self.root, resumed_at), resumed_at] if resumed_at > 0 else []
        others = [iteration_folder(self.root, number).name for number in saved if number not in own]
        if self._retention.removes and others:
            logger.warning(
                "%s: not of the run that goes on from iteration %d, so neither counted nor removed as old: %s; remove "
                "what is not needed",
                self.root,
                resumed_at,
                ", ".join(others),
            )
        return own

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _raise_lost_lock(self) -> None:
        if isinstance(self._error, RunLockError):
            raise self._error

    def _write(self, snapshot: Snapshot, started: float) -> None:
        folder = iteration_folder(self.root, snapshot.description["iteration"])
        self._error = None
        try:
            self._write_together(snapshot, folder)
        except Exception as error:
            kind = RunLockError if isinstance(error, RunLockError) else CheckpointError
            self._error = kind(f"{folder} was not saved: {error}; earlier checkpoints are as they were")
            self._error.__cause__ = error
            if self._topology.rank == 0:
                mark = event(EventKind.SAVE_FAILED, iteration=snapshot.description["iteration"])
                logger.error("%s", self._error, extra=mark)
            return
        if self._topology.rank == 0:
            where = " in the background" if self._in_background else ""
            seconds = time.monotonic() - started
            mark = event(EventKind.SAVE, iteration=snapshot.description["iteration"], seconds=round(seconds, 3))
            logger.info("saved %s%s in %.1f s", folder, where, seconds, extra=mark)

    def _write_together(self, snapshot: Snapshot, folder: Path) -> None:
        temporary = temporary_folder(folder, self._identity.token)
        self._ranks.first_says(lambda: self._start_writing(folder))
        # One thread in the background: four slowed concurrent steps by 70%.
        num_files = 1 if self._in_background else NUM_FILES
        outputs = self._ranks.all_do(lambda: self._write_and_read_back(temporary, snapshot, num_files))
        self._ranks.first_says(lambda: self._complete(snapshot, temporary, folder, outputs))

    def _start_writing(self, folder: Path) -> None:
        with self._changing_the_folder():
            start_writing(folder, self._identity.token)

    def _write_and_read_back(self, temporary: Path, snapshot: Snapshot, num_files: int) -> _RankOutput:
        output = _write_own(temporary, snapshot, self._topology, num_files)
        read_back(temporary, output.entries, num_threads=1 if self._in_background else NUM_READERS)
        return output

    def _changing_the_folder(self) -> AbstractContextManager[None]:
        return nullcontext() if self._lock is None else self._lock.publishing()

    def _check_published(self, folder: Path, entries: list[FileEntry]) -> None:
        if self._lock is not None:
            self._lock.check()
        read_back_manifest(folder, entries)

    def _complete(self, snapshot: Snapshot, temporary: Path, folder: Path, outputs: list[_RankOutput | str]) -> None:
        """Publish on the first rank, when all have written."""
        try:
            failures = [f"rank {rank}: {output}" for rank, output in enumerate(outputs) if isinstance(output, str)]
            if failures:
                raise OSError("; ".join(failures))
            iteration = snapshot.description["iteration"]
            earlier = [number for number in saved_iterations(self.root) if number in self._own and number < iteration]
            names = {RUN: self._identity.run, LAUNCH: self._identity.launch}
            description = {**snapshot.description, **names, ANCESTORS: earlier}
            written = [output for output in outputs if isinstance(output, _RankOutput)]
            entries = _write_description(temporary, description, snapshot.config, written)
            with self._changing_the_folder():
                publish(temporary, folder, self._identity.token, lambda: self._check_published(folder, entries))
        except BaseException:
            with suppress(OSError):  # frees disk space for other writers
                shutil.rmtree(temporary)
            raise
        self._own = [*earlier, iteration]
        if not self._retention.removes:
            return
        keep_last, interval = self._retention.keep_last or 1, self._retention.retain_interval
        try:
            with self._changing_the_folder():
                remove_old(
                    self.root,
                    self._own,
                    keep_last=keep_last,
                    retain_interval=interval,
                    token=self._identity.token,
                )
        except (OSError, RunLockError) as error:
            logger.warning("an old checkpoint under %s was not removed: %s", self.root, error)


@dataclass(frozen=True)
class _RankOutput:
    """The files that one rank wrote."""

    written: list[Written]
    entries: list[FileEntry]


def _write_own(folder: Path, snapshot: Snapshot, topology: Topology, num_files: int) -> _RankOutput:
    snapshot.wait()
    written, entries = write_chunks(folder, topology.rank, snapshot.chunks(), num_files=num_files)
    name = rank_file(topology.tp.rank(), topology.pp.rank(), topology.replicas.rank)
    content = safetensors.torch.save({name: value.contiguous() for name, value in snapshot.rank_tensors.items()})
    return _RankOutput(written, [*entries, write_file(folder, name, content)])


def _write_description(
    folder: Path, description: dict[str, Any], config: Config, outputs: list[_RankOutput]
) -> list[FileEntry]:
    """Write everything that a checkpoint holds once, the manifest last, and read it back; what the manifest holds."""
    by_ranks = [entry for output in outputs for entry in output.entries]
    written = [item for output in outputs for item in output.written]
    is_native = config.checkpoint.ckpt_state_dtype == "native"
    common = {"checkpoint_version": 3.0, "iteration": description["iteration"], "content_metadata": description}
    shared = write_metadata(folder, written, common=None if is_native else common, checkpoint_id=folder.stem)
    entries = write_last_files(folder, description, config, [*by_ranks, *shared])
    sync(folder)
    read_back(folder, entries[len(by_ranks) :])
    read_back_manifest(folder, entries)
    return entries


def write_last_files(
    folder: Path, description: dict[str, Any], config: Config, entries: list[FileEntry]
) -> list[FileEntry]:
    """``checkpoint.json`` and ``config.yaml``, then the manifest of `entries` and these; what the manifest holds."""
    about = write_file(folder, META, json.dumps(description, indent=2).encode())
    entries = [*entries, about, write_config(folder, config)]
    write_manifest(folder, entries)
    return entries


def write_config(folder: Path, config: Config) -> FileEntry:
    """Write ``config.yaml``, and return its entry."""
    return write_file(folder, CONFIG, config_text(config).encode())
