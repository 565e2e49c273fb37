"""Shared by all programs: display of errors, exit status, and preparations for the import of megatron-core."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import time
import traceback
import warnings
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from ..errors import USER_ERROR_STATUS, UserError, printable
from ..outputs import drop_closed_streams, drop_stream, reason_of
from .error_report import folder_of, machine_error, write_error_log

#: Exit status after an error that is none of the user's (EX_SOFTWARE of sysexits.h).
INTERNAL_ERROR_STATUS = 70

#: Set to 1, it prints the traceback of every error on stderr as well.
TRACEBACK_VARIABLE = "FP8_MEGATRON_TRACEBACK"

#: Seconds that other ranks wait before they tell an error. torchrun ends all ranks when the first one exits, and
#: rank 0, which has the same error, must tell it first.
_OTHERS_WAIT_SECONDS = 5.0
_LONGEST_LINE = 500
#: How `show` begins a line.
_ERROR = re.compile(r"(internal )?error( on rank \d+)?: ")


def exit_status(body: Callable[[], int | None], *errors: type[Exception]) -> int:
    """Run a program. Every error becomes one line on stderr; no error becomes a traceback.

    Args:
        body: the program; returns its exit status, or None for 0.
        errors: exceptions besides `UserError` that are the user's, such as `ValueError` if a program only reads files.

    Returns:
        The exit status of `body`. After an error of the user or of the machine (no memory, a full disk, a missing file)
        it is `USER_ERROR_STATUS`; after any other error `INTERNAL_ERROR_STATUS`, and a log file has the traceback. An
        interrupt gives a shell's status of SIGINT, and that of SIGPIPE means that nobody reads stdout.
    """
    try:
        _check_working_folder()
        status = body() or 0
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        tell("interrupted")
        return 128 + signal.SIGINT
    except Exception as error:
        if drop_closed_streams() and isinstance(error, BrokenPipeError):
            return 128 + signal.SIGPIPE
        if isinstance(error, OSError) and error.filename is None and not leave(sys.stdout, "\n"):
            error = UserError(f"stdout is not written ({reason_of(error)}); send it to a file that has room")
        return _report(error, (UserError, *errors))
    finally:
        leave(sys.stdout)
        leave(sys.stderr)


def tell(line: str) -> None:
    """Print a line on stderr, if that takes it."""
    with suppress(OSError):
        print(printable(line, keep="\n"), file=sys.stderr, flush=True)


def leave(stream: TextIO, end: str = "") -> bool:
    """Write what stdout or stderr still holds, and `end`; whether it takes that.

    If not, it is dropped. At its exit, Python would fail of it with another status.
    """
    try:
        print(end=end, file=stream, flush=True)
    except OSError:
        drop_stream(stream.fileno())
        return False
    return True


class LogOnStdout(logging.StreamHandler[TextIO]):
    """The log of a run. One line on stderr says that stdout takes no more, as on a full disk; the run goes on."""

    def __init__(self) -> None:
        super().__init__(sys.stdout)
        self.setFormatter(LineFormatter())
        self._has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        """Called in the handler of an exception."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._has_failed:
            self._has_failed = True
            tell(f"the log on stdout is not written ({reason_of(error)}); the run goes on")


def _check_working_folder() -> None:
    """Raise `UserError` if the current folder was removed. Relative paths mean nothing there, and libraries abort."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        named = f" {os.environ['PWD']}" if "PWD" in os.environ else ""
        raise UserError(f"the working folder{named} is gone; change to a folder that exists (cd)") from error


def _report(error: Exception, users: tuple[type[Exception], ...]) -> int:
    """Tell an error in one line; the exit status."""
    if os.environ.get(TRACEBACK_VARIABLE, "0") not in ("", "0"):
        traceback.print_exception(error)
    line = None if isinstance(error, UserError) else machine_error(error, folder_of(error))
    if line is not None or isinstance(error, users):
        show(error if line is None else line)
        return USER_ERROR_STATUS
    log = write_error_log(error)
    place = f"the traceback is in {log}" if log else "no folder takes the traceback"
    said = " ".join(str(error).split())
    line = f"{type(error).__name__}: {said[:_LONGEST_LINE]}" if said else type(error).__name__
    show(line, kind="internal error", note=f"; {place}; {TRACEBACK_VARIABLE}=1 prints it here")
    return INTERNAL_ERROR_STATUS


def show(error: Exception | str, *, kind: str = "error", note: str = "") -> None:
    """Print an error on stderr, with the rank unless it is rank 0. Of ranks on a node with one error, one prints it.

    Args:
        error: the text that ranks with the same error share.
        kind: what the line begins with.
        note: the end of the line; it may differ between ranks.
    """
    rank = os.environ.get("RANK", "0")
    if not _is_told(str(error), patient=rank != "0"):
        teller = "" if rank == "0" else f" on rank {rank}"
        tell(f"{kind}{teller}: {error}{note}")


def told_error(output: str) -> str:
    """The line with the error of a program that was started: the first that it or a rank told, else its last one."""
    lines = output.strip().splitlines()
    return next(filter(_ERROR.match, lines), lines[-1] if lines else "it said nothing")


def _is_told(text: str, *, patient: bool) -> bool:
    """Whether another rank of this node has told `text`. If not, this rank will.

    torchrun gives each rank a folder for its error file. Their parent, which the ranks share, holds the marks. An error
    file that a user named is no such place: the marks of an earlier run would stay there.
    """
    own_file = os.environ.get("TORCHELASTIC_ERROR_FILE") if "TORCHELASTIC_RUN_ID" in os.environ else None
    name = f"told_{zlib.crc32(text.encode(errors='replace')):08x}"
    mark = Path(own_file).parent.parent / name if own_file else None
    end = time.monotonic() + (_OTHERS_WAIT_SECONDS if patient else 0)
    while time.monotonic() < end and not (mark and os.path.exists(mark)):  # False where it may not look
        time.sleep(0.1)
    try:
        if mark:
            mark.touch(exist_ok=False)
    except FileExistsError:
        return True
    except OSError:
        pass  # no place for marks: rather twice than never
    return False


class LineFormatter(logging.Formatter):
    """The text of log records; what cannot be printed is written as an escape."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), keep="\n\t")


def prepare_megatron() -> None:
    """Call before the first import of megatron-core. Selects the right cuDNN, hides warnings on optional packages."""
    from ..device.cudnn import load_bundled

    load_bundled()
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")
    logging.getLogger("megatron").setLevel(logging.ERROR)


def clone() -> Path | None:
    """The clone that this package runs from; None if it is installed."""
    root = Path(__file__).parents[2]
    return root if (root / "pyproject.toml").is_file() else None


def share_import_path() -> None:
    """Let child Python programs import this package from a clone that is not installed."""
    root = clone()
    if root is None:
        return
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(root) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(root), *filter(None, paths)])
