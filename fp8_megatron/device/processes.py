"""Processes of this machine, and the launch that this one belongs to."""

from __future__ import annotations

import os
from pathlib import Path


def launch_id() -> str | None:
    """The launch that started this process, the same for all restarts by one torchrun; None without torchrun.

    torchrun's run id is "none" unless it was given one. Its process then names the launch.
    """
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    return parent_id() if run_id == "none" else run_id


def parent_id() -> str | None:
    """The process that started this one; no other process has the same. None if the system does not tell."""
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
