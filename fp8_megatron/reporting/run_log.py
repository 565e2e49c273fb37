"""events.jsonl: the life of a run, one line an event. Each line is a line of the console log with a time and a step.

A module marks a log record as an event with ``extra=event(kind, …)``. While a run's log is open, a logging handler
writes marked records to the file (`logging_events`). A line is one JSON object:

    {"time": "2026-01-31T12:00:00.123+00:00", "run": "5f0c…", "iteration": 100, "kind": "save", "text": "saved …", …}

Several runs may write to one file, one after another or at once. ``run`` is that of checkpoints
(`checkpoint.run_lock`); `events_of_run` finds a run's events.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any

from .report import AppendedFile

EVENTS_FILE = "events.jsonl"
#: Fields of an event that say whose it is.
RUN, LAUNCH = "run", "launch"

logger = logging.getLogger(__name__)

_PACKAGE = __name__.partition(".")[0]
_MARK = "run_event"


class EventKind(str, Enum):
    """The kinds of events."""

    START = "start"
    """Ranks run, from scratch or with the weights of a checkpoint."""
    RESUME = "resume"
    """Ranks run, from a checkpoint."""
    RESTART = "restart"
    """torchrun started the ranks again after a fault."""
    FAULT = "fault"
    """Something went wrong that ends the ranks."""
    SKIP = "skip"
    """A step was skipped: its gradient norm was not finite."""
    SPIKE = "spike"
    """The loss left that of the last steps."""
    ROLLBACK = "rollback"
    """Steps that were trained are trained again, from an earlier checkpoint."""
    FALLBACK = "fallback"
    """Layers left delayed scaling."""
    SAVE = "save"
    """A checkpoint is on disk under its name."""
    SAVE_FAILED = "save_failed"
    """A checkpoint was not saved."""
    REMOVE = "remove"
    """An old checkpoint was removed."""
    STOP = "stop"
    """Training ended as asked."""
    GIVE_UP = "give_up"
    """Restarts ended: the same fault came too often."""


def event(kind: EventKind, *, iteration: int | None = None, **fields: Any) -> dict[str, Any]:
    """The ``extra`` of a log record that is an event.

    Args:
        iteration: the step that it belongs to; None: the step that the run log stands at.
        fields: more of the event, as JSON values.
    """
    return {_MARK: {"iteration": iteration, "kind": kind.value, **fields}}


class RunLog(logging.Handler):
    """Writes the events among log records to a file.

    A line is written in one call to a file opened for appending, so that a kill leaves whole lines and at most one torn
    line at the end. The next writer ends a torn line; `read_events` leaves it out. Lines reach the disk before the call
    returns, except those of skipped steps. A line that cannot be written is left out, as `AppendedFile` says.

    Args:
        labels: fields of every event, such as its run.

    Attributes:
        iteration: the step of events that name none.
    """

    def __init__(self, path: Path, labels: Mapping[str, str | None] | None = None) -> None:
        super().__init__(logging.DEBUG)
        self._labels = {name: value for name, value in (labels or {}).items() if value is not None}
        self.iteration = 0
        self._file = AppendedFile(path)

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record if it is an event."""
        fields = getattr(record, _MARK, None)
        if fields is not None:
            iteration = fields["iteration"] if fields["iteration"] is not None else self.iteration
            time = datetime.fromtimestamp(record.created, UTC)
            self._append({"time": _text_of(time), **fields, "iteration": iteration, "text": record.getMessage()})

    def add(self, kind: EventKind, text: str, *, iteration: int, **fields: Any) -> None:
        """Write an event that the console shows in another way, such as an error at the end."""
        time = _text_of(datetime.now(UTC))
        with self.lock or contextlib.nullcontext():
            self._append({"time": time, "iteration": iteration, "kind": kind.value, **fields, "text": text})

    def close(self) -> None:
        """Close the file, and say what is missing in it."""
        self._file.close()
        super().close()

    def _append(self, line: dict[str, Any]) -> None:
        text = json.dumps({"time": line["time"], **self._labels, **line}, default=str)
        self._file.append(f"{text}\n".encode(), synced=line["kind"] != EventKind.SKIP.value)


def add_event(folder: Path, kind: EventKind, text: str, *, iteration: int, **fields: Any) -> None:
    """Write one event to ``folder/events.jsonl``, from a program that may not be its usual writer. Never raises."""
    log = RunLog(folder / EVENTS_FILE)
    log.add(kind, text, iteration=iteration, **fields)
    log.close()


@contextmanager
def logging_events(
    folder: Path, *, is_writer: bool, run: str | None = None, launch: str | None = None
) -> Iterator[RunLog | None]:
    """Write this program's events to ``folder/events.jsonl`` while the block runs.

    Args:
        is_writer: False opens nothing; one rank of a run writes.
        run, launch: of every event (`checkpoint.run_lock`).

    Yields:
        The log; None if this rank does not write.
    """
    if not is_writer:
        yield None
        return
    log = RunLog(folder / EVENTS_FILE, {RUN: run, LAUNCH: launch})
    package = logging.getLogger(_PACKAGE)
    package.addHandler(log)
    try:
        yield log
    finally:
        package.removeHandler(log)
        log.close()


def _text_of(time: datetime) -> str:
    return time.isoformat(timespec="milliseconds")


def read_events(path: Path) -> list[dict[str, Any]]:
    """All events of a file in order. Lines that a kill cut are left out. Without a file, or with one that cannot be
    read (a warning says why), there are no events.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    except OSError as error:
        logger.warning("%s cannot be read (%s); what it says of earlier sessions is not used", path, error.strerror)
        return []
    found = []
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and isinstance(record.get("kind"), str) and isinstance(record.get("time"), str):
            found.append(record)
    return found


def events_of_run(events: Sequence[dict[str, Any]], run: str) -> list[dict[str, Any]]:
    """The events of one run, in order.

    An event that names no run belongs to the last run of its launch, or else to the run of the event before it, or else
    to the first run that is named.
    """
    owners = list(_owners(events))
    first = next((owner for owner in owners if owner is not None), run)
    return [item for item, owner in zip(events, owners, strict=True) if (owner or first) == run]


def last_run(events: Sequence[dict[str, Any]]) -> str | None:
    """The run that wrote the last event that names one; None if no event does."""
    return next((owner for owner in reversed(list(_owners(events))) if owner is not None), None)


def _owners(events: Sequence[dict[str, Any]]) -> Iterator[str | None]:
    """The run of each event; None before the first event that names one."""
    of_launch: dict[str, str] = {}
    owner: str | None = None
    for item in events:
        run, launch = item.get(RUN), item.get(LAUNCH)
        if isinstance(run, str):
            owner = run
            if isinstance(launch, str):
                of_launch[launch] = run
            yield run
        else:
            yield of_launch.get(launch, owner) if isinstance(launch, str) else owner
