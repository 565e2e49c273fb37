"""The reduce-scatter that sums in FP8, as FP8-LM does (arXiv 2310.18313, section 2.1), for comparison.

It takes one scale a tensor over all ranks, auto-scaling, and NCCL's own FP8 sum. Each partial sum is rounded to E4M3.

The paper takes the smallest of the ranks' multiplying scales, s' = min(s'₁ … s'_N), requantises and sums. The sum's
scale N·s' makes it the mean. Our scales dequantise, so the shared one is the largest. The sum of N payloads may exceed
448; the paper leaves that to μ. An overflow saturates (NCCL ≥ 2.24 adds two payloads in FP16 and converts with
saturation). It is counted on the sum as well as on what was sent, and halves μ until N equal gradients fit, at
μ ≈ 1/N. That makes a few wrong steps at the start, unless `AutoScale` starts there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..device.group import Group, max_over_group_
from ..dtypes import E4M3, GRAD_BLOCK, MAX_FINITE, StorageDtype
from ..kernels import ops
from .autoscale import AutoScale
from .reduce_scatter import ReduceScatterWork, check_buffers
from .transport.stream_ops import side_stream
from .wire import WireTensor

MIN_NCCL = (2, 24)


def check_native_sum(group: Group) -> None:
    """Whether `group` can sum FP8 on the wire; with gloo it is emulated.

    Raises:
        ValueError: an NCCL before 2.24.
    """
    if torch.distributed.get_backend(group) == "nccl" and (version := torch.cuda.nccl.version())[:2] < MIN_NCCL:
        raise ValueError(
            f"NCCL {'.'.join(map(str, version))} has no FP8 sum: mode nccl needs {MIN_NCCL[0]}.{MIN_NCCL[1]} or newer; "
            "all_to_all needs none"
        )


def native_reduce_scatter_mean(
    sent: WireTensor, received: WireTensor, group: Group, autoscale: AutoScale
) -> ReduceScatterWork:
    """Start the mean of `sent` over `group` with a sum in FP8: 1 byte an element, and 8 bytes a tensor for the scales.

    Called by every rank of `group` with tensors of one size, one reduction of `autoscale` at a time. On CUDA it runs on
    a side stream. On gloo, which has no FP8, the sum is an **emulation**: the bytes travel as in an all-to-all and
    `ring_sum` adds them as a ring would. A NaN or inf in any rank's block of 128 makes that block of the result NaN.

    Args:
        sent: E4M3 [n], n = d · shard, shard a multiple of 128; **overwritten**.
        received: E4M3 [n]; overwritten.
        autoscale: of the tensors in `sent`.

    Returns:
        A handle whose `wait` gives this rank's elements [rank · shard, (rank + 1) · shard) of the mean.
    """
    assert sent.dtype is StorageDtype.FP8 and sent.scales is not None, sent.dtype
    num_ranks = group.size()
    shard = check_buffers(sent, received, num_ranks)
    device = sent.payload.device
    own = slice(group.rank() * shard // GRAD_BLOCK, (group.rank() + 1) * shard // GRAD_BLOCK)
    codes, arrived = received.payload, sent.payload
    works = []
    with side_stream(device):
        shared = autoscale.measure(sent.payload, sent.scales)
        max_over_group_(shared, group)
        autoscale.update(shared)
        autoscale.requantize_(sent.payload, sent.scales, codes)
        if num_ranks > 1:
            works.append(_start_sum(codes, arrived, shard, group))

    def finish(accumulator: Tensor, add: bool) -> None:
        if num_ranks == 1:
            total = codes
        elif device.type == "cuda":
            total = arrived[:shard]
        else:
            total = ring_sum(arrived.view(num_ranks, shard), first=(group.rank() + 1) % num_ranks)
        autoscale.note_sum(total, own.start)
        mean = mean_of_sum(total, autoscale.block_scales[own], num_ranks)
        if add:
            accumulator.add_(mean)
        else:
            accumulator.copy_(mean)

    return ReduceScatterWork(shard, device, works, finish)


def _start_sum(codes: Tensor, arrived: Tensor, shard: int, group: Group) -> torch.distributed.Work:
    if codes.device.type == "cuda":
        work = torch.distributed.reduce_scatter_tensor(arrived[:shard], codes, group=group, async_op=True)
    else:
        work = torch.distributed.all_to_all_single(
            arrived.view(torch.uint8), codes.view(torch.uint8), group=group, async_op=True
        )
    assert work is not None
    return work


def ring_sum(rows: Tensor, first: int) -> Tensor:
    """Emulates the sum that a ring leaves on one rank: hop by hop, each partial sum rounded to E4M3 and saturated.

    NCCL's kernel adds in FP16 before it rounds, which for two E4M3 numbers gives the same.

    Args:
        rows: E4M3 [d, n], each rank's version at one scale.
        first: the rank where the ring starts: the one after the owner, which adds last.

    Returns:
        E4M3 [n].
    """
    num_ranks = rows.shape[0]
    total = rows[first]
    limit = MAX_FINITE[E4M3]
    for hop in range(1, num_ranks):
        partial = ops.decode(total) + ops.decode(rows[(first + hop) % num_ranks])
        total = partial.clamp_(-limit, limit).to(E4M3)
    return total


def mean_of_sum(total: Tensor, block_scales: Tensor, num_ranks: int) -> Tensor:
    """The sum's payload (E4M3 [n]) and its scales (FP32 [n / 128]) → the mean of `num_ranks`, FP32 [n]."""
    return ops.dequantize_blockwise(total, block_scales * (1.0 / num_ranks))
