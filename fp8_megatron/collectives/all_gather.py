"""All-gather of bytes: any dtype, on NCCL, by copy engines, and on gloo (which refuses float8)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..device.group import Group
from .transport import copy_engine


@dataclass
class AllGatherWork:
    """Handle of an all-gather in flight; `wait` returns the gathered tensor."""

    output: Tensor
    work: torch.distributed.Work | copy_engine.CopyWork | None

    def wait(self) -> Tensor:
        """Wait for the bytes; on CUDA the current stream waits, not the host."""
        if self.work is not None:
            self.work.wait()
        return self.output


def all_gather_into(full: Tensor, shard: Tensor, group: Group) -> AllGatherWork:
    """Start to gather every rank's `shard` into `full`, in rank order and bit for bit: b·(d−1) bytes leave each rank.

    Called by every rank of `group` with shards of one size and dtype.

    Args:
        full: [d · n] elements, any shape, contiguous; the caller owns it; overwritten.
        shard: [n] elements of the same dtype, contiguous: a separate tensor, or a view of this rank's own part of
            `full`. The caller must not change it before waiting for the handle.
    """
    return all_gather_each([(full, shard)], group)[0]


def all_gather_each(pairs: Sequence[tuple[Tensor, Tensor]], group: Group) -> list[AllGatherWork]:
    """Start `all_gather_into` for every (full, shard), in order. Every handle must be waited for, in any order.

    Where every `full` lies in memory that the ranks share (`copy_engine.allocate`), copy engines move the bytes.
    """
    for full, shard in pairs:
        assert full.dtype == shard.dtype and full.numel() == group.size() * shard.numel(), (full.shape, shard.shape)
    as_bytes = [tuple(tensor.view(-1).view(torch.uint8) for tensor in pair) for pair in pairs]
    if group.size() == 1:
        for target, source in as_bytes:
            if target.data_ptr() != source.data_ptr():
                target.copy_(source)
        return [AllGatherWork(full, None) for full, _ in pairs]
    memories = [copy_engine.memory_of(target, group) for target, _ in as_bytes]
    shared = [
        (memory, target, source)
        for memory, (target, source) in zip(memories, as_bytes, strict=True)
        if memory is not None
    ]
    works: Sequence[torch.distributed.Work | copy_engine.CopyWork | None]
    if len(shared) == len(pairs):
        works = copy_engine.start_all_gathers(shared)
    else:
        works = [
            torch.distributed.all_gather_into_tensor(target, source, group=group, async_op=True)
            for target, source in as_bytes
        ]
    return [AllGatherWork(full, work) for (full, _), work in zip(pairs, works, strict=True)]
