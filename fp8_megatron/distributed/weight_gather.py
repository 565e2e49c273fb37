"""Weights on their way from the ranks that updated them to the forward passes that need them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..collectives.all_gather import AllGatherWork, all_gather_each
from .partition import ParamSpace


class WeightGather:
    """All-gather of one space's weights, bucket by bucket, overlapped with the next forward.

    `start` sends every bucket in the order in which forward needs them; a module waits for its own buckets alone
    (`FP8DataParallel` sees to it).

    Args:
        storages: flat weight storage over the space, each with the number of elements that one value stands for: the
            payload (1), and scales where they are block-wise.
    """

    def __init__(
        self, space: ParamSpace, storages: list[tuple[Tensor, int]], group: torch.distributed.ProcessGroup
    ) -> None:
        self.space = space
        self._storages = storages
        self._group = group
        self._works: list[list[AllGatherWork]] = [[] for _ in space.buckets]

    def start(self, shards: list[Tensor]) -> None:
        """Send this rank's shard of each storage, [space.shard_numel / elements of a value]."""
        self.wait()
        pairs = [
            (bucket.of_space(storage, block), bucket.of_shard(shard, block))
            for bucket in self.space.buckets
            for (storage, block), shard in zip(self._storages, shards, strict=True)
        ]
        for index, work in enumerate(all_gather_each(pairs, self._group)):
            self._works[index // len(shards)].append(work)

    def wait_for(self, bucket: int) -> None:
        """Wait for one bucket; on CUDA the current stream waits, not the host."""
        works = self._works[bucket]
        while works:
            works.pop().wait()

    def wait(self) -> None:
        """Wait for every bucket."""
        for index in range(len(self._works)):
            self.wait_for(index)
