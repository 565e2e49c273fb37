"""`mx.quantize_mx` in Triton, bitwise equal to the specification.

A program reads a tile once and casts it in both layouts: their blocks of 32 lie inside of it, along its rows and along
its columns.
"""

# The parameters of a Triton kernel have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...dtypes import MAX_FINITE, MX_BLOCK
from ..launch import MOST_SHAPES, PreparedLaunch
from ..shapes import cdiv
from .mx import E8M0, E8M0_NAN
from .triton import encode, load_inside, magnitude_bits, no_values

_TILE_M = 64
_TILE_K = 64
_NUM_WARPS = 4
_INF_BITS = tl.constexpr(0x7F800000)
_NAN = tl.constexpr(E8M0_NAN)


@triton.jit
def _exponents(bits, FP_MAX: tl.constexpr):
    """`mx.mx_exponents` of amaxes given as `magnitude_bits`, int32."""
    largest = tl.full([1], FP_MAX, tl.float32).to(tl.int32, bitcast=True)
    above = ((bits & 0x7FFFFF) > (largest & 0x7FFFFF)).to(tl.int32)
    exponents = tl.maximum((bits >> 23) - ((largest >> 23) - 127) + above, 0)
    return tl.where(bits < _INF_BITS, exponents, _NAN)


@triton.jit
def _inverse(exponents):
    """The reciprocal of a scale; 1 of byte 0, and NaN of NaN."""
    bits = tl.where(exponents == 0, 127 << 23, (254 - exponents) << 23)
    return tl.where(exponents == _NAN, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _cast_mx(
    x, payload, scales, payload_t, scales_t, M, K,
    FP_MAX: tl.constexpr, ROWWISE: tl.constexpr, TRANSPOSED: tl.constexpr, EVEN: tl.constexpr,
    TILE_M: tl.constexpr, TILE_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile of x [M, K]. Scales are bytes."""
    tiles_k = tl.cdiv(K, TILE_K)
    m0, k0 = tl.program_id(0) // tiles_k * TILE_M, tl.program_id(0) % tiles_k * TILE_K
    rows, columns = m0 + tl.arange(0, TILE_M), k0 + tl.arange(0, TILE_K)
    mask = (rows < M)[:, None] & (columns < K)[None, :]
    value = load_inside(x + rows.to(tl.int64)[:, None] * K + columns[None, :], mask, EVEN)
    if ROWWISE:
        blocks = tl.reshape(value, [TILE_M, TILE_K // BLOCK, BLOCK])
        exponents = _exponents(tl.max(magnitude_bits(blocks), axis=2), FP_MAX)
        cast = encode(blocks, _inverse(exponents)[:, :, None], FP_MAX, payload.dtype.element_ty)
        cast = tl.reshape(cast, [TILE_M, TILE_K])
        tl.store(payload + rows.to(tl.int64)[:, None] * K + columns[None, :], cast, mask=mask)
        of_blocks = k0 // BLOCK + tl.arange(0, TILE_K // BLOCK)
        inside = (rows < M)[:, None] & (of_blocks < K // BLOCK)[None, :]
        at = scales + rows.to(tl.int64)[:, None] * (K // BLOCK) + of_blocks[None, :]
        tl.store(at, exponents.to(tl.uint8), mask=inside)
    if TRANSPOSED:
        blocks_t = tl.reshape(tl.trans(value), [TILE_K, TILE_M // BLOCK, BLOCK])
        exponents_t = _exponents(tl.max(magnitude_bits(blocks_t), axis=2), FP_MAX)
        cast_t = encode(blocks_t, _inverse(exponents_t)[:, :, None], FP_MAX, payload_t.dtype.element_ty)
        cast_t = tl.reshape(cast_t, [TILE_K, TILE_M])
        mask_t = (columns < K)[:, None] & (rows < M)[None, :]
        tl.store(payload_t + columns.to(tl.int64)[:, None] * M + rows[None, :], cast_t, mask=mask_t)
        of_blocks_t = m0 // BLOCK + tl.arange(0, TILE_M // BLOCK)
        inside_t = (columns < K)[:, None] & (of_blocks_t < M // BLOCK)[None, :]
        at_t = scales_t + columns.to(tl.int64)[:, None] * (M // BLOCK) + of_blocks_t[None, :]
        tl.store(at_t, exponents_t.to(tl.uint8), mask=inside_t)


def quantize_mx(
    x: Tensor, dtype: torch.dtype, rowwise: bool, transposed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`mx.quantize_mx`, one launch."""
    x = x.contiguous()
    (M, K), device = x.shape, x.device
    payload = payload_t = no_values(dtype, device)
    scales = scales_t = no_values(torch.uint8, device)
    if rowwise:
        payload = torch.empty((M, K), dtype=dtype, device=device)
        scales = torch.empty((M, K // MX_BLOCK), dtype=torch.uint8, device=device)
    if transposed:
        payload_t = torch.empty((K, M), dtype=dtype, device=device)
        scales_t = torch.empty((K, M // MX_BLOCK), dtype=torch.uint8, device=device)
    launch = _launch_of(M, K, MAX_FINITE[dtype], rowwise, transposed)
    launch(x, payload, scales, payload_t, scales_t)
    return payload, scales.view(E8M0), payload_t, scales_t.view(E8M0)


@lru_cache(MOST_SHAPES)
def _launch_of(M: int, K: int, fp_max: float, rowwise: bool, transposed: bool) -> PreparedLaunch:
    return PreparedLaunch(
        _cast_mx,
        (cdiv(M, _TILE_M) * cdiv(K, _TILE_K),),
        *(M, K, fp_max, rowwise, transposed, M % _TILE_M == 0 and K % _TILE_K == 0, _TILE_M, _TILE_K, MX_BLOCK),
        num_warps=_NUM_WARPS,
        enable_fp_fusion=True,
    )
