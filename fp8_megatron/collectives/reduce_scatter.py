"""The reduce-scatter of gradients: a low-precision wire, FP32 in the sum.

Every rank rounds its gradient once, block by block. An all-to-all of bytes brings each rank all versions of its shard,
and the sum is taken in FP32. A partial sum is never rounded to FP8, so the signal-to-noise ratio does not fall with the
number of ranks; in a ring that adds in FP8 it falls with every hop. There is no amax collective and no NCCL fork, and
the same code runs on gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..device.group import Group
from ..dtypes import GRAD_BLOCK
from .transport import copy_engine
from .wire import OwnRow, WireTensor, accumulate_rows_

CollectiveWork = torch.distributed.Work | copy_engine.CopyWork


@dataclass(frozen=True, eq=False)
class ReduceScatterWork:
    """Handle of a reduce-scatter in flight: wait once, on every rank in the order of the starts.

    Attributes:
        shard: elements this rank gets.
        device: where they are.
        pending: the work that the current stream (on a CPU: the host) waits for.
        finish: called after that with (accumulator FP32 or BF16 [shard], add); writes or adds the mean.
    """

    shard: int
    device: torch.device
    pending: Sequence[CollectiveWork]
    finish: Callable[[Tensor, bool], None]

    def wait(self) -> Tensor:
        """Wait (on CUDA the current stream does, not the host): returns this rank's shard of the mean, a new FP32
        [shard].
        """
        mean = torch.empty(self.shard, dtype=torch.float32, device=self.device)
        self.wait_into(mean, add=False)
        return mean

    def wait_into(self, accumulator: Tensor, *, add: bool) -> None:
        """Wait as `wait` does, and write or add the mean to `accumulator` (FP32 or BF16 [shard]). The buffers are then
        free.

        Deterministic: the same bytes give the same bits.
        """
        for work in self.pending:
            work.wait()
        self.finish(accumulator, add)


def start_all_to_all(
    sent: WireTensor,
    received: WireTensor,
    group: Group,
    *,
    copies_own: bool = True,
) -> list[CollectiveWork]:
    """Start to send row r of `sent` to rank r and to receive row r of `received` from it: payload, then scales.

    Where `sent` lies in memory that the ranks share (`copy_engine.allocate`), copy engines move the bytes.

    Args:
        sent, received: [d · n] of one dtype, different memory.
        copies_own: False leaves this rank's own row of `received` undefined.
    """
    pairs = list(zip(sent.byte_views(), received.byte_views(), strict=True))
    memory = copy_engine.memory_of(sent.payload, group)
    if memory is not None:
        return [copy_engine.start_all_to_all(memory, pairs, copies_own=copies_own)]
    return [
        torch.distributed.all_to_all_single(destination, source, group=group, async_op=True)
        for source, destination in pairs
    ]


def check_buffers(sent: WireTensor, received: WireTensor, num_ranks: int) -> int:
    """Elements of a shard; both buffers hold `num_ranks` of them, each a whole number of blocks."""
    assert sent.payload.dtype == received.payload.dtype and sent.numel == received.numel, (sent, received)
    assert sent.numel % (num_ranks * GRAD_BLOCK) == 0, (
        f"{sent.numel} elements over {num_ranks} ranks are no shards of whole blocks of {GRAD_BLOCK}"
    )
    return sent.numel // num_ranks


def reduce_scatter_mean(sent: WireTensor, received: WireTensor, group: Group) -> ReduceScatterWork:
    """Start the mean of `sent` over `group`: (d−1)/d of the tensor's bytes leave each rank, 1.03 bytes an element in
    E4M3.

    Called by every rank of `group` with tensors of one size and dtype. The sum is FP32, in rank order. In E4M3 a NaN or
    inf in any rank's block of 128 makes that block of the result NaN; in BF16 and FP32 it concerns its element only.

    Args:
        sent: [n], n = d · shard, shard a multiple of 128; the caller must not change it before waiting for the handle.
        received: [n] of the same dtype; overwritten. The caller owns it, so nothing is allocated here.

    Returns:
        A handle whose `wait` gives this rank's elements [rank · shard, (rank + 1) · shard) of the mean.
    """
    num_ranks = group.size()
    shard = check_buffers(sent, received, num_ranks)
    alone = num_ranks == 1
    works = [] if alone else start_all_to_all(sent, received, group, copies_own=False)
    rows = sent if alone else received
    rank = group.rank()
    own = OwnRow(rank, sent.slice(rank * shard, (rank + 1) * shard))

    def finish(accumulator: Tensor, add: bool) -> None:
        accumulate_rows_(rows, num_ranks, accumulator, factor=1.0 / num_ranks, add=add, own=own)

    return ReduceScatterWork(shard, sent.payload.device, works, finish)
