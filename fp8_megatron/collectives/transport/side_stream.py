"""Where the inner stages of a collective run: on CUDA a stream of their own, beside which compute continues."""

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
    """What the block queues comes after all that the current stream has queued, and does not hold it up. On a CPU
    nothing is special.

    There is one side stream per device and priority, so blocks follow each other. Two rules keep memory safe without a
    `record_stream`. What a block allocates, only side-stream blocks use: such memory returns to the side stream's own
    pool. What a block uses of the caller's, the caller leaves alone until the current stream has waited for a
    collective that the block started last; that collective follows everything in the block.
    """
    if device.type != "cuda":
        yield
        return
    stream = stream_of(device, priority)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
