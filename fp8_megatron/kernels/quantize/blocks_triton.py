"""Operands of the block-scaled GEMM in Triton: `blocks.quantize_blocks`, `quantize_tiles` and `transpose_tiles`.

Bitwise equal to the specification, as in `triton`. The two layouts of blocks have different scales and share only the
input. A program casts some rows of a 128×128 tile for one layout, or some of its columns for the other. The programs of
a tile are neighbours: one reads the input from memory, the other finds it in L2. The two layouts of a weight's tile
have the same bytes, and one program writes both.

A program holds its rows 4i, 4i+1, 4i+2 and 4i+3 in separate tensors, as `triton.store_transposed` needs them.
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
from ..shapes import cdiv
from .blocks import block_scales_shape, tile_scales_shape
from .triton import (
    encode,
    larger_magnitude,
    load_inside,
    magnitude_bits,
    no_values,
    reciprocal,
    scale_from_amax_bits,
    scales_and_reciprocals,
    store_transposed,
    sum_of_programs,
)

#: Rows, or columns, of a tile that a program casts. Few, so that several programs fit on a multiprocessor.
_PART = 32
_BLOCKS_NUM_WARPS = 2
_TILES_NUM_WARPS = 8


@triton.jit
def _store_inside(pointers, value, mask, EVEN: tl.constexpr):
    """Store the elements that lie inside. With `EVEN` all of them do, and no mask is needed."""
    if EVEN:
        tl.store(pointers, value)
    else:
        tl.store(pointers, value, mask=mask)


@triton.jit
def _interleaved(v0, v1, v2, v3, LENGTH: tl.constexpr):
    """Four vectors of the rows 4i, 4i+1, 4i+2 and 4i+3 → one in the order of the rows."""
    return tl.reshape(tl.join(tl.join(v0, v2), tl.join(v1, v3)), [LENGTH])


@triton.jit
def _load_tile(x, m0, k0, M, K, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The rows 4i, 4i+1, 4i+2 and 4i+3 of a tile, the offsets of the first, and the mask of its elements inside."""
    rows = m0 + 4 * tl.arange(0, ROWS // 4)[:, None]
    columns = k0 + tl.arange(0, COLUMNS)[None, :]
    offsets = rows.to(tl.int64) * K + columns
    mask = (rows < M) & (columns < K)  # M is a multiple of 4: the four rows are in or out together
    x0 = load_inside(x + offsets, mask, EVEN)
    x1 = load_inside(x + offsets + K, mask, EVEN)
    x2 = load_inside(x + offsets + 2 * K, mask, EVEN)
    x3 = load_inside(x + offsets + 3 * K, mask, EVEN)
    return x0, x1, x2, x3, offsets, mask


@triton.jit
def _store_tile(payload, q0, q1, q2, q3, offsets, mask, K, EVEN: tl.constexpr):
    _store_inside(payload + offsets, q0, mask, EVEN)
    _store_inside(payload + offsets + K, q1, mask, EVEN)
    _store_inside(payload + offsets + 2 * K, q2, mask, EVEN)
    _store_inside(payload + offsets + 3 * K, q3, mask, EVEN)


@triton.jit
def _store_column_sums(sums, x0, x1, x2, x3, row, k0, K, EVEN: tl.constexpr, COLUMNS: tl.constexpr):
    of_fours = (x0.to(tl.float32) + x1.to(tl.float32)) + (x2.to(tl.float32) + x3.to(tl.float32))
    columns = k0 + tl.arange(0, COLUMNS)
    _store_inside(sums + row.to(tl.int64) * K + columns, tl.sum(of_fours, axis=0), columns < K, EVEN)


@triton.jit
def _cast_rows(
    x, payload, scales, sums, M, K, part_m, tile_k,
    FP_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, SUM_COLUMNS: tl.constexpr, EVEN: tl.constexpr,
    BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """PART rows of one block each."""
    m0, k0 = part_m * PART, tile_k * BLOCK
    dtype: tl.constexpr = payload.dtype.element_ty
    x0, x1, x2, x3, offsets, mask = _load_tile(x, m0, k0, M, K, EVEN, PART, BLOCK)
    s0, i0 = scales_and_reciprocals(tl.max(magnitude_bits(x0), axis=1), FP_MAX, POWER_OF_TWO)
    s1, i1 = scales_and_reciprocals(tl.max(magnitude_bits(x1), axis=1), FP_MAX, POWER_OF_TWO)
    s2, i2 = scales_and_reciprocals(tl.max(magnitude_bits(x2), axis=1), FP_MAX, POWER_OF_TWO)
    s3, i3 = scales_and_reciprocals(tl.max(magnitude_bits(x3), axis=1), FP_MAX, POWER_OF_TWO)
    q0 = encode(x0, i0[:, None], FP_MAX, dtype)
    q1 = encode(x1, i1[:, None], FP_MAX, dtype)
    q2 = encode(x2, i2[:, None], FP_MAX, dtype)
    q3 = encode(x3, i3[:, None], FP_MAX, dtype)
    _store_tile(payload, q0, q1, q2, q3, offsets, mask, K, EVEN)
    rows = m0 + tl.arange(0, PART)
    _store_inside(scales + tile_k.to(tl.int64) * M + rows, _interleaved(s0, s1, s2, s3, PART), rows < M, EVEN)
    if SUM_COLUMNS:
        _store_column_sums(sums, x0, x1, x2, x3, part_m, k0, K, EVEN, BLOCK)


@triton.jit
def cast_block_rows(
    values, payload, scales, rows, block, M, K,
    FP_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The block `block` of some rows [R, 1], given as FP32 [R, BLOCK] → payload [M, K] and scales [K / BLOCK, M]."""
    bits = tl.max(magnitude_bits(values), axis=1, keep_dims=True)
    scale, inverse = scales_and_reciprocals(bits, FP_MAX, POWER_OF_TWO)
    columns = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    encoded = encode(values, inverse, FP_MAX, payload.dtype.element_ty)
    _store_inside(payload + rows.to(tl.int64) * K + columns, encoded, rows < M, EVEN)
    _store_inside(scales + tl.cast(block, tl.int64) * M + rows, scale, rows < M, EVEN)


@triton.jit
def _cast_columns(
    x, payload_t, scales_t, sums, M, K, tile_m, part_k,
    FP_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, SUM_COLUMNS: tl.constexpr, EVEN: tl.constexpr,
    BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """PART columns of one block each, transposed."""
    k0 = part_k * PART
    x0, x1, x2, x3, _, _ = _load_tile(x, tile_m * BLOCK, k0, M, K, EVEN, BLOCK, PART)
    cast_transposed(
        x0, x1, x2, x3, payload_t, scales_t, M, K, tile_m, k0, FP_MAX, POWER_OF_TWO, EVEN, BLOCK, PART
    )  # fmt: skip
    if SUM_COLUMNS:
        _store_column_sums(sums, x0, x1, x2, x3, tile_m, k0, K, EVEN, PART)


@triton.jit
def cast_transposed(
    x0, x1, x2, x3, payload_t, scales_t, M, K, tile_m, k0,
    FP_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """PART columns from `k0` of one block each → payload_t [K, M] and scales_t [M / BLOCK, K]; the rows 4i, 4i+1, 4i+2
    and 4i+3 of the row `tile_m` of tiles are given."""
    largest = larger_magnitude(larger_magnitude(larger_magnitude(tl.abs(x0.to(tl.float32)), x1), x2), x3)
    bits = tl.max(magnitude_bits(largest), axis=0)
    dtype: tl.constexpr = payload_t.dtype.element_ty
    scale, inverse = scales_and_reciprocals(bits, FP_MAX, POWER_OF_TWO)
    columns = k0 + tl.arange(0, PART)
    _store_inside(scales_t + tile_m.to(tl.int64) * K + columns, scale, columns < K, EVEN)
    q0 = encode(x0, inverse[None, :], FP_MAX, dtype)
    q1 = encode(x1, inverse[None, :], FP_MAX, dtype)
    q2 = encode(x2, inverse[None, :], FP_MAX, dtype)
    q3 = encode(x3, inverse[None, :], FP_MAX, dtype)
    store_transposed(q0, q1, q2, q3, payload_t, tile_m * BLOCK, k0, M, K, BLOCK, PART, EVEN)


@triton.jit
def _cast_blocks(
    x, payload, scales, payload_t, scales_t, sums, M, K,
    FP_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, ROWWISE: tl.constexpr, TRANSPOSED: tl.constexpr,
    SUM_COLUMNS: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """A part of one layout of a tile. A tile's programs are neighbours; odd ones write the transpose."""
    PARTS: tl.constexpr = BLOCK // PART
    layouts: tl.constexpr = ROWWISE + TRANSPOSED
    tile = tl.program_id(0) // (PARTS * layouts)
    part = tl.program_id(0) // layouts % PARTS
    tiles_k = tl.cdiv(K, BLOCK)
    tile_m, tile_k = tile // tiles_k, tile % tiles_k
    if ROWWISE and TRANSPOSED:
        if tl.program_id(0) % 2 == 0:
            _cast_rows(
                x, payload, scales, sums, M, K, tile_m * PARTS + part, tile_k,
                FP_MAX, POWER_OF_TWO, False, EVEN, BLOCK, PART,
            )  # fmt: skip
        else:
            _cast_columns(
                x, payload_t, scales_t, sums, M, K, tile_m, tile_k * PARTS + part,
                FP_MAX, POWER_OF_TWO, SUM_COLUMNS, EVEN, BLOCK, PART,
            )  # fmt: skip
    elif ROWWISE:
        _cast_rows(
            x, payload, scales, sums, M, K, tile_m * PARTS + part, tile_k,
            FP_MAX, POWER_OF_TWO, SUM_COLUMNS, EVEN, BLOCK, PART,
        )  # fmt: skip
    else:
        _cast_columns(
            x, payload_t, scales_t, sums, M, K, tile_m, tile_k * PARTS + part,
            FP_MAX, POWER_OF_TWO, SUM_COLUMNS, EVEN, BLOCK, PART,
        )  # fmt: skip


@triton.jit
def _store_tile_scale(scales, scale, row, column, num_columns, stride):
    """The scale of one tile; the last of a row also fills the row's padding, up to three columns, with 1."""
    ahead = tl.arange(0, 4)
    mask = (ahead == 0) | ((column == num_columns - 1) & (column + ahead < stride))
    tl.store(scales + row * stride + column + ahead, tl.where(ahead == 0, scale, 1.0), mask=mask)


@triton.jit
def _cast_tiles(
    w, given_scales, payload, scales, payload_t, scales_t, N, K, stride, stride_t,
    FP_MAX: tl.constexpr, CAST: tl.constexpr, POWER_OF_TWO: tl.constexpr, ROWWISE: tl.constexpr,
    TRANSPOSED: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile of a weight. Without `CAST`, `w` is already FP8 and is copied with its given scale."""
    tiles_n, tiles_k = tl.cdiv(N, BLOCK), tl.cdiv(K, BLOCK)
    tile_n, tile_k = tl.program_id(0) // tiles_k, tl.program_id(0) % tiles_k
    n0, k0 = tile_n * BLOCK, tile_k * BLOCK
    w0, w1, w2, w3, offsets, mask = _load_tile(w, n0, k0, N, K, EVEN, BLOCK, BLOCK)
    if CAST:
        dtype: tl.constexpr = payload.dtype.element_ty
        bits = tl.maximum(
            tl.maximum(magnitude_bits(w0), magnitude_bits(w1)), tl.maximum(magnitude_bits(w2), magnitude_bits(w3))
        )
        scale = scale_from_amax_bits(tl.max(bits), FP_MAX, POWER_OF_TWO)
        inverse = reciprocal(scale)
        q0 = encode(w0, inverse, FP_MAX, dtype)
        q1 = encode(w1, inverse, FP_MAX, dtype)
        q2 = encode(w2, inverse, FP_MAX, dtype)
        q3 = encode(w3, inverse, FP_MAX, dtype)
    else:
        scale = tl.load(given_scales + tile_n * stride + tile_k)
        q0, q1, q2, q3 = w0, w1, w2, w3
    if ROWWISE:
        _store_tile(payload, q0, q1, q2, q3, offsets, mask, K, EVEN)
        _store_tile_scale(scales, scale, tile_n, tile_k, tiles_k, stride)
    if TRANSPOSED:
        store_transposed(q0, q1, q2, q3, payload_t, n0, k0, N, K, BLOCK, BLOCK, EVEN)
        _store_tile_scale(scales_t, scale, tile_k, tile_n, tiles_n, stride_t)


def quantize_blocks(
    x: Tensor, dtype: torch.dtype, rowwise: bool, transposed: bool, column_sums: bool, power_of_two: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`blocks.quantize_blocks` in one launch; column sums need a second, small one."""
    x = x.contiguous()
    (M, K), device = x.shape, x.device
    no_payload, no_scales = no_values(dtype, device), no_values(torch.float32, device)
    payload, scales, payload_t, scales_t, partial_sums = no_payload, no_scales, no_payload, no_scales, no_scales
    if rowwise:
        payload = torch.empty((M, K), dtype=dtype, device=device)
        scales = torch.empty(block_scales_shape(M, K), dtype=torch.float32, device=device)
    if transposed:
        payload_t = torch.empty((K, M), dtype=dtype, device=device)
        scales_t = torch.empty(block_scales_shape(K, M), dtype=torch.float32, device=device)
    if column_sums:
        # Programs below the last row write their zeros too.
        num_partials = cdiv(M, GEMM_BLOCK) * (1 if transposed else GEMM_BLOCK // _PART)
        partial_sums = torch.empty((1, num_partials, K), dtype=torch.float32, device=device)
    launch = _blocks_launch(M, K, MAX_FINITE[dtype], power_of_two, rowwise, transposed, column_sums)
    launch(x, payload, scales, payload_t, scales_t, partial_sums)
    sums = sum_of_programs(partial_sums)[0] if column_sums else no_scales
    return payload, scales, payload_t, scales_t, sums


@lru_cache(maxsize=MOST_SHAPES)
def _blocks_launch(
    M: int, K: int, fp_max: float, power_of_two: bool, rowwise: bool, transposed: bool, column_sums: bool
) -> PreparedLaunch:
    tiles = cdiv(M, GEMM_BLOCK) * cdiv(K, GEMM_BLOCK)
    return PreparedLaunch(
        _cast_blocks,
        (tiles * (GEMM_BLOCK // _PART) * (rowwise + transposed),),
        *(M, K, fp_max, power_of_two, rowwise, transposed, column_sums),
        *(M % GEMM_BLOCK == 0 and K % GEMM_BLOCK == 0, GEMM_BLOCK, _PART),
        num_warps=_BLOCKS_NUM_WARPS,
        enable_fp_fusion=True,
    )


def quantize_tiles(
    w: Tensor, dtype: torch.dtype, rowwise: bool, transposed: bool, power_of_two: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`blocks.quantize_tiles`, one launch."""
    return _launch_tiles(w, None, dtype, rowwise, transposed, power_of_two)


def transpose_tiles(payload: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """`blocks.transpose_tiles`, one launch."""
    return _launch_tiles(payload, scales, payload.dtype, False, True, False)[2:]


def _launch_tiles(
    w: Tensor, given_scales: Tensor | None, dtype: torch.dtype, rowwise: bool, transposed: bool, power_of_two: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    w = w.contiguous()
    (N, K), device = w.shape, w.device
    no_payload, no_scales = no_values(dtype, device), no_values(torch.float32, device)
    payload, scales, payload_t, scales_t = no_payload, no_scales, no_payload, no_scales
    if rowwise:
        payload = torch.empty((N, K), dtype=dtype, device=device)
        scales = torch.empty(tile_scales_shape(N, K), dtype=torch.float32, device=device)
    if transposed:
        payload_t = torch.empty((K, N), dtype=dtype, device=device)
        scales_t = torch.empty(tile_scales_shape(K, N), dtype=torch.float32, device=device)
    launch = _tiles_launch(N, K, MAX_FINITE[dtype], given_scales is None, power_of_two, rowwise, transposed)
    launch(w, no_scales if given_scales is None else given_scales, payload, scales, payload_t, scales_t)
    return payload, scales, payload_t, scales_t


@lru_cache(maxsize=MOST_SHAPES)
def _tiles_launch(
    N: int, K: int, fp_max: float, casts: bool, power_of_two: bool, rowwise: bool, transposed: bool
) -> PreparedLaunch:
    (rows, stride), (_, stride_t) = tile_scales_shape(N, K), tile_scales_shape(K, N)
    return PreparedLaunch(
        _cast_tiles,
        (rows * cdiv(K, GEMM_BLOCK),),
        *(N, K, stride, stride_t, fp_max, casts, power_of_two, rowwise, transposed),
        *(N % GEMM_BLOCK == 0 and K % GEMM_BLOCK == 0, GEMM_BLOCK),
        num_warps=_TILES_NUM_WARPS,
        enable_fp_fusion=True,
    )
