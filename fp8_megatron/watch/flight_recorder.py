"""Torch's flight recorder. It is on during a run. When the run breaks, it tells which collective this rank was in."""

from __future__ import annotations

import os
import pickle
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ..collectives.transport import copy_engine
from ..reporting.report import write_report

#: Description of groups in whose collectives background threads wait while training goes on: that is not a hang.
BACKGROUND_GROUP = "background"
#: Collectives each rank remembers. Torch's own default; written out so that the run does not depend on it.
_NUM_ENTRIES = "2000"
#: A setting's name in current and in older releases.
_FILE_PREFIX = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_UNRECORDED = ("send", "recv", "isend", "irecv", "batch_isend_irecv")
_PACKAGES = ("fp8_megatron", "megatron")


@contextmanager
def enabled(folder: Path) -> Iterator[None]:
    """Record collectives, and write the record into `folder` when one fails; entered before the process group is made.

    Variables that the environment already sets stay; the others are restored at the end. Every rank's file is
    ``flight_recorder_rank_N``; torch's own NCCL watchdog writes the same file at a timeout.
    """
    with suppress(OSError):  # `write` makes it again, and says what is wrong
        folder.mkdir(parents=True, exist_ok=True)
    settings = {
        ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"): _NUM_ENTRIES,
        ("TORCH_NCCL_DUMP_ON_TIMEOUT",): "1",
        _FILE_PREFIX: str(folder.absolute() / "flight_recorder_rank_"),
    }
    added = {names[0]: value for names, value in settings.items() if not any(name in os.environ for name in names)}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def write(rank: int) -> Path | None:
    """Write this rank's record. None if there is no record or it cannot be written."""
    prefix = next((os.environ[name] for name in _FILE_PREFIX if name in os.environ), None)
    dump = _dump()
    if prefix is None or dump is None:
        return None
    path = Path(f"{prefix}{rank}")
    write_report(path, dump)
    return path if path.exists() else None


@dataclass(frozen=True)
class CallSite:
    """Where Python called a collective.

    Attributes:
        collective: the function of torch.distributed; empty if Python waits for one that was started earlier.
        caller: the innermost function of this package or of megatron-core, with file and line.
    """

    collective: str
    caller: str

    @classmethod
    def of_frames(cls, frames: Iterable[tuple[str, str, int]]) -> CallSite:
        """Args: frames: (function, file, line), innermost first."""
        collective = ""
        for function, file, line in frames:
            parts = Path(file).parts
            if parts[-1] == "distributed_c10d.py":
                collective = function
            root = max((i for i, part in enumerate(parts[:-1]) if part in _PACKAGES), default=None)
            if root is None or "site-packages" in parts[root:] or function.startswith("__"):
                continue  # `__torch_function__` stands between a call and torch on a CPU
            return cls(collective, f"{function} ({'/'.join(parts[root:])}:{line})")
        return cls(collective, "")

    @classmethod
    def of_traceback(cls, trace: TracebackType | None) -> CallSite:
        """Where an exception was raised."""
        return cls._of_summary(traceback.extract_tb(trace))

    @classmethod
    def of_stack(cls, stack: traceback.StackSummary) -> CallSite:
        """Where a thread is."""
        return cls._of_summary(stack)

    @classmethod
    def _of_summary(cls, stack: traceback.StackSummary) -> CallSite:
        return cls.of_frames((frame.name, frame.filename, frame.lineno or 0) for frame in reversed(stack))


def describe_collective(site: CallSite) -> str:
    """The collective this rank is in or failed in, in words.

    The oldest one that has not ended is where the device, or gloo, is stuck. There may be none: gloo closes the entry
    of a failed collective, and records no send or receive. Then it is the one that Python was calling. If Python was
    calling none, it may be waiting for the last one that was started.

    Args:
        site: where Python was.
    """
    entries = _entries()
    running = next(
        (
            entry
            for entry in entries
            if not entry["retired"] and entry["state"] != "completed" and entry["process_group"][1] != BACKGROUND_GROUP
        ),
        None,
    )
    waiting = f"; Python is in {site.caller}" if site.caller else ""  # on CUDA Python has usually gone on
    copied = copy_engine.unfinished()
    if copied is not None and (running is None or copied.queued_at < _queued_at(running)):
        ranks = torch.distributed.get_process_group_ranks(copied.group)
        return f"in {copied.name} by {copied.by} among ranks {_list_ranks(ranks)}{waiting}"
    if running is not None:
        started_at = _site(running) or (site if site.collective else None)
        return f"in {_describe(running)}{_called_by(started_at) if started_at else waiting}"
    if site.collective:
        recorded = bool(entries) and site.collective not in _UNRECORDED
        return f"in {_describe(entries[-1], site.collective) if recorded else site.collective}{_called_by(site)}"
    last_one = f"; the last collective it started was {_describe(entries[-1])}" if entries else ""
    return f"in {site.caller or 'no collective'}{last_one}"


def _describe(entry: dict[str, Any], operation: str = "") -> str:
    name, title = entry["process_group"]
    ranks = _ranks_of_group(name)
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    group = title if title and title != "undefined" else f"group {name}"
    where = f"{group} (ranks {_list_ranks(ranks)})" if ranks else group
    sizes = [f", {dtype}{size}" for dtype, size in zip(entry["input_dtypes"], entry["input_sizes"], strict=False)]
    backend, _, recorded_as = entry["profiling_name"].partition(":")
    return f"{operation or recorded_as} of {where}, number {number} on {backend}{''.join(sizes)}"


def _queued_at(entry: dict[str, Any]) -> float:
    """In ``time.monotonic`` seconds; the record has nanoseconds since the epoch."""
    return time.monotonic() - (time.time() - entry["time_created_ns"] / 1e9)


def _called_by(site: CallSite) -> str:
    return f", called by {site.caller}" if site.caller else ""


def _site(entry: dict[str, Any]) -> CallSite | None:
    frames = entry.get("frames")
    return CallSite.of_frames((frame["name"], frame["filename"], frame["line"]) for frame in frames) if frames else None


def _list_ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown}, … {ranks[-1]}"


def _ranks_of_group(name: str) -> list[int]:
    # The record's own list of groups is empty under gloo.
    for group, known_as in torch.distributed.distributed_c10d._world.pg_names.items():
        if known_as == name:
            return torch.distributed.get_process_group_ranks(group)
    return []


def _entries() -> list[dict[str, Any]]:
    """The recorded entries, oldest first."""
    dump = _dump()
    # `pickle` of bytes that this process has just made.
    return [] if dump is None else pickle.loads(dump).get("entries", [])


def _dump() -> bytes | None:
    """The record as torch pickles it: NCCL's if there is NCCL, else gloo's."""
    module = torch._C._distributed_c10d
    # To name stack frames torch would import its compiler, which takes many seconds.
    names_frames = "torch._inductor.codecache" in sys.modules
    for name in ("_dump_nccl_trace", "_dump_fr_trace"):
        dump = getattr(module, name, None)
        if dump is None or (name == "_dump_nccl_trace" and not torch.cuda.is_initialized()):
            continue
        try:
            return dump(includeStackTraces=names_frames)
        except RuntimeError:
            continue
    return None
