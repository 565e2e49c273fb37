"""Memory that a process holds, in torch's allocator and beside it, and copies to the host.

`HostCopy` reads values late: the host never waits for the work that it has just queued.
"""

from __future__ import annotations

import math
import os
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

#: Where a process in a container finds its limit, in version 2 and 1 of control groups.
_CONTROL_GROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")

_bytes_beside_allocator = 0
_earlier_peak_gib = 0.0


def count_memory_beside_allocator(nbytes: int) -> None:
    """Count lasting memory that torch's allocator does not count."""
    global _bytes_beside_allocator
    _bytes_beside_allocator += nbytes


def memory_bytes(device: torch.device) -> int:
    """Memory of a GPU, used or not; on a CPU that of the machine, or less if a control group limits this process."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(min(installed, *map(_limit_in, _CONTROL_GROUP_LIMITS)))


def _limit_in(path: str) -> float:
    """The bytes that a file of a control group allows; infinite if there is no such limit."""
    with suppress(OSError, ValueError):
        return int(Path(path).read_text())
    return math.inf


def peak_used_share(device: torch.device) -> float:
    """Share of a GPU's memory in use: the peak of torch's allocator, plus the current use by everything else (CUDA and
    NCCL themselves, buffers that ranks share, other processes).
    """
    free, total = torch.cuda.mem_get_info(device)
    beside_allocator = total - free - torch.cuda.memory_reserved(device)
    return (beside_allocator + torch.cuda.max_memory_reserved(device)) / total


def begin_another_peak(device: torch.device) -> None:
    """From here on, bytes counted beside the allocator add to a later peak, not to the earlier one."""
    global _earlier_peak_gib
    _earlier_peak_gib = peak_memory_gib(device)
    torch.cuda.reset_peak_memory_stats(device)


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory this process has held, GiB. On a GPU: the allocator's peak, buffers shared with other ranks, and
    memory that CUDA graphs keep. On a CPU: the resident set.
    """
    if device.type == "cuda":
        return max(_earlier_peak_gib, (torch.cuda.max_memory_allocated(device) + _bytes_beside_allocator) / 2**30)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def cpu_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU, of the same shape and dtype; from CUDA into pinned memory, without waiting for it."""
    if tensor.device.type != "cuda":
        return tensor.clone()
    copied = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return copied.copy_(tensor, non_blocking=True)


class Mark:
    """A point in a device's work: on a GPU, when the stream reaches it; on a CPU, the time of the call."""

    def __init__(self, device: torch.device) -> None:
        self._time = time.monotonic()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def wait(self) -> None:
        """Wait until the device has reached this point. Work that was queued later may still run."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: Mark) -> float:
        """Seconds of device time between two marks. Both must have been reached."""
        if self._event is not None and earlier._event is not None:
            return earlier._event.elapsed_time(self._event) / 1e3
        return self._time - earlier._time


class HostCopy:
    """Values that are being copied from a device to the host.

    Attributes:
        ended: the point in the device's work behind the copy.
    """

    def __init__(self, values: Tensor) -> None:
        self._host = cpu_copy(values)
        self.ended = Mark(values.device)

    def read(self) -> list[float]:
        """Wait for the copy, but not for work that was queued behind it."""
        self.ended.wait()
        values: list[float] = self._host.tolist()
        return values
