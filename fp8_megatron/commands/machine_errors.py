"""Errors of the machine that a user can mend: memory, disk, permissions, limits of the process. One line each."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from pathlib import Path

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
