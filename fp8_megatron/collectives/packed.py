"""A tensor in FP8 as one run of bytes: its payload, and behind it the scale of each block of 128 elements.

A block's scale is a power of two, taken from the block's own amax. A block with an inf or a NaN decodes to NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod

import torch
from torch import Tensor

from ..dtypes import GRAD_BLOCK
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
    return packed_rows(x, x.numel(), dtype).view(-1)


def packed_rows(x: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """uint8 [x.numel() / numel, packed_bytes(numel)], each run of `numel` elements by itself.

    Args:
        x, dtype: as of `packed`.
    """
    runs = x.view(-1, numel)
    rows = torch.empty((len(runs), packed_bytes(numel)), dtype=torch.uint8, device=x.device)
    for row, run in zip(rows, runs, strict=True):
        payload, scales = _parts(row, numel, dtype)
        ops.quantize_blockwise_(run, payload, scales)
    return rows


def unpacked(run: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """BF16 of `shape` from `packed` of a tensor of that shape; each value is rounded once more, to BF16.

    Args:
        dtype: of the payload.
    """
    return unpacked_rows(run[None], shape, dtype)


def unpacked_rows(rows: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """BF16 [count · shape[0], *shape[1:]] from `packed_rows` of runs of `shape`; contiguous.

    Args:
        dtype: of the payload.
    """
    numel = prod(shape)
    values = torch.empty((len(rows), ceil(numel / GRAD_BLOCK) * GRAD_BLOCK), dtype=torch.bfloat16, device=rows.device)
    for row, run in zip(rows, values, strict=True):
        payload, scales = _parts(row, numel, dtype)
        ops.accumulate_rows_(payload, scales, run, factor=1.0, add=False)
    return values[:, :numel].reshape(len(rows) * shape[0], *shape[1:])


def _parts(run: Tensor, numel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    num_blocks = ceil(numel / GRAD_BLOCK)
    payload, scales = run.split([num_blocks * GRAD_BLOCK, num_blocks * 4])
    return payload.view(dtype), scales.view(torch.float32)
