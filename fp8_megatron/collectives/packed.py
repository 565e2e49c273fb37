"""A tensor in FP8 as one run of bytes: its payload, and behind it the scale of each block of 128 elements.

A block's scale is a power of two, taken from the block's own amax. A block with an inf or a NaN decodes to NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod

import torch
from torch import Tensor

from ..formats import GRAD_BLOCK
from ..kernels import ops


def packed_bytes(numel: int) -> int:
    """Bytes of `packed` of `numel` elements."""
    num_blocks = ceil(numel / GRAD_BLOCK)
    return num_blocks * (GRAD_BLOCK + 4)


def packed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 [packed_bytes(x.numel())], one pass over `x`.

    Args:
        x: BF16 or FP32, contiguous.
        dtype: of the payload, an FP8 format.
    """
    run = torch.empty(packed_bytes(x.numel()), dtype=torch.uint8, device=x.device)
    payload, scales = _parts(run, x.numel(), dtype)
    ops.quantize_blockwise_(x.view(-1), payload, scales)
    return run


def unpacked(run: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """BF16 of `shape` from `packed` of a tensor of that shape; each value is rounded once more, to BF16.

    Args:
        dtype: of the payload.
    """
    numel = prod(shape)
    payload, scales = _parts(run, numel, dtype)
    values = torch.empty(payload.numel(), dtype=torch.bfloat16, device=run.device)
    ops.accumulate_rows_(payload, scales, values, factor=1.0, add=False)
    return values[:numel].view(*shape)


def _parts(run: Tensor, numel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    num_blocks = ceil(numel / GRAD_BLOCK)
    payload, scales = run.split([num_blocks * GRAD_BLOCK, num_blocks * 4])
    return payload.view(dtype), scales.view(torch.float32)
