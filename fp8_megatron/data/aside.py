"""Folders in which a cache is built, beside the place of its files. What a kill left of earlier ones is removed."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..device.processes import machine_id, process_start

_PREFIX = "building-"
#: Builder's machine, process, and its start.
_NAME = re.compile(rf"{_PREFIX}([0-9a-f]{{16}})-(\d+)-(\d+)-.*", re.ASCII)
#: Seconds without a change after which the folder of a builder that cannot be asked is left over.
_STALE_SECONDS = 24 * 3600.0


@contextmanager
def built_aside(folder: Path) -> Iterator[Path]:
    """A new folder under `folder`, which is removed in the end. Leftovers of builders that were killed go before.

    Its name says which process builds in it, so that the folder of a live one is left alone. A builder on another
    machine, or in another container, counts as dead when nothing has changed in its folder for a day.
    """
    with tempfile.TemporaryDirectory(prefix=_prefix(), dir=folder) as made:
        aside = Path(made)
        with suppress(OSError):  # somebody else clears them too, or may alone
            _clear_leftovers(folder, now=aside.stat().st_mtime)  # by the file server's clock
        yield aside


def _prefix() -> str:
    start = process_start(os.getpid())
    return f"{_PREFIX}{_machine()}-{os.getpid()}-{start}-" if _machine() and start is not None else _PREFIX


def _machine() -> str:
    name = machine_id()
    return "" if name is None else hashlib.sha256(name.encode()).hexdigest()[:16]


def _clear_leftovers(folder: Path, *, now: float) -> None:
    for path in list(folder.glob(f"{_PREFIX}*")):
        match = _NAME.fullmatch(path.name)
        if match is not None and match[1] == _machine():
            is_left = str(process_start(int(match[2]))) != match[3]
        else:
            is_left = now - max(part.stat().st_mtime for part in (path, *path.iterdir())) > _STALE_SECONDS
        if is_left:
            shutil.rmtree(path, ignore_errors=True)
