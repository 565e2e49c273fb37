"""The log file of an internal error: traceback, command line, versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

_PACKAGES = ("fp8_megatron", "torch", "megatron-core", "triton", "numpy")
_VARIABLES = ("RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "TORCHELASTIC_RESTART_COUNT")
_FOLDER = "fp8_megatron_log_folder"


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
    """Append a record of `error` to a file in the run's folder, else the current one, else the temporary one.

    Returns:
        The file; None if none of the folders can be written.
    """
    rank = os.environ.get("RANK", "0")
    name = "fp8_megatron_error.log" if rank == "0" else f"fp8_megatron_error_rank_{rank}.log"
    record = _record(error)
    for folder in (folder_of(error), Path(), Path(tempfile.gettempdir())):
        if folder is None or not folder.is_dir():
            continue
        try:
            with (folder / name).open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(record)
        except OSError:
            continue
        return folder / name
    return None


def _record(error: BaseException) -> str:
    versions = " ".join(f"{package} {_version(package)}" for package in _PACKAGES)
    variables = " ".join(f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ)
    return "\n".join(
        [
            f"==== {datetime.now(UTC).isoformat(timespec='seconds')}",
            f"command: {shlex.join(sys.orig_argv)}",
            f"folder: {Path.cwd()}",
            f"python {platform.python_version()} {versions}, {platform.platform()}",
            f"environment: {variables or 'none of torchrun'}",
            "".join(traceback.format_exception(error)),
        ]
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
