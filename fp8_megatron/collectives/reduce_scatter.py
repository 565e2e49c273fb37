"""The FP8 reduce-scatter of gradients: E4M3 on the wire, FP32 in the sum.

Every rank quantises its gradient block by block; an all-to-all of bytes brings each rank all versions of its shard; the
sum is taken in FP32. A partial sum is never rounded to FP8, so the signal-to-noise ratio grows with the number of ranks
where a ring that adds in FP8 loses it hop by hop. No amax collective, no NCCL fork; the same code runs on gloo.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .wire import mean_of_packed, pack, shard_size


@dataclass
class ReduceScatterWork:
    """Handle of `reduce_scatter_mean_fp8`; `wait` returns this rank's shard of the mean."""

    received: Tensor
    shard: int
    work: torch.distributed.Work | None

    def wait(self) -> Tensor:
        """Wait for the bytes (on CUDA the current stream waits, not the host) and sum: FP32 [shard]."""
        if self.work is not None:
            self.work.wait()
        return mean_of_packed(self.received, self.shard)


def reduce_scatter_mean_fp8(value: Tensor, group: torch.distributed.ProcessGroup) -> ReduceScatterWork:
    """Start the mean of `value` over `group` with E4M3 on the wire: (d−1)/d bytes an element and 3% for scales.

    Called by every rank of `group` with a tensor of one size. A NaN or inf in any rank's block of 128 makes that block
    of the result NaN.

    Args:
        value: flat, any float dtype, [n]; it may be overwritten once this returns.

    Returns:
        A handle whose `wait` gives this rank's elements [rank · shard, (rank + 1) · shard) of the mean, FP32; shard is
        `wire.shard_size(n, d)` and elements beyond n are zero.
    """
    world = group.size()
    n = value.numel()
    shard = shard_size(n, world)
    padded = torch.zeros(world * shard, dtype=torch.float32, device=value.device)
    padded[:n] = value
    sent = pack(padded.view(world, shard))
    received = torch.empty_like(sent)
    work = torch.distributed.all_to_all_single(received, sent, group=group, async_op=True)
    return ReduceScatterWork(received, shard, work)
