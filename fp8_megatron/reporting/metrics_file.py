"""metrics.jsonl: one JSON object per line, one run's history per file, readable after any crash."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..outputs import replace_file
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
    """Appends records to a metrics file, which is first cut to this run's history up to ``resume_iteration``."""

    def __init__(self, path: Path, *, resume_iteration: int) -> None:
        """Keep the records of `path` up to `resume_iteration`. A new run renames an older file with a number."""
        self.path = path
        self.kept: list[dict[str, Any]] = []
        if path.exists():
            if resume_iteration > 0:
                self._truncate(resume_iteration)
            elif path.stat().st_size > 0:
                self._set_aside()
        self._stream = path.open("ab", buffering=0)
        self._num_bytes = path.stat().st_size
        self._is_torn = False
        self._has_failed = False

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line in one call, so that readers find whole lines, also after a crash.

        A line that cannot be written (e.g. on a full disk) is dropped. The first such line logs a warning.
        """
        line = json_line(record).encode()
        try:
            self._cut_torn_line()
            self._is_torn = True
            rest = memoryview(line)
            while rest:
                rest = rest[self._stream.write(rest) :]
        except OSError as error:
            self._warn(f"the line of iteration {record['iteration']} is left out, later ones are tried", error)
        else:
            self._is_torn = False
            self._num_bytes += len(line)

    def replace_eval(self, record: Mapping[str, Any]) -> None:
        """Write a validation in place of an earlier one of its split and iteration, which stays if that fails."""
        key = (record["kind"], record["iteration"], record["split"])
        try:
            self._cut_torn_line()
            others = (line for line, one in _read_lines(self.path) if _eval_key(one) != key)
            replace_file(self.path, b"".join([*others, json_line(record).encode()]), aside=self._aside)
            replaced, self._stream = self._stream, self.path.open("ab", buffering=0)
            replaced.close()
            self._num_bytes = self.path.stat().st_size
        except OSError as error:
            self._warn(f"the {split_in_words(record['split'])} of iteration {record['iteration']} is left out", error)

    @property
    def _aside(self) -> Path:
        """Where a new content of the file is written first."""
        return self.path.with_suffix(".jsonl.tmp")

    def close(self) -> None:
        """Close the file. Nothing can be appended afterwards."""
        try:
            self._cut_torn_line()
            self._stream.close()
        except OSError as error:
            self._warn("lines may be missing", error)

    def _cut_torn_line(self) -> None:
        """Remove the part of a line that was written before an error."""
        if self._is_torn:
            self._stream.truncate(self._num_bytes)
            self._is_torn = False

    def _warn(self, what: str, error: OSError) -> None:
        if not self._has_failed:
            self._has_failed = True
            logger.warning("%s: %s: %s", self.path, what, error)

    def _truncate(self, resume_iteration: int) -> None:
        lines = list(_read_lines(self.path))
        kept = [(line, record) for line, record in lines if record["iteration"] <= resume_iteration]
        self.kept = [record for _, record in kept]
        content = b"".join(line for line, _ in kept)
        replace_file(self.path, content, aside=self._aside)
        if len(kept) < len(lines):
            last = max(record["iteration"] for _, record in lines)
            logger.info(
                "%s: dropped %d lines after iteration %d: iterations up to %d are trained again",
                self.path,
                len(lines) - len(kept),
                resume_iteration,
                last,
                extra=event(EventKind.ROLLBACK, iteration=resume_iteration, dropped_until=last),
            )

    def _set_aside(self) -> None:
        number = 1
        while (older := self.path.with_name(f"{self.path.stem}.{number}{self.path.suffix}")).exists():
            number += 1
        self.path.rename(older)
        logger.warning("%s is of another run: moved to %s", self.path, older.name)


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
