"""Files and folders that are written under a temporary name. Those that a killed process left are removed."""

from __future__ import annotations

import glob
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
#: Ends the name of a file that is not complete.
_SUFFIX = ".partial"
#: Builder's machine, process, and its start.
_BUILDER = re.compile(r"([0-9a-f]{16})-(\d+)-(\d+)", re.ASCII)
#: Seconds without a change after which something of a builder that cannot be asked is left over.
_STALE_SECONDS = 24 * 3600.0


@contextmanager
def temporary_folder(folder: Path) -> Iterator[Path]:
    """A new folder under `folder`, which is removed in the end. Leftovers of builders that were killed go before.

    Its name says which process builds in it, so that the folder of a live one is left alone. A builder on another
    machine, or in another container, counts as dead when nothing has changed in its folder for a day.
    """
    with tempfile.TemporaryDirectory(prefix=_prefix(), dir=folder) as made:
        temporary = Path(made)
        with suppress(OSError):  # somebody else clears them too, or may alone
            _clear_leftovers(folder, now=temporary.stat().st_mtime)  # by the file server's clock
        yield temporary


def temporary_path(path: Path) -> Path:
    """Where this process writes a file until it is complete. The name says which process writes it."""
    return path.with_name(f"{path.name}.{_builder() or os.getpid()}{_SUFFIX}")


def clear_leftover_files(path: Path) -> None:
    """Remove what builders of the file `path` that have ended left. This process writes its own already."""
    now = temporary_path(path).stat().st_mtime  # by the file server's clock
    for left in path.parent.glob(f"{glob.escape(path.name)}.*{_SUFFIX}"):
        builder = left.name.removeprefix(f"{path.name}.").removesuffix(_SUFFIX)
        is_a_builder = _BUILDER.fullmatch(builder) or builder.isdecimal()
        with suppress(OSError):  # somebody else clears it too, or may alone
            if is_a_builder and _is_left(left, builder, now=now):
                left.unlink()


def _prefix() -> str:
    builder = _builder()
    return f"{_PREFIX}{builder}-" if builder else _PREFIX


def _builder() -> str:
    """This process, as `_BUILDER` reads it; empty if the system does not tell."""
    start = process_start(os.getpid())
    return f"{_machine()}-{os.getpid()}-{start}" if _machine() and start is not None else ""


def _machine() -> str:
    name = machine_id()
    return "" if name is None else hashlib.sha256(name.encode()).hexdigest()[:16]


def _clear_leftovers(folder: Path, *, now: float) -> None:
    for path in list(folder.glob(f"{_PREFIX}*")):
        if _is_left(path, path.name.removeprefix(_PREFIX), now=now):
            shutil.rmtree(path, ignore_errors=True)


def _is_left(path: Path, builder: str, *, now: float) -> bool:
    """Whether the builder of a file or folder has ended, or for all that is known has.

    Args:
        builder: a name that begins with it.
    """
    match = _BUILDER.match(builder)
    if match is not None and match[1] == _machine():
        return str(process_start(int(match[2]))) != match[3]
    parts = [path, *path.iterdir()] if path.is_dir() else [path]
    return now - max(part.stat().st_mtime for part in parts) > _STALE_SECONDS
