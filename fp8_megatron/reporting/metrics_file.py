"""metrics.jsonl: one JSON object per line, one run's history per file, readable after any crash.

health.jsonl has the same form; its roles and quantities are named here. Imports no torch.
"""

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

HEALTH_FILE = "health.jsonl"

#: The roles of a linear layer's FP8 operands.
ROLES = ("input", "weight", "grad_output", "weight_grad")

#: Name → whether a large value is the worse one.
QUANTITIES = {
    "saturated": True,
    "underflowed": True,
    "snr_db": False,
    "amax": True,
    "amax_over_scale": True,
    "kurtosis": True,
    "mu": False,
}


METRICS_FILE = "metrics.jsonl"

#: Larger whole numbers are not exact as floats, which figures are drawn with.
_MAX_ITERATION = 1 << 53

logger = logging.getLogger(__name__)


def split_in_words(split: str) -> str:
    """A row's split: ``validation``, ``validation-<name>`` of one of several sets, or ``test``."""
    return split.replace("valid", "validation", 1) if split.partition("-")[0] == "valid" else split


def json_line(row: Mapping[str, Any]) -> str:
    """One line of valid JSON: NaN and infinities become null beside ``"non_finite": true``."""
    finite = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in row.items()}
    if any(finite[key] is None and value is not None for key, value in row.items()):
        finite["non_finite"] = True
    return json.dumps(finite, allow_nan=False) + "\n"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All rows of a metrics file in order. Each has a kind and an iteration. Damaged lines are left out."""
    return [row for _, row in _read_lines(path)]


class MetricsFile:
    """Appends rows to a metrics file, which is first cut to this run's history up to ``resume_iteration``.

    What cannot be written is left out, as `AppendedFile` says.

    Attributes:
        kept: the rows of this run's history.
    """

    def __init__(self, path: Path, *, resume_iteration: int) -> None:
        """Keep the rows of `path` up to `resume_iteration`. A new run renames an older file with a number."""
        self.path = path
        self.kept: list[dict[str, Any]] = []
        self._resume_iteration = resume_iteration
        self._file = AppendedFile(path)
        self._is_cut = False
        self._history = b""
        with self._file.writing():
            self._cut()

    def make(self) -> None:
        """Make an empty file, if there is none. Without this, the first row does."""
        self._file.append(b"")

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one line in one call, so that readers find whole lines, also after a crash."""
        if self._is_cut:
            self._file.append(json_line(row).encode())
            return
        with self._file.writing():
            self._cut()
            self.append(row)

    def replace_eval(self, row: Mapping[str, Any]) -> None:
        """Write a validation in place of an earlier one of its split and iteration, which stays if that fails."""
        key = (row["kind"], row["iteration"], row["split"])
        with self._file.writing():
            self._cut()
            others = (line for line, one in _read_lines(self.path) if _eval_key(one) != key)
            self._replace(b"".join([*others, json_line(row).encode()]))

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
                rename_older(self.path)
        self._is_cut, self._history = True, b""

    def _read_history(self) -> bytes:
        """Read the file; the lines of `kept`."""
        lines = list(_read_lines(self.path))
        kept = [(line, row) for line, row in lines if row["iteration"] <= self._resume_iteration]
        self.kept = [row for _, row in kept]
        if len(kept) < len(lines):
            last = max(row["iteration"] for _, row in lines)
            logger.info(
                "%s: dropped %d lines after iteration %d: iterations up to %d are trained again",
                self.path,
                len(lines) - len(kept),
                self._resume_iteration,
                last,
                extra=event(EventKind.ROLLBACK, iteration=self._resume_iteration, dropped_until=last),
            )
        return b"".join(line for line, _ in kept)


def rename_older(path: Path) -> None:
    """Give a metrics file of another run a name with a number; an empty one stays. Raises `OSError`."""
    if path.stat().st_size == 0:
        return
    number = 1
    while (older := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(older)
    logger.warning("%s is of another run: moved to %s", path, older.name)


def _read_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The whole lines of a metrics file with their rows. A warning counts the others, except for a last one that a
    crash cut short.
    """
    num_damaged = 0
    with path.open("rb") as stream:
        for line in stream:
            row = _row(line)
            if row is not None:
                yield line if line.endswith(b"\n") else line + b"\n", row
            elif line.endswith(b"\n"):
                num_damaged += 1
    if num_damaged:
        logger.warning("%s: %d lines are no rows of a step or a validation; they are left out", path, num_damaged)


def _eval_key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What two rows of one validation have in common."""
    return row["kind"], row["iteration"], row.get("split")


def _row(line: bytes) -> dict[str, Any] | None:
    """A line's row; None if it is damaged. A step and a validation have a loss; another kind has an iteration."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not isinstance(row.get("kind"), str):
        return None
    iteration = row.get("iteration")
    if type(iteration) is not int or not 0 <= iteration <= _MAX_ITERATION:
        return None
    if row["kind"] in ("train", "eval"):
        loss = row.get("loss", "")
        if not (loss is None or type(loss) is float or (type(loss) is int and abs(loss) <= _MAX_ITERATION)):
            return None
        if row["kind"] == "eval" and not isinstance(row.get("split"), str):
            return None
    return row
