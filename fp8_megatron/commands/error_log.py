"""The log file of an internal error: traceback, command line, versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
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
