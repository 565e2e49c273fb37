"""metrics.jsonl: one JSON object per line, one run's history per file, readable after any crash."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..outputs import replace_file
from .report import AppendedFile
from .run_log import EventKind, event

METRICS_FILE = "metrics.jsonl"

#: Larger whole numbers are not exact as floats, which figures are drawn with.
_MAX_ITERATION = 1 << 53

logger = logging.getLogger(__name__)


def split_in_words(split: str) -> str:
    """A record's split: ``validation``, ``validation-<name>`` of one of several sets, or ``test``."""
    return split.replace("valid", "validation", 1) if split.partition("-")[0] == "valid" else split


def json_line(record: Mapping[str, Any]) -> str:
    """One line of valid JSON: NaN and infinities become null beside ``"non_finite": true``."""
    finite = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in record.items()}
    if any(finite[key] is None and value is not None for key, value in record.items()):
        finite["non_finite"] = True
    return json.dumps(finite, allow_nan=False) + "\n"


def read_records(path: Path) -> list[dict[str, Any]]:
    """All records of a metrics file in order. Each has a kind and an iteration. Damaged lines are left out."""
    return [record for _, record in _read_lines(path)]


class MetricsFile:
    """Appends records to a metrics file, which is first cut to this run's history up to ``resume_iteration``.

    What cannot be written is left out, as `AppendedFile` says.

    Attributes:
        kept: the records of this run's history.
    """

    def __init__(self, path: Path, *, resume_iteration: int) -> None:
        """Keep the records of `path` up to `resume_iteration`. A new run renames an older file with a number."""
        self.path = path
        self.kept: list[dict[str, Any]] = []
        self._resume_iteration = resume_iteration
        self._file = AppendedFile(path)
        self._is_cut = False
        self._history = b""
        with self._file.writing():
            self._cut()

    def make(self) -> None:
        """Make an empty file, if there is none. Without this, the first record does."""
        self._file.append(b"")

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line in one call, so that readers find whole lines, also after a crash."""
        if self._is_cut:
            self._file.append(json_line(record).encode())
            return
        with self._file.writing():
            self._cut()
            self.append(record)

    def replace_eval(self, record: Mapping[str, Any]) -> None:
        """Write a validation in place of an earlier one of its split and iteration, which stays if that fails."""
        key = (record["kind"], record["iteration"], record["split"])
        with self._file.writing():
            self._cut()
            others = (line for line, one in _read_lines(self.path) if _eval_key(one) != key)
            self._replace(b"".join([*others, json_line(record).encode()]))

    def close(self) -> None:
        """Close the file, and say what is missing in it."""
        self._file.close()

    def _replace(self, content: bytes) -> None:
        replace_file(self.path, content, temporary=self.path.with_suffix(".jsonl.tmp"))
        self._file.release()

    def _cut(self) -> None:
        """Leave this run's history in the file. Done once; tried again after an error."""
        if not self._is_cut and self.path.exists():
            if self._resume_iteration > 0:
                self._history = self._history or self._read_history()
                self._replace(self._history)
            else:
                set_aside(self.path)
        self._is_cut, self._history = True, b""

    def _read_history(self) -> bytes:
        """Read the file; the lines of `kept`."""
        lines = list(_read_lines(self.path))
        kept = [(line, record) for line, record in lines if record["iteration"] <= self._resume_iteration]
        self.kept = [record for _, record in kept]
        if len(kept) < len(lines):
            last = max(record["iteration"] for _, record in lines)
            logger.info(
                "%s: dropped %d lines after iteration %d: iterations up to %d are trained again",
                self.path,
                len(lines) - len(kept),
                self._resume_iteration,
                last,
                extra=event(EventKind.ROLLBACK, iteration=self._resume_iteration, dropped_until=last),
            )
        return b"".join(line for line, _ in kept)


def set_aside(path: Path) -> None:
    """Give a metrics file of another run a name with a number; an empty one stays. Raises `OSError`."""
    if path.stat().st_size == 0:
        return
    number = 1
    while (older := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(older)
    logger.warning("%s is of another run: moved to %s", path, older.name)


def _read_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The whole lines of a metrics file with their records. A warning counts the others, except for a last one that a
    crash cut short.
    """
    num_damaged = 0
    with path.open("rb") as stream:
        for line in stream:
            record = _record(line)
            if record is not None:
                yield line if line.endswith(b"\n") else line + b"\n", record
            elif line.endswith(b"\n"):
                num_damaged += 1
    if num_damaged:
        logger.warning("%s: %d lines are no records of a step or a validation; they are left out", path, num_damaged)


def _eval_key(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """What two records of one validation have in common."""
    return record["kind"], record["iteration"], record.get("split")


def _record(line: bytes) -> dict[str, Any] | None:
    """A line's record; None if it is damaged. A step and a validation have a loss; another kind has an iteration."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return None
    iteration = record.get("iteration")
    if type(iteration) is not int or not 0 <= iteration <= _MAX_ITERATION:
        return None
    if record["kind"] in ("train", "eval"):
        loss = record.get("loss", "")
        if not (loss is None or type(loss) is float or (type(loss) is int and abs(loss) <= _MAX_ITERATION)):
            return None
        if record["kind"] == "eval" and not isinstance(record.get("split"), str):
            return None
    return record
