"""All-gather of bytes: any dtype, on NCCL and on gloo (which refuses float8)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .traffic import count_all_gather


@dataclass
class AllGatherWork:
    """Handle of `all_gather_into` and `all_gather_fp8`; `wait` returns the gathered tensor."""

    output: Tensor
    work: torch.distributed.Work | None

    def wait(self) -> Tensor:
        """Wait for the bytes; on CUDA the current stream waits, not the host."""
        if self.work is not None:
            self.work.wait()
        return self.output


def all_gather_into(full: Tensor, shard: Tensor, group: torch.distributed.ProcessGroup) -> AllGatherWork:
    """Start to gather every rank's `shard` into `full`, in rank order, bit by bit: b·(d−1) bytes leave each rank.

    Called by every rank of `group` with shards of one size and dtype.

    Args:
        full: [d · n] elements, any shape, contiguous; the caller's, overwritten.
        shard: [n] elements of the same dtype, contiguous: a tensor of its own, or the view of this rank's part of
            `full` (no other part). Left alone until the handle was waited for.
    """
    assert full.dtype == shard.dtype and full.numel() == group.size() * shard.numel(), (full.shape, shard.shape)
    target, source = full.view(-1).view(torch.uint8), shard.view(-1).view(torch.uint8)
    if group.size() == 1:
        if target.data_ptr() != source.data_ptr():
            target.copy_(source)
        return AllGatherWork(full, None)
    count_all_gather(source.nbytes, group.size())
    work = torch.distributed.all_gather_into_tensor(target, source, group=group, async_op=True)
    return AllGatherWork(full, work)


def all_gather_fp8(payload: Tensor, group: torch.distributed.ProcessGroup) -> AllGatherWork:
    """Start an all-gather of FP8 payloads along the first dimension, into a new tensor.

    Called by every rank of `group` with a payload of one shape and one (shared) scale.

    Args:
        payload: FP8 [n, ...], contiguous.

    Returns:
        A handle whose `wait` gives [n · world, ...], in rank order.
    """
    output = payload.new_empty((payload.shape[0] * group.size(), *payload.shape[1:]))
    return all_gather_into(output, payload, group)
