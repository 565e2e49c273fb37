"""A link from a rank to the others of its node: a stream copies into their memory and signals them.

No kernel takes part. A copy engine moves the bytes after what the sender's current stream has queued. Then the sending
stream writes a number into the reader's memory. The reader's current stream waits for that number before it uses the
bytes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ...device.group import Group
from ...graphs import exchanges
from . import copy_engine, stream_ops
from .copy_engine import CopyWork
from .stream_ops import stream_of

#: Priority of the sending stream, so that it does not wait behind gradients.
_PRIORITY = -2


class Link(Protocol):
    """What a rank sends and awaits. A channel carries growing numbers between each pair of ranks."""

    def start(self) -> None:
        """Everything sent from here on follows the work that the current stream has queued."""

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Send `source` to a peer's `target` of the same size; both contiguous. The caller keeps `source` unchanged
        until it is sent.
        """

    def tell(self, peer: int, channel: int, number: int) -> None:
        """Once everything so far is copied, tell `peer` that this rank has reached `number`."""

    def sent(self, name: str, turn: int) -> CopyWork:
        """A handle of everything sent so far; valid until the next handle of this name and turn."""

    def wait(self, peer: int, channel: int, number: int) -> None:
        """Let the current stream wait until `peer` has told `number`."""


class PeerLink:
    """`Link` between GPUs.

    Args:
        group: ranks of one node.
        counters: by rank, its int32 [channels · d] zeros that all map; element (c, r) is written by rank r.
    """

    def __init__(self, group: Group, counters: Sequence[Tensor]) -> None:
        self._group, self._kept_mapped = group, tuple(counters)
        self._bases = [counters.data_ptr() for counters in counters]
        self._rank, self._num_ranks = group.rank(), group.size()
        self._device = counters[self._rank].device
        self._stream = stream_of(self._device, _PRIORITY)
        self._raw_stream = self._stream.cuda_stream
        self._here = self._new_event()
        self._events: dict[tuple[str, int, bool], torch.cuda.Event] = {}

    def start(self) -> None:
        """See `Link.start`."""
        here = self._here.cuda_event
        stream_ops.record(here, stream_ops.current_stream(self._device))
        stream_ops.wait_event(here, self._raw_stream)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """See `Link.copy`."""
        stream_ops.copy(target.data_ptr(), source.data_ptr(), source.nbytes, self._raw_stream)

    def tell(self, peer: int, channel: int, number: int) -> None:
        """See `Link.tell`."""
        stream_ops.write_value(self._address(peer, channel, self._rank), number, self._raw_stream)

    def sent(self, name: str, turn: int) -> CopyWork:
        """See `Link.sent`."""
        # An event that was recorded into a graph is not queried outside it.
        key = (name, turn, exchanges.is_recording())
        event = self._events.get(key)
        if event is None:
            event = self._events[key] = self._new_event()
        stream_ops.record(event.cuda_event, self._raw_stream)
        # If a stream hangs waiting for a peer, its next send does not finish either: so the watch sees the hang.
        return copy_engine.remember(CopyWork(name, self._group, event, time.monotonic()), (name, turn))

    def wait(self, peer: int, channel: int, number: int) -> None:
        """See `Link.wait`."""
        address = self._address(self._rank, channel, peer)
        stream_ops.wait_value(address, number, stream_ops.current_stream(self._device))

    def _new_event(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._stream)  # torch creates it here
        return event

    def _address(self, owner: int, channel: int, writer: int) -> int:
        return self._bases[owner] + 4 * (channel * self._num_ranks + writer)
