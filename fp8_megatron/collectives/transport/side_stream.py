"""The stream for the inner stages of a collective: on CUDA a separate one, so that compute continues."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@functools.cache
def stream_of(device: torch.device, priority: int = 0) -> torch.cuda.Stream:
    """The side stream of a CUDA device; one for each priority (below 0: before other streams' kernels)."""
    return torch.cuda.Stream(device, priority=priority)


@contextmanager
def side_stream(device: torch.device, priority: int = 0) -> Iterator[None]:
    """Work of the block follows all work of the current stream, which does not wait for it. On a CPU the block just
    runs.

    There is one side stream per device and priority, so blocks follow each other. Two rules keep memory safe without a
    `record_stream`. Memory that a block allocates is used only in side-stream blocks: it returns to the side stream's
    own pool. The caller's memory that a block uses must not be touched until the current stream has waited for the
    block's last collective, which follows everything in the block.
    """
    if device.type != "cuda":
        yield
        return
    stream = stream_of(device, priority)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
