"""Heartbeats: every rank writes its state to the rendezvous store every few seconds, and readers time its silence.

A thread of each rank writes its status and reads others'. Rank 0 reads all ranks and passes on its findings; the others
read rank 0. The thread has a separate connection, so it and collectives do not wait for each other. Clocks of machines
are not compared: silence is how long, on the reader's clock, a status's count of beats has not changed.
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
    """How often ranks send beats, and how much silence is tolerated; seconds.

    Attributes:
        interval: between two beats.
        dead_after: silence that means death.
        patience: the same for a rank that announced silence: setup and saving sometimes hold Python's lock.
    """

    interval: float
    dead_after: float
    patience: float

    @classmethod
    def for_timeout(cls, timeout_seconds: float) -> Pace:
        """A beat every 2 s and death after 30 s; shorter if a collective's timeout is near 30 s. A collective's timeout
        says less about the cause, so it should not come first.
        """
        dead_after = min(_LONGEST_SILENCE, timeout_seconds / 2)
        return cls(min(_LONGEST_INTERVAL, dead_after / 10), dead_after, patience=0.8 * timeout_seconds)

    @property
    def suspect_after(self) -> float:
        """Silence that means death once a collective has failed as well."""
        return 3 * self.interval


class State(str, Enum):
    """A rank's state, as reported by itself."""

    RUNNING = "running"
    LEFT = "left"
    FAILED = "failed"
    """It raised an error, `RankStatus.because`."""
    ENDED = "ended"
    """Other ranks made it end; `RankStatus.because` names them."""


@dataclass(frozen=True)
class RankStatus:
    """A rank's report about itself."""

    host: str
    process: int
    iteration: int = 0
    doing: str = "setting up"
    patient: bool = True
    state: State = State.RUNNING
    because: str = ""
    beat: int = 0

    def to_json(self) -> str:
        """The text that is kept in the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes | str) -> RankStatus:
        """The inverse of `to_json`."""
        fields = json.loads(text)
        return cls(**{**fields, "state": State(fields["state"])})


@dataclass(frozen=True)
class Sighting:
    """What a reader knows of a rank: its last status (None before the first), and the seconds since it changed."""

    status: RankStatus | None = None
    silence: float = 0.0

    @property
    def state(self) -> State:
        """The rank's last reported state; running if it never reported."""
        return State.RUNNING if self.status is None else self.status.state

    @property
    def because(self) -> str:
        """The rank's reason for its end."""
        return "" if self.status is None else self.status.because

    def limit(self, pace: Pace) -> float:
        """The silence that this rank is allowed, in seconds."""
        return pace.patience if self.status is None or self.status.patient else pace.dead_after


class Heartbeat:
    """This rank's thread that writes its status and reads others'.

    Attributes:
        store_error: why the store could not be reached at the last attempt; empty while it can.
    """

    def __init__(
        self, store: torch.distributed.Store, rank: int, world_size: int, pace: Pace, status: RankStatus
    ) -> None:
        """Args: store: the rendezvous store; the caller keeps owning it."""
        self._store = _clone(store)
        self._store.set_timeout(timedelta(seconds=pace.suspect_after))
        self._rank = rank
        self._world_size = world_size
        self.pace = pace
        self.store_error = ""
        self._store_silence = 0.0
        self._watched = list(range(world_size)) if rank == 0 else [0]
        self._sightings: dict[int, Sighting] = {}
        self._status = status
        self._num_beats = 0
        self._revision = 0
        self._sent_revision = -1
        self._closing = False
        self._condition = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    @property
    def status(self) -> RankStatus:
        """This rank's own status."""
        return self._status

    def note(self, status: RankStatus) -> None:
        """Report this with the next beat. Costs one assignment."""
        self._status = status

    def publish(self, status: RankStatus, timeout_seconds: float) -> None:
        """Report this immediately. Returns when it is written or the time is up."""
        with self._condition:
            self._status = status
            self._revision += 1
            revision = self._revision
            self._condition.notify_all()
            self._condition.wait_for(lambda: self._sent_revision >= revision, timeout_seconds)

    def watch_everyone(self) -> None:
        """Read all ranks' statuses from now on."""
        self._watched = list(range(self._world_size))

    def others(self) -> dict[int, Sighting]:
        """Sightings of the ranks that are read."""
        known = dict(self._sightings)
        return {rank: known.get(rank, Sighting()) for rank in self._watched if rank != self._rank}

    @property
    def store_silence(self) -> float:
        """Seconds since the store last answered, as counted by `tick`."""
        return self._store_silence

    def tick(self, seconds: float) -> None:
        """Called by another thread to count time: the store may never answer this thread, if the process that hosts it
        is stopped.
        """
        self._store_silence += min(seconds, 2 * self.pace.interval)

    def close(self) -> None:
        """Stop. The last published status stays in the store."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        self._thread.join(timeout=3 * self.pace.suspect_after)  # a new connection to a lost store is tried twice

    def _run(self) -> None:
        read_at = time.monotonic()
        while True:
            with self._condition:
                if self._closing:
                    return
                status, revision = self._status, self._revision
            # Wait after an error: if the store is gone, a collective usually fails too and this process ends.
            if not self.store_error or self._store_silence > self.pace.suspect_after:
                self._beat(status, read_at)
            read_at = time.monotonic()
            with self._condition:
                self._sent_revision = revision
                self._condition.notify_all()
                self._condition.wait_for(
                    lambda: self._closing or self._revision > self._sent_revision, self.pace.interval
                )

    def _beat(self, status: RankStatus, read_at: float) -> None:
        try:
            if self.store_error:
                self._store = _clone(self._store)
            self._num_beats += 1
            self._store.set(f"{_PREFIX}/{self._rank}", replace(status, beat=self._num_beats).to_json())
            self._read(read_at)
            self._store_silence, self.store_error = 0.0, ""
        except (RuntimeError, ValueError, OSError) as error:
            self.store_error = (str(error).splitlines() or [type(error).__name__])[0]

    def _read(self, last_time: float) -> None:
        """Read the other ranks' statuses. A late read counts as two intervals of silence at most: the machine or this
        process may have been suspended, and the others get time to report.
        """
        elapsed = min(time.monotonic() - last_time, 2 * self.pace.interval)
        watched = [rank for rank in self._watched if rank != self._rank]
        keys = {rank: f"{_PREFIX}/{rank}" for rank in watched}
        # Reading a key that nobody has written would block.
        before = {rank: self._sightings.get(rank, Sighting()) for rank in watched}
        present = [rank for rank in watched if before[rank].status or self._store.check([keys[rank]])]
        texts = self._store.multi_get([keys[rank] for rank in present]) if present else []
        statuses = {rank: RankStatus.from_json(text) for rank, text in zip(present, texts, strict=True)}
        for rank in watched:
            stood_still = statuses.get(rank) == before[rank].status
            silence = before[rank].silence + elapsed if stood_still else 0.0
            self._sightings[rank] = Sighting(statuses.get(rank), silence)


def _clone(store: torch.distributed.Store) -> torch.distributed.Store:
    """The same store through a new connection."""
    return store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it
