"""Bytes between the GPUs of a node by their copy engines. They take no multiprocessor from the GEMMs beside them.

NCCL moves bytes with kernels, which occupy multiprocessors while they wait for each other. Here every rank maps the
others' send buffers (CUDA's virtual memory, through torch's symmetric memory) and pulls its bytes with plain copies.
The driver hands these to a copy engine. Before and after, the ranks meet by memory operations of the stream
(`stream_barrier`). The received bytes equal NCCL's, bit for bit.

A buffer made by `allocate` uses this transport in every collective of its group (`start_all_to_all`,
`start_all_gathers`). Any other buffer goes through NCCL or gloo.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...device.group import Group
from ...device.memory import count_memory_beside_allocator
from ...graphs import exchanges
from .stream_ops import RecordableBarrier, side_stream, stream_of

#: Priority of the copy stream, on which every rank meets the others in the same order.
_PRIORITY = -1
#: Latest works, remembered to say where a rank hangs.
_NUM_REMEMBERED = 256
#: Gathers that share one barrier: the first bytes travel before the last shard is in place.
_GATHERS_PER_BARRIER = 8


@dataclass(frozen=True, eq=False)
class PeerMemory:
    """A buffer that each rank of a group has; this rank can read all of them.

    Attributes:
        group: the ranks, on one node.
        buffers: uint8 [n] by rank; this rank's own is `buffers[group.rank()]`.
        barrier: on the current stream, wait until the other ranks have come here too.
    """

    group: Group
    buffers: Sequence[Tensor]
    barrier: Callable[[], None]
    #: Views are cached: buffers and weights do not move, and making views costs the host more than the copies.
    _copies: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """The device that reads the buffers."""
        return self.buffers[self.group.rank()].device

    def of_peer(self, rank: int, own: Tensor) -> Tensor:
        """The view of `rank`'s buffer that corresponds to `own`, a flat uint8 view of this rank's buffer."""
        start = own.data_ptr() - self.buffers[self.group.rank()].data_ptr()
        return self.buffers[rank][start : start + own.numel()]

    def pull_rows(self, source: Tensor, destination: Tensor, *, copies_own: bool) -> None:
        """Row p of `destination` becomes this rank's row of rank p's `source`; both flat uint8 [d · bytes].

        Both are lasting buffers. Without `copies_own` this rank's own row is not changed.
        """
        key = (source.data_ptr(), destination.data_ptr(), source.numel(), copies_own)
        copies = self._copies.get(key)
        if copies is None:
            own = self.group.rank()
            rows = destination.view(self.group.size(), -1)
            mine = source.view(self.group.size(), -1)[own]
            peers = _from_next(own, self.group.size())[: None if copies_own else -1]
            copies = self._copies[key] = [(rows[peer], self.of_peer(peer, mine)) for peer in peers]
        for target, origin in copies:
            target.copy_(origin, non_blocking=True)

    def pull_parts(self, full: Tensor) -> None:
        """Part p of `full` (flat uint8, in this memory) becomes rank p's; this rank's own stays."""
        key = (full.data_ptr(), full.numel())
        copies = self._copies.get(key)
        if copies is None:
            own = self.group.rank()
            parts = full.view(self.group.size(), -1)
            peers = _from_next(own, self.group.size())[:-1]
            copies = self._copies[key] = [(parts[peer], self.of_peer(peer, parts[peer])) for peer in peers]
        for target, origin in copies:
            target.copy_(origin, non_blocking=True)


@dataclass(frozen=True, eq=False)
class CopyWork:
    """Handle of all work queued so far, with the interface of ``torch.distributed.Work``.

    Attributes:
        queued_at: ``time.monotonic`` when it was queued.
        by: what carries it out, for messages.
    """

    name: str
    group: Group
    event: torch.cuda.Event | None
    queued_at: float
    by: str = "copy engines"

    def wait(self) -> None:
        """Let the current stream wait; the host does not."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)


_memories: dict[int, PeerMemory] = {}
_barriers: dict[str, RecordableBarrier] = {}
_started: deque[CopyWork] = deque(maxlen=_NUM_REMEMBERED)
_latest: dict[Hashable, CopyWork] = {}


def allocate(nbytes: int, group: Group, device: torch.device) -> Tensor:
    """Zeroed memory that the ranks of `group` map into each other's address space, uint8 [nbytes]; never freed.

    Called by every rank of the group, in the same order, with the same size.

    Raises:
        RuntimeError: the driver cannot share memory between these processes, or its streams cannot wait for it.
    """
    buffers = mapped(nbytes, group, device)
    register(PeerMemory(group, buffers, _barrier_of(group, device)))
    return buffers[group.rank()]


def mapped(nbytes: int, group: Group, device: torch.device) -> list[Tensor]:
    """Zeroed memory that the ranks of `group` map: by rank, its uint8 [nbytes] as this process sees it.

    Called as `allocate`; the memory lives as long as the tensors.
    """
    from torch.distributed import _symmetric_memory as symmetric_memory

    counted = torch.cuda.memory_allocated(device)
    own = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
    own.zero_()
    torch.cuda.synchronize(device)  # other ranks write to it as soon as they have mapped it
    handle = symmetric_memory.rendezvous(own, group.group_name)
    count_memory_beside_allocator(nbytes - (torch.cuda.memory_allocated(device) - counted))
    return [
        own if rank == group.rank() else handle.get_buffer(rank, (nbytes,), torch.uint8) for rank in range(group.size())
    ]


def _barrier_of(group: Group, device: torch.device) -> RecordableBarrier:
    """The one barrier of a group: its ranks call it in the same order, for any memory."""
    barrier = _barriers.get(group.group_name)
    if barrier is None:
        counters = [buffer.view(torch.int32).view(3, -1) for buffer in mapped(3 * 4 * group.size(), group, device)]
        barrier = _barriers[group.group_name] = RecordableBarrier(counters, group.rank())
        with side_stream(device, _PRIORITY):
            barrier()
        exchanges.register(_name_of_barrier(group), barrier.recordable)
    return barrier


def forget_barrier(group: Group) -> None:
    """Drop the barrier of `group` after a trial failed on one of its ranks, so that no launch waits for it."""
    _barriers.pop(group.group_name, None)
    exchanges.forget(_name_of_barrier(group))


def _name_of_barrier(group: Group) -> str:
    return f"barrier of {group.group_name}"


def register(memory: PeerMemory) -> None:
    """Make this buffer known to the collectives of `memory.group`."""
    _memories[_address(memory.buffers[memory.group.rank()])] = memory


def memory_of(tensor: Tensor, group: Group) -> PeerMemory | None:
    """The registered buffer of `group` in which `tensor` lies."""
    memory = _memories.get(_address(tensor))
    return memory if memory is not None and memory.group.group_name == group.group_name else None


def start_all_to_all(
    memory: PeerMemory, pairs: Iterable[tuple[Tensor, Tensor]], *, copies_own: bool = True
) -> CopyWork:
    """Start all-to-alls of (source, destination) pairs; the sources lie in `memory` (see `PeerMemory.pull_rows`).

    Waiting for the work also means that every rank has read this rank's sources.
    """
    with side_stream(memory.device, _PRIORITY):
        memory.barrier()
        for source, destination in pairs:
            memory.pull_rows(source, destination, copies_own=copies_own)
        memory.barrier()
        return _mark("all_to_all", memory)


def start_all_gathers(gathers: Sequence[tuple[PeerMemory, Tensor, Tensor]]) -> list[CopyWork]:
    """Start all-gathers of (memory, full, shard) one after the other, all of one group; flat uint8.

    Every `full` lies in its `memory`; `shard` is a separate tensor, or this rank's part of `full`. Waiting for the last
    work also means that every rank has read this rank's shards.
    """
    works = []
    with side_stream(gathers[0][0].device, _PRIORITY):
        for first in range(0, len(gathers), _GATHERS_PER_BARRIER):
            together = gathers[first : first + _GATHERS_PER_BARRIER]
            for memory, full, shard in together:
                mine = full.view(memory.group.size(), -1)[memory.group.rank()]
                if mine.data_ptr() != shard.data_ptr():
                    mine.copy_(shard, non_blocking=True)
                    _used_on_copy_stream(shard)
            together[0][0].barrier()
            for index, (memory, full, _) in enumerate(together, first):
                memory.pull_parts(full)
                if index == len(gathers) - 1:
                    memory.barrier()
                works.append(_mark("all_gather", memory))
    return works


def remember(work: CopyWork, place: Hashable) -> CopyWork:
    """Let `unfinished` know `work` at this place; returns it.

    Recorded works are left out: their launch counts as one work (`training.step_graph`).
    """
    if not exchanges.is_recording():
        _latest[place] = work
    return work


def unfinished() -> CopyWork | None:
    """The oldest collective that the device has not finished, among the last few."""
    works = (*_started, *_latest.values())
    running = [work for work in works if work.event is not None and not work.event.query()]
    return min(running, key=lambda work: work.queued_at, default=None)


def _used_on_copy_stream(tensor: Tensor) -> None:
    """Keep the allocator from reusing `tensor` before the copy stream has read it. The caller may then drop it."""
    if tensor.device.type == "cuda":
        tensor.record_stream(stream_of(tensor.device, _PRIORITY))


def _mark(name: str, memory: PeerMemory) -> CopyWork:
    event = None
    if memory.device.type == "cuda":
        event = torch.cuda.Event()
        event.record()
    work = CopyWork(name, memory.group, event, time.monotonic())
    if not exchanges.is_recording():
        _started.append(work)
    return work


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _from_next(rank: int, num_ranks: int) -> list[int]:
    """All ranks from the one after `rank` to itself, so that no two ranks read the same peer at once."""
    return [(rank + step) % num_ranks for step in range(1, num_ranks + 1)]
