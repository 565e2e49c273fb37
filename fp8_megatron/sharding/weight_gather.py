"""Weights on their way from the ranks that updated them to the forward passes that need them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..collectives.all_gather import AllGatherWork, all_gather_each
from ..collectives.transport.stream_ops import side_stream
from ..graphs.exchanges import is_recording
from .partition import ParamSpace


class WeightGather:
    """All-gather of one space's weights, bucket by bucket, overlapped with the next forward.

    `start` sends every bucket in the order in which forward needs them. A module waits for its own buckets alone
    (`DataParallelModule` sees to it).

    Args:
        space: of several replicas; they call `start` in the same order.
        storages: flat weight storage over the space, each with the number of elements that one value stands for: the
            payload (1), and scales where they are block-wise.
    """

    def __init__(self, space: ParamSpace, storages: list[tuple[Tensor, int]]) -> None:
        group = space.replicas.group
        assert group is not None, "one replica gathers nothing"
        self.space = space
        self._storages = storages
        self._group = group
        self._works: list[list[AllGatherWork]] = [[] for _ in space.buckets]
        #: By bucket, what a recorded forward waits for; empty before the first recording.
        self._arrivals: list[torch.cuda.Event] = []
        self._unawaited: set[int] = set()
        self._room: Tensor | None = None

    def start(self, shards: list[Tensor]) -> None:
        """Send this rank's shard of each storage, [space.shard_numel / elements of a value].

        Where steps are recorded, a shard must lie in lasting memory (`room`, or the state itself).
        """
        self.wait()
        pairs = [
            (bucket.of_space(storage, block), bucket.of_shard(shard, block))
            for bucket in self.space.buckets
            for (storage, block), shard in zip(self._storages, shards, strict=True)
        ]
        for index, work in enumerate(all_gather_each(pairs, self._group)):
            self._works[index // len(shards)].append(work)
        if self._arrivals:
            with side_stream(shards[0].device):
                for works, arrival in zip(self._works, self._arrivals, strict=True):
                    for work in works:
                        work.wait()
                    arrival.record()

    def room(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Where to write a shard for `start`, [numel].

        This is new memory, which the allocator reuses after the send. Where steps are recorded it is always the same
        memory: a graph owns its memory, and neither the allocator nor NCCL knows when a launch has waited for it. This
        call then waits for the last send from it.
        """
        if not self._arrivals:
            return torch.empty(numel, dtype=dtype, device=self.space.device)
        self.wait()
        if self._room is None:
            self._room = torch.empty(numel, dtype=dtype, device=self.space.device)
        return self._room

    def before_recording(self) -> None:
        """The next forward is recorded into a CUDA graph, which waits for what `start` sent before its launch."""
        self.wait()
        if not self._arrivals:
            self._arrivals = [torch.cuda.Event(external=True) for _ in self.space.buckets]
        for arrival in self._arrivals:
            arrival.record()  # everything sent so far has arrived
        self._unawaited = set(range(len(self._arrivals)))

    def wait_for(self, bucket: int) -> None:
        """Wait for one bucket; on CUDA the current stream waits, not the host."""
        if is_recording():
            if bucket in self._unawaited:
                self._unawaited.remove(bucket)
                torch.cuda.current_stream().wait_event(self._arrivals[bucket])
            return
        works = self._works[bucket]
        while works:
            works.pop().wait()

    def wait(self) -> None:
        """Wait for every bucket."""
        for index in range(len(self._works)):
            self.wait_for(index)
