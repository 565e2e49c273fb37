"""Counts values that a cast made zero, in Triton: `reference.count_underflow_` in one launch.

The counts are integers, so they are exact in any order of addition.
"""

# The parameters of a Triton kernel have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..sizes import cdiv
from .reference import SAMPLE_BLOCK, sampling

_BLOCKS = 64
_NUM_WARPS = 8


@triton.jit
def _count_underflow(
    value, payload, counts, n, num_blocks, DISTANCE: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr
):
    index = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    offsets = index.to(tl.int64) * (DISTANCE * BLOCK) + tl.arange(0, BLOCK)[None, :]
    mask = (index < num_blocks) & (offsets < n)
    nonzero = tl.load(value + offsets, mask=mask, other=0.0) != 0
    is_zero = (tl.load(payload + offsets, mask=mask, other=0) & 0x7F) == 0
    tl.atomic_add(counts, tl.sum(tl.sum(nonzero.to(tl.int32), 1), 0).to(tl.int64))
    tl.atomic_add(counts + 1, tl.sum(tl.sum((nonzero & is_zero).to(tl.int32), 1), 0).to(tl.int64))


def count_underflow_(value: Tensor, payload: Tensor, counts: Tensor, is_sample: bool) -> None:
    """`reference.count_underflow_`."""
    assert value.is_contiguous() and payload.is_contiguous()
    num_blocks, distance = sampling(value.numel(), is_sample)
    _count_underflow[(cdiv(num_blocks, _BLOCKS),)](
        value,
        payload.view(torch.uint8),
        counts,
        value.numel(),
        num_blocks,
        distance,
        _BLOCKS,
        SAMPLE_BLOCK,
        num_warps=_NUM_WARPS,
        enable_fp_fusion=True,
    )
