"""Who saves a checkpoint: the run that it belongs to, the launch that wrote it, and the process."""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from .files import META, candidates, iteration_folder

#: Keys in `META`.
RUN, LAUNCH = "run", "launch"


@dataclass(frozen=True)
class RunIdentity:
    """Names of one session of a run.

    Attributes:
        run: 16 hexadecimal digits, drawn by a fresh run and kept by every run that resumes it.
        launch: of the job that started the ranks; equal after torchrun has restarted them. None without torchrun.
        token: 16 hexadecimal digits of this session alone, in its lock and its temporary folders.
    """

    run: str
    launch: str | None
    token: str

    @classmethod
    def drawn(cls, run: str | None = None) -> RunIdentity:
        """An identity with a new token, and a new run unless one is given. Ranks share rank 0's."""
        return cls(run or secrets.token_hex(8), launch_id(), secrets.token_hex(8))


def launch_id() -> str | None:
    """The launch that started this process, the same for all restarts by one torchrun; None without torchrun.

    torchrun's run id is "none" unless it was given one. Its process then names the launch.
    """
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    if run_id is None or run_id != "none":
        return run_id
    machine, start = machine_id(), process_start(os.getppid())
    return None if machine is None or start is None else f"{machine}:{os.getppid()}:{start}"


def machine_id() -> str | None:
    """The running kernel and this process's numbering of processes; None if the system does not tell.

    A hostname is not enough: containers may share it, and number their processes apart.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def process_start(process: int) -> int | None:
    """When a process of this machine started, in clock ticks since the boot; None if it has ended.

    Differs from wall-clock times in that nobody sets this clock.
    """
    fields = _process_fields(process)
    has_ended = not fields or fields[0] in ("Z", "X")
    return None if has_ended else int(fields[19])


def is_stopped(process: int) -> bool:
    """Whether a signal or a debugger has stopped a process of this machine."""
    return _process_fields(process)[:1] in (["T"], ["t"])


def _process_fields(process: int) -> list[str]:
    """The fields of ``/proc/<process>/stat`` from the third one, the state, on; empty if there is no such process."""
    try:
        # The second field, the program's name, may hold spaces and parentheses.
        return Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def saved_by(folder: Path) -> tuple[str | None, str | None]:
    """(run, launch) of a checkpoint; None for each that it does not name: it is damaged, or of an earlier version."""
    try:
        about = json.loads((folder / META).read_text())
        values = [about.get(RUN), about.get(LAUNCH)]
    except (OSError, ValueError, AttributeError, RecursionError):
        return None, None
    run, launch = (value if isinstance(value, str) else None for value in values)
    return run, launch


def own_restart(root: Path) -> bool:
    """Whether an earlier start of this process's launch saved under `root`, and torchrun may have restarted it.

    torchrun's count of restarts alone does not tell: with several nodes each torchrun counts its own, and that of rank
    0's node stays 0 where another node failed.

    Raises:
        CheckpointError: the tracker under `root` is damaged.
    """
    launch = launch_id()
    counts = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
    if launch is None or not any(int(os.environ.get(name, "0")) for name in counts):
        return False
    saved = (saved_by(iteration_folder(root, iteration)) for iteration in candidates(root))
    # The newest one may be damaged.
    return next((by for run, by in saved if run is not None), None) == launch
