"""A vector in another dtype, in Triton: `reference.cast_vector`. Unlike torch's cast it can be in a launch list."""

# The parameters of a Triton kernel have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import MOST_SHAPES, Launcher, PreparedLaunch
from ..memory import empty_vector
from ..sizes import cdiv

_BLOCK = 1024
_NUM_WARPS = 4


@triton.jit
def cast_part(vector, out, part, n, BLOCK: tl.constexpr):
    """BLOCK elements."""
    place = part * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(vector + place, mask=place < n).to(tl.float32)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=place < n)


@Launcher
@triton.jit
def _cast(vector, out, n, BLOCK: tl.constexpr):
    cast_part(vector, out, tl.program_id(0), n, BLOCK)


def cast_vector(vector: Tensor, dtype: torch.dtype) -> Tensor:
    """`reference.cast_vector` in one launch."""
    out = empty_vector(vector.numel(), dtype, vector.device)
    _launch(vector.numel())(vector.contiguous(), out)
    return out


@lru_cache(maxsize=MOST_SHAPES)
def _launch(n: int) -> PreparedLaunch:
    return _cast.prepared((cdiv(n, _BLOCK),), n, _BLOCK, num_warps=_NUM_WARPS, enable_fp_fusion=True)
