"""Errors of the machine in one line, and the log file of an internal error.

A user can mend memory, disk, permissions and limits of the process. The log has traceback, command line and versions.
"""

from __future__ import annotations

import errno
import importlib.metadata
import os
import platform
import resource
import shlex
import shutil
import stat
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

_PACKAGES = ("fp8_megatron", "torch", "megatron-core", "triton", "numpy")
_VARIABLES = ("RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "TORCHELASTIC_RESTART_COUNT")
_FOLDER = "fp8_megatron_log_folder"
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
_GIB = 2**30
_LESS_MEMORY = "lower --micro-batch-size, spread the model over more ranks, or use a machine with more memory"
#: What torch's CPU allocator and the loader of libraries say.
_OUT_OF_MEMORY = ("DefaultCPUAllocator", "Cannot allocate memory", "failed to map segment")
#: errno → what to do. Every other errno is an internal error.
_FIXES = {
    errno.EACCES: "give a path that you may use, or change its permissions",
    errno.EPERM: "give a path that you may use, or change its permissions",
    errno.EROFS: "its file system is read-only; give a path that can be written",
    errno.ENOENT: "give a path that exists",
    errno.EEXIST: "remove it, or give another path",
    errno.ENOTDIR: "a part of the path is a file; give another path",
    errno.EISDIR: "it is a folder; give the path of a file",
    errno.ELOOP: "a link leads back to itself; give another path",
    errno.ENAMETOOLONG: "give a shorter path",
    errno.EIO: "the file system failed; look at its state, or give another path",
    errno.ESTALE: "the file system was mounted anew; start again",
    errno.EADDRINUSE: "another process has the port; give another one (--master-port)",
    errno.ENXIO: "give the path of an ordinary file",
}


@contextmanager
def logging_errors_in(folder: Path) -> Iterator[None]:
    """An internal error of the body is logged in `folder`, if that exists when the program ends."""
    try:
        yield
    except Exception as error:
        vars(error).setdefault(_FOLDER, folder)
        raise


def folder_of(error: BaseException) -> Path | None:
    """The folder that `logging_errors_in` named for an error."""
    return vars(error).get(_FOLDER)


def write_error_log(error: BaseException) -> Path | None:
    """Append a record of `error` to a file in the run's folder, else the current one.

    If neither takes it, it goes to the temporary folder. Whoever may write there could put a link or a pipe under a
    name that can be guessed: no link is followed, and in a folder that everyone may write the file is a new one.

    Returns:
        The file; None if none of the folders can be written.
    """
    rank = os.environ.get("RANK", "0")
    stem = "fp8_megatron_error" if rank == "0" else f"fp8_megatron_error_rank_{rank}"
    record = _record(error).encode(errors="backslashreplace")
    for folder in (folder_of(error), Path(), Path(tempfile.gettempdir())):
        if folder is None or not folder.is_dir():
            continue
        with suppress(OSError):
            if folder.stat().st_mode & stat.S_IWOTH:
                descriptor, name = tempfile.mkstemp(".log", f"{stem}_", folder)
            else:
                name = str(folder / f"{stem}.log")
                descriptor = os.open(name, _FLAGS, 0o644)
            with os.fdopen(descriptor, "wb") as file:
                file.write(record)
            return Path(name)
    return None


def _record(error: BaseException) -> str:
    versions = " ".join(f"{package} {_version(package)}" for package in _PACKAGES)
    variables = " ".join(f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ)
    return "\n".join(
        [
            f"==== {datetime.now(UTC).isoformat(timespec='seconds')}",
            f"command: {shlex.join(sys.orig_argv)}",
            f"folder: {_working_folder()}",
            f"python {platform.python_version()} {versions}, {platform.platform()}",
            f"environment: {variables or 'none of torchrun'}",
            "".join(traceback.format_exception(error)),
        ]
    )


def _working_folder() -> str:
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return "removed"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def machine_error(error: BaseException, folder: Path | None = None) -> str | None:
    """One line for an error of the machine, with the value and the fix; None for any other error.

    Args:
        error: what was raised.
        folder: where the program writes. It stands in for the path that a failed write does not name.
    """
    text = str(error)
    if isinstance(error, MemoryError) or any(part in text for part in _OUT_OF_MEMORY):
        return f"out of memory{_asked_for(text)}; {_address_space() or _LESS_MEMORY}"
    if type(error).__name__ == "OutOfMemoryError":  # torch's, by name: torch need not be imported
        return f"{_first_line(text).rstrip('.')}; {_LESS_MEMORY}, or give --recompute-granularity full"
    if "can't start new thread" in text or getattr(error, "errno", None) == errno.EAGAIN:
        return f"no more processes or threads can be started ({text}); raise `ulimit -u`, or lower --num-workers"
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("fp8_megatron"):
        return f"the package {error.name} is not installed; pip install it, or pip install -e . in the repository"
    return _file_error(error, folder) if isinstance(error, OSError) else None


def _file_error(error: OSError, folder: Path | None) -> str | None:
    reason = error.strerror or str(error)
    if error.errno in (errno.EMFILE, errno.ENFILE):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"{_place(error)}{reason}; raise `ulimit -n` (it is {limit}), or lower --num-workers"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        path = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else folder or Path.cwd()
        return f"{path}: {reason}, {_free_bytes(path)} bytes are free; make room, or give another folder"
    if error.errno == errno.EFBIG:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        fix = f"`ulimit -f` allows {limit} bytes; raise it" if limit != resource.RLIM_INFINITY else "give another path"
        return f"{_place(error) or f'a file under {folder or Path.cwd()}: '}{reason}; {fix}"
    if error.errno not in _FIXES or (error.filename is None and error.errno != errno.EADDRINUSE):
        return None
    return f"{_place(error)}{reason}; {_FIXES[error.errno]}"


def _place(error: OSError) -> str:
    return f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""


def _free_bytes(path: Path) -> int:
    """Free bytes of the file system that holds `path`, which need not exist."""
    existing = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    return shutil.disk_usage(existing).free


def _asked_for(text: str) -> str:
    """What torch's CPU allocator says that it was asked for."""
    _, _, rest = text.partition("you tried to allocate ")
    count = rest.partition(" ")[0]
    return f" ({int(count) / _GIB:,.1f} GiB were asked for)" if count.isdecimal() else ""


def _address_space() -> str | None:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    return f"`ulimit -v` allows this process {limit / _GIB:.1f} GiB of address space; raise it"


def _first_line(text: str) -> str:
    return next(filter(None, map(str.strip, text.splitlines())), "")
