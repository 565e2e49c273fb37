"""Memory that a process holds: torch's allocator, and what lies beside it."""

from __future__ import annotations

import torch

_bytes_beside_allocator = 0
_earlier_peak_gib = 0.0


def count_memory_beside_allocator(nbytes: int) -> None:
    """Add what lasting memory takes beside what torch's allocator counts."""
    global _bytes_beside_allocator
    _bytes_beside_allocator += nbytes


def peak_used_share(device: torch.device) -> float:
    """The most of a GPU's memory that was in use: by torch's allocator at its peak, and by all else (CUDA and NCCL
    themselves, buffers that ranks share, other processes) now."""
    free, total = torch.cuda.mem_get_info(device)
    beside_allocator = total - free - torch.cuda.memory_reserved(device)
    return (beside_allocator + torch.cuda.max_memory_reserved(device)) / total


def begin_another_peak(device: torch.device) -> None:
    """Bytes that are counted beside the allocator from here on add to a later peak, not to what was held before."""
    global _earlier_peak_gib
    _earlier_peak_gib = peak_memory_gib(device)
    torch.cuda.reset_peak_memory_stats(device)


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory this process has held, GiB: on a GPU the allocator's peak, buffers shared with other ranks and what
    CUDA graphs keep; on a CPU the resident set."""
    if device.type == "cuda":
        return max(_earlier_peak_gib, (torch.cuda.max_memory_allocated(device) + _bytes_beside_allocator) / 2**30)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
