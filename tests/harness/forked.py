"""Calls of a program in a forked process, with limits of time and memory, to see how it ends.

`fork_server` gives a process to fork from in which nothing has happened but imports, which take seconds.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import runpy
import signal
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from fp8_megatron.commands.program import prepare_megatron


@dataclass(frozen=True)
class Ending:
    """How a program ended.

    Attributes:
        status: exit status; the negative number of the signal that killed it; None if it ran out of time.
        output, errors: what it wrote to stdout and stderr.
        more_bytes: by how much its memory grew beyond what it had at the fork.
        was_asked: whether it was asked to end, after its time.
    """

    status: int | None
    output: str
    errors: str
    more_bytes: int
    was_asked: bool = False


def run_forked(
    program: Callable[[], object], *, folder: Path, seconds: float, address_bytes: int, more_seconds: float = 0.0
) -> Ending:
    """Run a program in a fork of this process. What it has imported is there at once.

    Args:
        program: its exit status is what it returns, or the code of its SystemExit; another exception is status 99.
        folder: its working directory.
        seconds: it is killed after this time.
        address_bytes: address space that it may take beyond this process's.
        more_seconds: it is not killed then, but asked to end (SIGTERM), and killed after this time more.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        sys.stdout.flush()
        sys.stderr.flush()
        # A process group in a cycle must not be freed in the child: its destructor waits for threads of the parent.
        gc.collect()
        pid = os.fork()
        if pid == 0:
            gc.disable()
            _be_child(program, folder, output.fileno(), errors.fileno(), address_bytes)
        ended, was_asked = 0, False
        for limit in filter(None, (seconds, more_seconds)):
            deadline = time.monotonic() + limit
            while not ended and time.monotonic() < deadline:
                ended, status, usage = os.wait4(pid, os.WNOHANG)
                time.sleep(0.002)
            if not ended and more_seconds and not was_asked:
                os.kill(pid, signal.SIGTERM)
                was_asked = True
        if not ended:
            os.kill(pid, signal.SIGKILL)
            _, status, usage = os.wait4(pid, 0)
        texts = [os.pread(file.fileno(), 1 << 20, 0).decode(errors="replace") for file in (output, errors)]
        grown = usage.ru_maxrss * 1024 - _resident_bytes()
        return Ending(os.waitstatus_to_exitcode(status) if ended else None, *texts, grown, was_asked)


def fork_server() -> Executor:
    """A process that has imported what programs of this project do, for ``submit(run_forked, ...)``."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("forkserver"), initializer=_import_it_all)


def _import_it_all() -> None:
    prepare_megatron()
    # What a run would import late: to draw its figure, and for its optimizer.
    import matplotlib.figure  # noqa: F401
    import torch._dynamo  # noqa: F401

    import fp8_megatron.training.trainer  # noqa: F401

    gc.collect()
    gc.freeze()  # the collections before forks would take longer than what is forked


def run_python(words: Sequence[str], environment: dict[str, str]) -> None:
    """Be ``python WORDS`` in a fork: ``-c CODE``, ``-m MODULE`` or a file, and its arguments. Warnings are ignored."""
    os.environ.clear()
    os.environ.update(environment)
    warnings.simplefilter("ignore")
    first, *rest = words
    sys.argv = [first, *rest]
    if first == "-c":
        sys.path.insert(0, "")
        sys.argv = [first, *rest[1:]]
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), module.__dict__)
    elif first == "-m":
        sys.path.insert(0, "")
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(first))
        runpy.run_path(first, run_name="__main__")


def _be_child(program: Callable[[], object], folder: Path, output: int, errors: int, address_bytes: int) -> None:
    status = 99
    try:
        os.chdir(folder)
        os.dup2(output, 1)
        os.dup2(errors, 2)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  # pytest has replaced them
        sys.stderr = open(2, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115
        limit = _address_bytes() + address_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        torch = sys.modules.get("torch")
        if torch is not None:
            # After a fork torch makes its pool of threads anew at the first use, which two threads must not do at once.
            torch.set_num_threads(torch.get_num_threads())
        try:
            result = program()
            status = result if isinstance(result, int) else 0
        except SystemExit as ending:
            status = ending.code if isinstance(ending.code, int) else 1
        except BaseException:
            import traceback

            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _address_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class OfThisProcess:
    """An object in a cycle, as a process group can be. Whoever frees it in another process ends there."""

    def __init__(self) -> None:
        self.itself, self.process = self, os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.process:
            os._exit(9)
