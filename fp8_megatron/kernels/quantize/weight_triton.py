"""A block-scaled weight cast to FP8 in Triton: `weight.quantize_weight`.

One launch reads two bytes an element and writes one. Decoding to FP32 first would move 13 bytes in two launches. Values
are decoded and encoded by the same FP32 operations as there, so the bits are the same.
"""

# The parameters of a Triton kernel have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...dtypes import MAX_FINITE
from ..launch import MOST_SHAPES, Launcher, PreparedLaunch
from ..memory import empty
from ..sizes import cdiv
from .blockwise_triton import block_of_sizes
from .triton import encode, reciprocal, store_transposed

_TILE = 8192
_TILE_N = 128
_TILE_K = 128
_NUM_WARPS = 8


@Launcher
@triton.jit
def _cast_rows(
    weight, scales, scale, payload, num_blocks,
    FP_MAX: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """ROWS blocks of BLOCK elements a program."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    rows = tl.arange(0, ROWS)[:, None]
    offsets = first * BLOCK + rows * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = None
    if not EVEN:
        mask = first + rows < num_blocks
    value = tl.load(weight + offsets, mask=mask).to(tl.float32) * tl.load(scales + first + rows, mask=mask)
    inverse = reciprocal(tl.load(scale))
    tl.store(payload + offsets, encode(value, inverse, FP_MAX, payload.dtype.element_ty), mask=mask)


@triton.jit
def _decoded_row(weight, scales, row, columns, k0, N, K, BLOCK: tl.constexpr, ROW_IN_BLOCK: tl.constexpr):
    """Row `row` [TILE_N / 4, 1] of every four rows of a tile, FP32; what lies outside is 0."""
    offsets = row.to(tl.int64) * K + columns
    mask = (row < N) & (columns < K)
    value = tl.load(weight + offsets, mask=mask, other=0.0).to(tl.float32)
    if ROW_IN_BLOCK:  # one scale for the tile's part of a row
        own = tl.load(scales + (row.to(tl.int64) * K + k0) // BLOCK, mask=row < N, other=1.0)
    else:
        own = tl.load(scales + offsets // BLOCK, mask=mask, other=1.0)
    return value * own


@Launcher
@triton.jit
def _cast_transposed(
    weight, scales, scale, payload_t, N, K,
    FP_MAX: tl.constexpr, BLOCK: tl.constexpr, ROW_IN_BLOCK: tl.constexpr,
    TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    tiles_k = tl.cdiv(K, TILE_K)
    n0 = tl.program_id(0) // tiles_k * TILE_N
    k0 = tl.program_id(0) % tiles_k * TILE_K
    rows = n0 + 4 * tl.arange(0, TILE_N // 4)[:, None]
    columns = k0 + tl.arange(0, TILE_K)[None, :]
    inverse = reciprocal(tl.load(scale))
    dtype: tl.constexpr = payload_t.dtype.element_ty
    q0 = encode(_decoded_row(weight, scales, rows, columns, k0, N, K, BLOCK, ROW_IN_BLOCK), inverse, FP_MAX, dtype)
    q1 = encode(_decoded_row(weight, scales, rows + 1, columns, k0, N, K, BLOCK, ROW_IN_BLOCK), inverse, FP_MAX, dtype)
    q2 = encode(_decoded_row(weight, scales, rows + 2, columns, k0, N, K, BLOCK, ROW_IN_BLOCK), inverse, FP_MAX, dtype)
    q3 = encode(_decoded_row(weight, scales, rows + 3, columns, k0, N, K, BLOCK, ROW_IN_BLOCK), inverse, FP_MAX, dtype)
    store_transposed(q0, q1, q2, q3, payload_t, n0, k0, N, K, TILE_N, TILE_K)


def quantize_weight(weight: Tensor, scales: Tensor, scale: Tensor, dtype: torch.dtype, transposed: bool) -> Tensor:
    """`weight.quantize_weight` in one launch.

    Raises:
        ValueError: `transposed` with N not a multiple of 4, or see `blockwise_triton.block_of_sizes`.
    """
    N, K = weight.shape
    launch = _weight_launch(N, K, scales.numel(), dtype, transposed)
    rows, columns = (K, N) if transposed else (N, K)
    payload = empty(rows, columns, dtype, weight.device)
    launch(weight, scales, scale, payload)
    return payload


@lru_cache(maxsize=MOST_SHAPES)
def _weight_launch(N: int, K: int, num_blocks: int, dtype: torch.dtype, transposed: bool) -> PreparedLaunch:
    block = block_of_sizes(N * K, num_blocks)
    if not transposed:
        rows = _TILE // block
        return _cast_rows.prepared(
            (cdiv(num_blocks, rows),),
            *(num_blocks, MAX_FINITE[dtype], rows, block, num_blocks % rows == 0),
            num_warps=_NUM_WARPS,
            enable_fp_fusion=True,
        )
    if N % 4:
        raise ValueError(f"a transposed FP8 payload needs M={N} to be a multiple of 4 (the FP8 GEMM: of 16)")
    row_in_block = K % _TILE_K == 0 and block % _TILE_K == 0  # then a tile's rows start on multiples of its width
    return _cast_transposed.prepared(
        (cdiv(N, _TILE_N) * cdiv(K, _TILE_K),),
        *(N, K, MAX_FINITE[dtype], block, row_in_block, _TILE_N, _TILE_K),
        num_warps=_NUM_WARPS,
        enable_fp_fusion=True,
    )
