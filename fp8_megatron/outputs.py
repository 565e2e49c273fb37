"""Outputs of programs: places that can be written are told apart at the start, and files appear whole or not at all.

Every error names the flag, the path, the reason and the free space of its disk.
"""

from __future__ import annotations

import os
import select
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import UserError

#: Of stdout and stderr.
_STREAMS = (1, 2)
#: Size of the file that is tried. A disk that is full still takes an empty one.
_PROBE_BYTES = 4096


def drop_stream(number: int) -> None:
    """Send stdout or stderr, by its descriptor, nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)


def drop_closed_streams() -> bool:
    """Send stdout and stderr nowhere, each if nobody reads it any more: a pipe's reader has left (`head`), or the
    terminal has closed. Python would fail at the next line, and at its exit.

    Returns:
        Whether stdout is one of them.
    """
    poll = select.poll()
    for number in _STREAMS:
        poll.register(number, 0)
    closed = [number for number, event in poll.poll(0) if event & select.POLLERR]
    for number in closed:
        drop_stream(number)
    return _STREAMS[0] in closed


def check_output_file(path: Path, name: str) -> None:
    """Check that a file can be made or replaced at `path`. Makes no folder and leaves no file.

    Args:
        name: the flag or setting that gave the path, for errors. Empty if the caller adds it.

    Raises:
        UserError: a folder is in the way, the path goes through a file, or its disk takes no file.
    """
    mode = _mode(path, name)
    if mode is not None and stat.S_ISDIR(mode):
        raise UserError(f"{_label(name, path)} is a folder; give the path of a file")
    if mode is not None and not stat.S_ISREG(mode):
        raise UserError(f"{_label(name, path)} is a device or a pipe; give the path of a file")
    if mode is not None and not os.access(path, os.W_OK):
        raise UserError(f"{_label(name, path)} cannot be written (Permission denied); give another path")
    _try_writing(_nearest_folder(path.parent, path, name), path, name)


def check_output_folder(path: Path, name: str) -> None:
    """Check that files can be made in the folder `path`, which may not exist yet. Makes no folder and leaves no file.

    Args:
        name: the flag or setting that gave the path, for errors.

    Raises:
        UserError: a file is in the way, the path goes through a file, or its disk takes no file.
    """
    _try_writing(_nearest_folder(path, path, name), path, name)


def check_free_bytes(path: Path, name: str, num_bytes: int, what: str) -> None:
    """Check that the disk of `path` has `num_bytes` free bytes.

    Args:
        what: what would be written, for the error.

    Raises:
        UserError: it has fewer.
    """
    free = free_bytes(path)
    if free is not None and free < num_bytes:
        raise UserError(
            f"{_label(name, path)}: {what} takes {_gigabytes(num_bytes)}, its disk has {_gigabytes(free)} free; "
            f"free some space, or give a path on another disk"
        )


def free_bytes(path: Path) -> int | None:
    """Free bytes of the disk that `path` is on or would be on. None if the system does not say."""
    for folder in (path, *path.absolute().parents):
        with suppress(OSError, ValueError):
            return shutil.disk_usage(folder).free
    return None


@contextmanager
def writing_to(path: Path, name: str = "") -> Iterator[None]:
    """Turn errors of the system while `path` is written into one line with the path and the free space.

    Raises:
        UserError: instead of an `OSError`.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, BrokenPipeError | InterruptedError):
            raise
        raise UserError(_problem(path, name, error)) from error


def write_output(path: Path, content: bytes, name: str = "") -> None:
    """Replace a file in one step. It has its old content or all of the new one, also after a kill. Makes its folder.

    Raises:
        UserError: it cannot be written.
    """
    with writing_to(path, name):
        replace_output(path, content)


def replace_output(path: Path, content: bytes) -> None:
    """As `write_output`, with the system's own error."""
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    replace_file(target, content, temporary=target.with_name(f"{target.name}.{os.getpid()}.partial"))


def replace_file(path: Path, content: bytes, *, temporary: Path) -> None:
    """Write a file at `temporary` and rename it to `path` when it is on the disk. `temporary` is removed on failure."""
    try:
        temporary.write_bytes(content)
        sync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's names, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _mode(path: Path, name: str) -> int | None:
    """The type and permissions at a path; None if there is nothing."""
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise UserError(_problem(path, name, error)) from error


def _nearest_folder(wanted: Path, path: Path, name: str) -> Path:
    """The folder `wanted`, or the nearest one above it that exists. Errors name the output `path`."""
    for folder in (wanted.absolute(), *wanted.absolute().parents):
        mode = _mode(folder, name)
        if mode is None:
            continue
        if not stat.S_ISDIR(mode):
            raise UserError(
                f"{_label(name, path)}: {folder} is a file, not a folder; move it away, or give another path"
            )
        return folder
    return Path("/")


def _try_writing(folder: Path, path: Path, name: str) -> None:
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".writable-") as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UserError(_problem(path, name, error)) from error


def reason_of(error: Exception, path: Path | None = None) -> str:
    """Why something was not written: the system's words with the free space of the path's disk, or another error's."""
    error = error.__cause__ if isinstance(error.__cause__, OSError) else error
    if not isinstance(error, OSError):
        return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    reason = error.strerror or str(error)
    if path is None:
        return reason
    if isinstance(error.filename, str) and not error.filename.startswith(str(path)):
        reason = f"{error.filename}: {reason}"
    free = free_bytes(path)
    return reason + ("" if free is None else f"; {_gigabytes(free)} free on its disk")


def _problem(path: Path, name: str, error: OSError | ValueError) -> str:
    return f"{_label(name, path)} cannot be written ({reason_of(error, path)}); give a path that can be written"


def _label(name: str, path: Path) -> str:
    return f"{name} {path}".strip()


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.3f} GB" if num_bytes >= 1e6 else f"{num_bytes:,} bytes"
