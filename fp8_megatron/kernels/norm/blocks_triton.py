"""LayerNorm and RMSNorm fused with their cast to FP8 with scales of blocks, in Triton.

Bytes per element of a 16-bit x, beside 4/128 for the scales: forward 3, from whole rows in registers, as in `triton`;
the transpose again 3.
"""

# The parameters of a Triton kernel have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...dtypes import GEMM_BLOCK, MAX_FINITE
from ..launch import MOST_SHAPES, PreparedLaunch
from ..quantize.blocks import block_scales_shape
from ..quantize.blocks_triton import cast_transposed
from ..quantize.triton import (
    encode,
    load_inside,
    magnitude_bits,
    no_values,
    scales_and_reciprocals,
)
from ..shapes import cdiv, empty, empty_vector
from .triton import STAGES, forward_shape, normalize, num_multiprocessors

#: Columns of a tile that a program casts again.
_PART = 32
_NUM_WARPS = 4


@triton.jit
def _norm_quantize_blocks(
    x, weight, bias, payload, scales, mean_out, rstd_out, T, K, eps,
    FP_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, RMS: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x [T, K] → payload [T, K], scales [K / BLOCK, T], mean_out (unless `RMS`) and rstd_out FP32 [T]. A program takes
    `ROWS` whole rows at a time, `WIDTH` ≥ K columns."""
    BLOCKS: tl.constexpr = WIDTH // BLOCK
    columns = tl.max_contiguous(tl.arange(0, WIDTH), 8)[None, :]
    lane = tl.arange(0, ROWS)
    offsets = lane[:, None] * K + columns
    w = load_inside(weight + columns, columns < K, EVEN)
    b = w
    if HAS_BIAS:
        b = load_inside(bias + columns, columns < K, EVEN)
    blocks = tl.arange(0, BLOCKS)[None, :]
    for start in tl.range(tl.program_id(0) * ROWS, T, tl.num_programs(0) * ROWS, num_stages=STAGES):
        base = tl.cast(start, tl.int64) * K
        rows = start + lane
        mask = None
        scales_mask = None
        if not EVEN:
            mask = (rows < T)[:, None] & (columns < K)
            scales_mask = (rows < T)[:, None] & (blocks < K // BLOCK)
        value = load_inside(x + base + offsets, mask, EVEN).to(tl.float32)
        y, mean, rstd = normalize(value, w, b, mask, K, eps, RMS, HAS_BIAS, EVEN)
        if not RMS:
            tl.store(mean_out + rows, mean, mask=rows < T)
        tl.store(rstd_out + rows, rstd, mask=rows < T)
        cut = tl.reshape(y, (ROWS, BLOCKS, BLOCK))
        scale, inverse = scales_and_reciprocals(tl.max(magnitude_bits(cut), axis=2), FP_MAX, POWER_OF_TWO)
        encoded = encode(cut, inverse[:, :, None], FP_MAX, payload.dtype.element_ty)
        tl.store(payload + base + offsets, tl.reshape(encoded, (ROWS, WIDTH)), mask=mask)
        tl.store(scales + blocks * tl.cast(T, tl.int64) + rows[:, None], scale, mask=scales_mask)


@triton.jit
def _values(
    x, weight, bias, mean, rstd, rows, columns, T, K, RMS: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """The norm of some columns of some rows from its statistics, FP32, by the operations of `normalize`."""
    inside = rows < T
    value = load_inside(x + rows.to(tl.int64) * K + columns, inside, EVEN).to(tl.float32)
    if not RMS:
        value -= load_inside(mean + rows, inside, EVEN)
    value = value * load_inside(rstd + rows, inside, EVEN) * tl.load(weight + columns).to(tl.float32)
    if HAS_BIAS:
        value += tl.load(bias + columns).to(tl.float32)
        if not EVEN:
            value = tl.where(inside, value, 0.0)
    return value


@triton.jit
def _norm_requantize_blocks(
    x, weight, bias, mean, rstd, payload_t, scales_t, T, K,
    FP_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, RMS: tl.constexpr, HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """PART columns of one block each, transposed."""
    parts = K // PART
    tile_m, k0 = tl.program_id(0) // parts, tl.program_id(0) % parts * PART
    rows = tile_m * BLOCK + 4 * tl.arange(0, BLOCK // 4)[:, None]  # T is a multiple of 4
    columns = k0 + tl.arange(0, PART)[None, :]
    v0 = _values(x, weight, bias, mean, rstd, rows, columns, T, K, RMS, HAS_BIAS, EVEN)
    v1 = _values(x, weight, bias, mean, rstd, rows + 1, columns, T, K, RMS, HAS_BIAS, EVEN)
    v2 = _values(x, weight, bias, mean, rstd, rows + 2, columns, T, K, RMS, HAS_BIAS, EVEN)
    v3 = _values(x, weight, bias, mean, rstd, rows + 3, columns, T, K, RMS, HAS_BIAS, EVEN)
    cast_transposed(v0, v1, v2, v3, payload_t, scales_t, T, K, tile_m, k0, FP_MAX, POWER_OF_TWO, EVEN, BLOCK, PART)


def norm_quantize_blocks(
    x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, eps: float, rms: bool, power_of_two: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`reference.norm_quantize_blocks` in one launch."""
    (T, K), device = x.shape, x.device
    payload, scales = empty(T, K, dtype, device), empty(*block_scales_shape(T, K), torch.float32, device)
    rstd = empty_vector(T, torch.float32, device)
    mean = no_values(torch.float32, device) if rms else torch.empty_like(rstd)
    launch = _launch(T, K, MAX_FINITE[dtype], eps, rms, bias is not None, power_of_two, device.index)
    launch(x.contiguous(), weight, weight if bias is None else bias, payload, scales, mean, rstd)
    return payload, scales, mean, rstd


@lru_cache(maxsize=MOST_SHAPES)
def _launch(
    T: int, K: int, fp_max: float, eps: float, rms: bool, has_bias: bool, power_of_two: bool, device: int
) -> PreparedLaunch:
    rows, width, is_even, programs, num_warps = forward_shape(T, K)
    return PreparedLaunch(
        _norm_quantize_blocks,
        (min(cdiv(T, rows), programs * num_multiprocessors(device)),),
        *(T, K, eps, fp_max, power_of_two, rms, has_bias, is_even, rows, width, STAGES, GEMM_BLOCK),
        num_warps=num_warps,
        enable_fp_fusion=True,
    )


def norm_requantize_blocks(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    dtype: torch.dtype,
    power_of_two: bool,
) -> tuple[Tensor, Tensor]:
    """`reference.norm_requantize_blocks` in one launch."""
    (T, K), device = x.shape, x.device
    payload_t, scales_t = empty(K, T, dtype, device), empty(*block_scales_shape(K, T), torch.float32, device)
    launch = _launch_again(T, K, MAX_FINITE[dtype], not mean.numel(), bias is not None, power_of_two)
    launch(x.contiguous(), weight, weight if bias is None else bias, mean, rstd, payload_t, scales_t)
    return payload_t, scales_t


@lru_cache(maxsize=MOST_SHAPES)
def _launch_again(T: int, K: int, fp_max: float, rms: bool, has_bias: bool, power_of_two: bool) -> PreparedLaunch:
    return PreparedLaunch(
        _norm_requantize_blocks,
        (cdiv(T, GEMM_BLOCK) * (K // _PART),),
        *(T, K, fp_max, power_of_two, rms, has_bias, T % GEMM_BLOCK == 0, GEMM_BLOCK, _PART),
        num_warps=_NUM_WARPS,
        enable_fp_fusion=True,
    )
