"""From a rank to the others of its node: a stream that copies into their memory and tells them so.

No kernel takes part. A copy engine moves the bytes, after what the sender's current stream has queued; then the sending
stream writes a number into the reader's memory, and the reader's current stream waits for it where it needs the bytes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from . import copy_engine, stream_ops
from .copy_engine import CopyWork
from .side_stream import stream_of

Group = torch.distributed.ProcessGroup

#: Of the sending stream: it does not wait behind gradients.
_PRIORITY = -2


class Link(Protocol):
    """What a rank sends and awaits. A channel carries growing numbers from each rank to each."""

    def start(self) -> None:
        """What is sent from here on comes after all that the current stream has queued."""

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Send `source` to a peer's `target`: of one size, contiguous, and the caller's until it was sent."""

    def tell(self, peer: int, channel: int, number: int) -> None:
        """Tell `peer`, once everything so far was copied, that this rank has come to `number`."""

    def sent(self, name: str) -> CopyWork:
        """Everything so far, to be waited for."""

    def wait(self, peer: int, channel: int, number: int, name: str) -> None:
        """Let the current stream wait until `peer` has told `number`."""


class PeerLink:
    """`Link` between GPUs.

    Args:
        group: ranks of one node.
        counters: by rank, its int32 [channels · d] zeros that all map; element (c, r) is written by rank r.
    """

    def __init__(self, group: Group, counters: Sequence[Tensor]) -> None:
        self._group, self._counters = group, counters
        self._rank, self._num_ranks = group.rank(), group.size()
        self._device = counters[self._rank].device
        self._stream = stream_of(self._device, _PRIORITY)
        self._raw_stream = self._stream.cuda_stream
        self._here = torch.cuda.Event()

    def start(self) -> None:
        """See `Link.start`."""
        self._here.record(torch.cuda.current_stream(self._device))
        self._stream.wait_event(self._here)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """See `Link.copy`."""
        stream_ops.copy(target.data_ptr(), source.data_ptr(), source.nbytes, self._raw_stream)

    def tell(self, peer: int, channel: int, number: int) -> None:
        """See `Link.tell`."""
        stream_ops.write_value(self._address(peer, channel, self._rank), number, self._raw_stream)

    def sent(self, name: str) -> CopyWork:
        """See `Link.sent`."""
        return self._mark(f"{name}, sending", self._stream)

    def wait(self, peer: int, channel: int, number: int, name: str) -> None:
        """See `Link.wait`."""
        address = self._address(self._rank, channel, peer)
        stream_ops.wait_value(address, number, stream_ops.current_stream(self._device))
        self._mark(name, torch.cuda.current_stream(self._device))  # a stream that hangs here is named

    def _address(self, owner: int, channel: int, writer: int) -> int:
        counters = self._counters[owner]
        return counters.data_ptr() + (channel * self._num_ranks + writer) * counters.element_size()

    def _mark(self, name: str, stream: torch.cuda.Stream) -> CopyWork:
        event = torch.cuda.Event()
        event.record(stream)
        return copy_engine.remember(CopyWork(name, self._group, event, time.monotonic()))
