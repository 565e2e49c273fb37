"""What FP8 gradients look like on the wire: each row's E4M3 payload, followed by its FP32 scales, as bytes.

One power-of-two scale serves 128 elements (1.03 bytes an element), so no rank has to know another's amax first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import E4M3, GRAD_BLOCK
from ..kernels import ops


def shard_size(numel: int, world_size: int) -> int:
    """Elements of one rank's shard: `numel` / `world_size` rounded up to whole blocks."""
    return -(-numel // (world_size * GRAD_BLOCK)) * GRAD_BLOCK


def pack(value: Tensor) -> Tensor:
    """FP32 [rows, n] → bytes [rows, n + 4·n/128]; n is a multiple of 128. A block with a NaN or inf decodes to NaN."""
    rows, n = value.shape
    payload = torch.empty(rows * n, dtype=E4M3, device=value.device)
    scales = torch.empty(rows * n // GRAD_BLOCK, dtype=torch.float32, device=value.device)
    ops.quantize_blockwise_(value.reshape(-1), payload, scales)
    return torch.cat([payload.view(torch.uint8).view(rows, n), scales.view(torch.uint8).view(rows, -1)], dim=1)


def unpack(wire: Tensor, n: int) -> Tensor:
    """The inverse of `pack`, decoded to FP32 [rows, n]."""
    payload = wire[:, :n].contiguous().view(E4M3).view(-1)
    scales = wire[:, n:].contiguous().view(torch.float32).view(-1)
    return ops.dequantize_blockwise(payload, scales).view(wire.shape[0], n)


def mean_of_packed(wire: Tensor, n: int) -> Tensor:
    """Bytes [ranks, n + 4·n/128], one rank's version a row → their mean, summed in FP32, [n]."""
    return unpack(wire, n).sum(dim=0) / wire.shape[0]
