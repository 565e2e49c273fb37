"""The FP8 all-reduce of gradients: E4M3 on the wire, FP32 in the sum.

reduce-scatter: every rank quantises its gradient block by block (one FP32 power-of-two scale per 128 elements, sent
beside the payload), an all-to-all of bytes brings each rank all versions of its shard, and the sum is taken in FP32:
a partial sum is never rounded to FP8, so the signal-to-noise ratio grows with the number of ranks where a ring that
adds in FP8 loses it hop by hop. all-gather: the mean is quantised once more and gathered the same way. No amax
collective, no NCCL fork; the same code runs on gloo.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import E4M3, GRAD_BLOCK
from ..kernels import ops


def _pack(value: Tensor) -> Tensor:
    """FP32 [rows, n] → bytes [rows, n + 4·n/128]: each row's E4M3 payload followed by its FP32 scales."""
    rows, n = value.shape
    payload = torch.empty(rows * n, dtype=E4M3, device=value.device)
    scales = torch.empty(rows * n // GRAD_BLOCK, dtype=torch.float32, device=value.device)
    ops.quantize_blockwise_(value.reshape(-1), payload, scales)
    return torch.cat([payload.view(torch.uint8).view(rows, n), scales.view(torch.uint8).view(rows, -1)], dim=1)


def _unpack(wire: Tensor, n: int) -> Tensor:
    """The inverse of `_pack`, decoded to FP32 [rows, n]."""
    payload = wire[:, :n].contiguous().view(E4M3).view(-1)
    scales = wire[:, n:].contiguous().view(torch.float32).view(-1)
    return ops.dequantize_blockwise(payload, scales).view(wire.shape[0], n)


def all_reduce_mean_fp8(value: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
    """Mean of `value` over `group` with E4M3 on the wire: 2 · (d−1)/d bytes an element and 6% for scales.

    Called by every rank of `group` with a tensor of one size. A NaN or inf in any rank's block makes that block of the
    result NaN on every rank.

    Args:
        value: flat, any float dtype, [n].

    Returns:
        FP32 [n]; bitwise equal on every rank.
    """
    world = group.size()
    if world == 1:
        return value.float()
    n = value.numel()
    shard = -(-n // (world * GRAD_BLOCK)) * GRAD_BLOCK
    padded = torch.zeros(world * shard, dtype=torch.float32, device=value.device)
    padded[:n] = value
    sent = _pack(padded.view(world, shard))
    received = torch.empty_like(sent)
    torch.distributed.all_to_all_single(received, sent, group=group)
    mean = _unpack(received, shard).sum(dim=0) / world
    sent = _pack(mean.view(1, shard))
    received = sent.new_empty((world, sent.shape[1]))
    torch.distributed.all_gather_into_tensor(received, sent, group=group)
    return _unpack(received, shard).view(-1)[:n]
