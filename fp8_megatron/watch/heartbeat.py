"""What every rank says of itself every few seconds in the rendezvous store, and how long a rank has been silent.

A thread of each rank writes its record and reads others'. Rank 0 reads all; the others read rank 0, and it passes on
what it finds. The thread has a connection of its own: it does not wait for collectives, and they do not wait for it.
Clocks of machines are not compared: silence is the time in which a reader saw a record's count of beats stand still.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from enum import Enum

import torch

_LONGEST_INTERVAL = 2.0
_LONGEST_SILENCE = 30.0
_PREFIX = "fp8_megatron/heartbeat"


@dataclass(frozen=True)
class Pace:
    """How often ranks speak, and how long silence is a pause; seconds.

    Attributes:
        interval: between two beats.
        dead_after: silence that means death.
        patience: the same for a rank that said it may be silent: setting up and saving hold Python's lock at times.
    """

    interval: float
    dead_after: float
    patience: float

    @classmethod
    def for_timeout(cls, timeout_seconds: float) -> Pace:
        """A beat every 2 s and death after 30 s, less if a collective's own timeout is near that: the collective says
        less about the cause, so it should not be first."""
        dead_after = min(_LONGEST_SILENCE, timeout_seconds / 2)
        return cls(min(_LONGEST_INTERVAL, dead_after / 10), dead_after, patience=0.8 * timeout_seconds)

    @property
    def suspect_after(self) -> float:
        """Silence that is enough once a collective has failed as well."""
        return 3 * self.interval


class State(str, Enum):
    """How a rank is doing, by its own account."""

    RUNNING = "running"
    LEFT = "left"
    FAILED = "failed"
    """It raised; `Record.because` is its error."""
    ENDED = "ended"
    """Others made it end; `Record.because` says who."""


@dataclass(frozen=True)
class Record:
    """A rank's account of itself."""

    host: str
    process: int
    iteration: int = 0
    doing: str = "setting up"
    patient: bool = True
    state: State = State.RUNNING
    because: str = ""
    beat: int = 0

    def to_json(self) -> str:
        """What is kept in the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes | str) -> Record:
        """The inverse of `to_json`."""
        fields = json.loads(text)
        return cls(**{**fields, "state": State(fields["state"])})


@dataclass(frozen=True)
class Sighting:
    """What a reader knows of a rank: its last record, None before the first, and the seconds since that changed."""

    record: Record | None = None
    silence: float = 0.0

    @property
    def state(self) -> State:
        """How the rank was at last; running if it never spoke."""
        return State.RUNNING if self.record is None else self.record.state

    @property
    def because(self) -> str:
        """What the rank said of its end."""
        return "" if self.record is None else self.record.because

    def limit(self, pace: Pace) -> float:
        """The silence that this rank may keep."""
        return pace.patience if self.record is None or self.record.patient else pace.dead_after


class Heartbeat:
    """This rank's thread that writes its record and reads others'.

    Attributes:
        store_error: why the store could not be reached at the last attempt; empty while it can.
    """

    def __init__(self, store: torch.distributed.Store, rank: int, world_size: int, pace: Pace, record: Record) -> None:
        """Args: store: the rendezvous store; it stays the caller's."""
        self._store = _clone(store)
        self._store.set_timeout(timedelta(seconds=pace.suspect_after))
        self._rank = rank
        self._world_size = world_size
        self.pace = pace
        self.store_error = ""
        self._store_silence = 0.0
        self._watched = list(range(world_size)) if rank == 0 else [0]
        self._sightings: dict[int, Sighting] = {}
        self._record = record
        self._num_beats = 0
        self._revision = 0
        self._sent_revision = -1
        self._closing = False
        self._condition = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    @property
    def record(self) -> Record:
        """This rank's own record."""
        return self._record

    def note(self, record: Record) -> None:
        """Say this with the next beat. Costs one assignment."""
        self._record = record

    def publish(self, record: Record, timeout_seconds: float) -> None:
        """Say this at once; returns when it is said, or the time is up."""
        with self._condition:
            self._record = record
            self._revision += 1
            revision = self._revision
            self._condition.notify_all()
            self._condition.wait_for(lambda: self._sent_revision >= revision, timeout_seconds)

    def watch_everyone(self) -> None:
        """Read all ranks' records from now on."""
        self._watched = list(range(self._world_size))

    def others(self) -> dict[int, Sighting]:
        """What is known of the ranks that are read."""
        known = dict(self._sightings)
        return {rank: known.get(rank, Sighting()) for rank in self._watched if rank != self._rank}

    @property
    def store_silence(self) -> float:
        """Seconds since the store last answered, as counted by `tick`."""
        return self._store_silence

    def tick(self, seconds: float) -> None:
        """Another thread's time: the store may never answer this one, if the process that keeps it is stopped."""
        self._store_silence += min(seconds, 2 * self.pace.interval)

    def close(self) -> None:
        """Stop. What `publish` sent last stays in the store."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        self._thread.join(timeout=self.pace.suspect_after)

    def _run(self) -> None:
        read_at = time.monotonic()
        while True:
            with self._condition:
                if self._closing:
                    return
                record, revision = self._record, self._revision
            # Not at once after an error: where the store is gone a collective mostly fails too, and this process ends.
            if not self.store_error or self._store_silence > self.pace.suspect_after:
                self._beat(record, read_at)
            read_at = time.monotonic()
            with self._condition:
                self._sent_revision = revision
                self._condition.notify_all()
                self._condition.wait_for(
                    lambda: self._closing or self._revision > self._sent_revision, self.pace.interval
                )

    def _beat(self, record: Record, read_at: float) -> None:
        try:
            if self.store_error:
                self._store = _clone(self._store)
            self._num_beats += 1
            self._store.set(f"{_PREFIX}/{self._rank}", replace(record, beat=self._num_beats).to_json())
            self._read(read_at)
            self._store_silence, self.store_error = 0.0, ""
        except (RuntimeError, ValueError, OSError) as error:
            self.store_error = (str(error).splitlines() or [type(error).__name__])[0]

    def _read(self, last_time: float) -> None:
        """Read the others' records. However late this comes, it counts as two intervals of silence at most: the whole
        machine, or this process, may have been asleep, and the others get the time to say so."""
        elapsed = min(time.monotonic() - last_time, 2 * self.pace.interval)
        watched = [rank for rank in self._watched if rank != self._rank]
        keys = {rank: f"{_PREFIX}/{rank}" for rank in watched}
        # Asking for a key that nobody has written would wait for it.
        before = {rank: self._sightings.get(rank, Sighting()) for rank in watched}
        present = [rank for rank in watched if before[rank].record or self._store.check([keys[rank]])]
        texts = self._store.multi_get([keys[rank] for rank in present]) if present else []
        records = {rank: Record.from_json(text) for rank, text in zip(present, texts, strict=True)}
        for rank in watched:
            stood_still = records.get(rank) == before[rank].record
            silence = before[rank].silence + elapsed if stood_still else 0.0
            self._sightings[rank] = Sighting(records.get(rank), silence)


def _clone(store: torch.distributed.Store) -> torch.distributed.Store:
    """The same store through a new connection."""
    return store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it
