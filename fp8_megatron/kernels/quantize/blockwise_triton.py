"""Block-scaled storage in Triton: `blockwise.quantize_blockwise_`, `dequantize_blockwise` and `squared_norm`.

The cast of a block-scaled weight to FP8 is one launch, which reads two bytes an element and writes one. Decoding to
FP32 first would move 13 bytes in two launches. All values are decoded and encoded by the specification's FP32
operations, so the bits are the same.
"""

# The parameters of a Triton kernel have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import struct
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...dtypes import E4M3, E5M2, MAX_FINITE
from ..companding_triton import companded_scale, decode_companded, encode_companded
from ..launch import MOST_SHAPES, PreparedLaunch
from ..shapes import cdiv, empty
from .triton import encode, magnitude_bits, reciprocal, store_transposed

_TILE = 4096
_NUM_WARPS = 8
# Programs of the first stage of the norm; the second adds their sums in a fixed order.
_MAX_PARTIALS = 1024

#: Largest finite magnitude of each block-scaled payload as FP32 bits.
FP_MAX_BITS = {
    dtype: struct.unpack("i", struct.pack("f", MAX_FINITE[dtype]))[0] for dtype in (E4M3, E5M2, torch.float16)
}

_INF_BITS = tl.constexpr(0x7F800000)
_ONE_BITS = tl.constexpr(0x3F800000)


@triton.jit
def block_amax_bits(value, axis: tl.constexpr):
    """The amax along `axis` as FP32 bits, NaN above inf."""
    return tl.max(magnitude_bits(value), axis=axis, keep_dims=True)


@triton.jit
def block_scale(bits, FP_MAX_BITS: tl.constexpr):
    """`reference.scale_from_amax` rounded up to a power of two, for an amax given as bits; and the scale's reciprocal.

    ``amax / fp_max`` is above 2ᵏ exactly if the mantissa of amax is above that of fp_max. (This holds for the rounded
    quotient too: with fp_max = 1.75·2ᵉ, or FP16's 1.999·2ᵉ, the next amax after fp_max·2ᵏ gives a quotient that is more
    than half a unit above 2ᵏ.) Scale and reciprocal are therefore integer arithmetic on exponents. Values encoded with
    them cannot exceed fp_max and need no clamp.
    """
    up = (bits + (0x7FFFFF - (FP_MAX_BITS & 0x7FFFFF))) & 0x7F800000
    scale = tl.maximum(up - ((FP_MAX_BITS & 0x7F800000) - _ONE_BITS), 0x00800000)
    scale = tl.where(bits == 0, _ONE_BITS, scale)
    finite = bits < _INF_BITS
    inverse = tl.where(finite, 2 * _ONE_BITS - scale, 0x7FC00000)
    return tl.where(finite, scale, 0x7FC00000).to(tl.float32, bitcast=True), inverse.to(tl.float32, bitcast=True)


@triton.jit
def _quantize_blocks(
    x, payload, scales, n, num_blocks,
    FP_MAX_BITS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """ROWS blocks of BLOCK elements a program."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    rows = tl.arange(0, ROWS)[:, None]
    offsets = rows * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = None
    if EVEN:
        value = tl.load(x + first * BLOCK + offsets)
    else:
        mask = first + rows < num_blocks
        value = tl.load(x + first * BLOCK + offsets, mask=first * BLOCK + offsets < n, other=0.0)
    bits = block_amax_bits(value, 1)
    if payload.dtype.element_ty.is_int():
        scale = companded_scale(bits)
        encoded = encode_companded(
            value.to(tl.float32), scale, tl.full([1, 1], 8388608.0, tl.float32), payload.dtype.element_ty
        )
    else:
        scale, inverse = block_scale(bits, FP_MAX_BITS)
        encoded = (value.to(tl.float32) * inverse).to(payload.dtype.element_ty)
    tl.store(scales + first + rows, scale, mask=mask)
    tl.store(payload + first * BLOCK + offsets, encoded, mask=mask)


@triton.jit
def _dequantize_blocks(payload, scales, out, num_blocks, ROWS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * ROWS
    rows = tl.arange(0, ROWS)[:, None]
    offsets = rows * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = None
    if not EVEN:
        mask = first + rows < num_blocks
    value = tl.load(payload + first * BLOCK + offsets, mask=mask)
    scale = tl.load(scales + first + rows, mask=mask)
    if payload.dtype.element_ty.is_int():
        decoded = decode_companded(value, scale)
    else:
        decoded = value.to(tl.float32) * scale
    tl.store(out + first * BLOCK + offsets, decoded, mask=mask)


@triton.jit
def _partial_squares(
    payload, scales, partials, n, SCALED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr
):
    TILE: tl.constexpr = ROWS * BLOCK
    rows = tl.arange(0, ROWS)[:, None]
    offsets = rows * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(tl.program_id(0).to(tl.int64) * TILE, n, tl.num_programs(0) * TILE):
        if EVEN:
            value = tl.load(payload + start + offsets).to(tl.float32)
        else:
            value = tl.load(payload + start + offsets, mask=start + offsets < n, other=0.0).to(tl.float32)
        if SCALED:
            if EVEN:
                scale = tl.load(scales + start // BLOCK + rows)
            else:
                scale = tl.load(scales + start // BLOCK + rows, mask=start + rows * BLOCK < n, other=0.0)
            value *= scale
        total += value * value
    tl.store(partials + tl.program_id(0), tl.sum(total))


@triton.jit
def _sum_partials(partials, out, num_partials, MAX_PARTIALS: tl.constexpr):
    offsets = tl.arange(0, MAX_PARTIALS)
    tl.store(out, tl.sum(tl.load(partials + offsets, mask=offsets < num_partials, other=0.0), axis=0))


def block_size(payload: Tensor, scales: Tensor) -> int:
    """`block_of_sizes` of a payload and its scales."""
    return block_of_sizes(payload.numel(), scales.numel())


def block_of_sizes(numel: int, num_scales: int) -> int:
    """Elements that share a scale.

    Raises:
        ValueError: not a power of two from 16 to 4096, or not a whole number of blocks.
    """
    block = numel // num_scales
    if block * num_scales != numel or block & (block - 1) or not 16 <= block <= _TILE:
        raise ValueError(f"{numel} elements with {num_scales} scales: the block must be a power of two in 16…{_TILE}")
    return block


def quantize_blockwise_(x: Tensor, payload: Tensor, scales: Tensor) -> None:
    """`blockwise.quantize_blockwise_`, one launch.

    Raises:
        ValueError: see `block_of_sizes`.
    """
    assert payload.is_contiguous() and scales.is_contiguous()
    launch = _blocks_launch(x.numel(), payload.numel(), scales.numel(), payload.dtype)
    launch(x.contiguous(), payload, scales)


@lru_cache(maxsize=MOST_SHAPES)
def _blocks_launch(n: int, numel: int, num_blocks: int, dtype: torch.dtype) -> PreparedLaunch:
    block = block_of_sizes(numel, num_blocks)
    rows = _TILE // block
    return PreparedLaunch(
        _quantize_blocks,
        (cdiv(num_blocks, rows),),
        *(n, num_blocks, FP_MAX_BITS.get(dtype, 0), rows, block, num_blocks % rows == 0 and n == numel),
        num_warps=_NUM_WARPS,
        enable_fp_fusion=False,
    )


def dequantize_blockwise(payload: Tensor, scales: Tensor) -> Tensor:
    """`blockwise.dequantize_blockwise`, one launch.

    Raises:
        ValueError: see `block_of_sizes`.
    """
    out = torch.empty(payload.numel(), dtype=torch.float32, device=payload.device)
    _decode_launch(payload.numel(), scales.numel())(payload.contiguous(), scales.contiguous(), out)
    return out


@lru_cache(maxsize=MOST_SHAPES)
def _decode_launch(numel: int, num_blocks: int) -> PreparedLaunch:
    block = block_of_sizes(numel, num_blocks)
    rows = _TILE // block
    numbers = (num_blocks, rows, block, num_blocks % rows == 0)
    grid = (cdiv(num_blocks, rows),)
    return PreparedLaunch(_dequantize_blocks, grid, *numbers, num_warps=_NUM_WARPS, enable_fp_fusion=False)


def squared_norm(payload: Tensor, scales: Tensor | None) -> Tensor:
    """`blockwise.squared_norm` in two launches; the same bits in every run.

    Raises:
        ValueError: see `block_of_sizes`.
    """
    n = payload.numel()
    num_partials = min(cdiv(n, _TILE), _MAX_PARTIALS)
    add_squares, add_partials = _squares_launches(n, None if scales is None else scales.numel(), num_partials)
    partials = torch.empty(num_partials, dtype=torch.float32, device=payload.device)
    payload = payload.contiguous()
    add_squares(payload, payload if scales is None else scales.contiguous(), partials)
    if num_partials == 1:
        return partials
    out = torch.empty(1, dtype=torch.float32, device=payload.device)
    add_partials(partials, out)
    return out


@lru_cache(maxsize=MOST_SHAPES)
def _squares_launches(n: int, num_blocks: int | None, num_partials: int) -> tuple[PreparedLaunch, PreparedLaunch]:
    block = _TILE if num_blocks is None else block_of_sizes(n, num_blocks)
    numbers = (n, num_blocks is not None, _TILE // block, block, n % _TILE == 0)
    return (
        PreparedLaunch(_partial_squares, (num_partials,), *numbers, num_warps=_NUM_WARPS, enable_fp_fusion=True),
        PreparedLaunch(_sum_partials, (1,), num_partials, _MAX_PARTIALS, enable_fp_fusion=True),
    )


_WEIGHT_TILE = 8192
_TILE_N = 128
_TILE_K = 128


@triton.jit
def _cast_rows(
    weight, scales, scale, payload, num_blocks, stride,
    FP_MAX: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """ROWS blocks of BLOCK elements a program, of matrix ``program_id(1)``; its scale is at `stride` times that."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    matrix = tl.program_id(1).to(tl.int64)
    weight += matrix * num_blocks * BLOCK
    payload += matrix * num_blocks * BLOCK
    scales += matrix * num_blocks
    rows = tl.arange(0, ROWS)[:, None]
    offsets = first * BLOCK + rows * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = None
    if not EVEN:
        mask = first + rows < num_blocks
    value = tl.load(weight + offsets, mask=mask).to(tl.float32) * tl.load(scales + first + rows, mask=mask)
    inverse = reciprocal(tl.load(scale + matrix * stride))
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


@triton.jit
def _cast_transposed(
    weight, scales, scale, payload_t, N, K, stride,
    FP_MAX: tl.constexpr, BLOCK: tl.constexpr, ROW_IN_BLOCK: tl.constexpr,
    TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    tiles_k = tl.cdiv(K, TILE_K)
    n0 = tl.program_id(0) // tiles_k * TILE_N
    k0 = tl.program_id(0) % tiles_k * TILE_K
    rows = n0 + 4 * tl.arange(0, TILE_N // 4)[:, None]
    columns = k0 + tl.arange(0, TILE_K)[None, :]
    matrix = tl.program_id(1).to(tl.int64)
    weight += matrix * N * K
    payload_t += matrix * N * K
    scales += matrix * N * K // BLOCK
    inverse = reciprocal(tl.load(scale + matrix * stride))
    dtype: tl.constexpr = payload_t.dtype.element_ty
    q0 = encode(_decoded_row(weight, scales, rows, columns, k0, N, K, BLOCK, ROW_IN_BLOCK), inverse, FP_MAX, dtype)
    q1 = encode(_decoded_row(weight, scales, rows + 1, columns, k0, N, K, BLOCK, ROW_IN_BLOCK), inverse, FP_MAX, dtype)
    q2 = encode(_decoded_row(weight, scales, rows + 2, columns, k0, N, K, BLOCK, ROW_IN_BLOCK), inverse, FP_MAX, dtype)
    q3 = encode(_decoded_row(weight, scales, rows + 3, columns, k0, N, K, BLOCK, ROW_IN_BLOCK), inverse, FP_MAX, dtype)
    store_transposed(q0, q1, q2, q3, payload_t, n0, k0, N, K, TILE_N, TILE_K)


def quantize_weight(weight: Tensor, scales: Tensor, scale: Tensor, dtype: torch.dtype, transposed: bool) -> Tensor:
    """`blockwise.quantize_weight` in one launch.

    Raises:
        ValueError: `transposed` with N not a multiple of 4, or see `block_of_sizes`.
    """
    N, K = weight.shape[-2:]
    count, stride = (len(weight), scale.stride(0)) if weight.ndim == 3 else (1, 0)
    launch = _weight_launch(N, K, scales.numel() // count, dtype, transposed, count, stride)
    rows, columns = (K, N) if transposed else (N, K)
    payload = empty(count * rows, columns, dtype, weight.device)
    launch(weight, scales, scale, payload)
    return payload.view(count, rows, columns) if weight.ndim == 3 else payload


@lru_cache(maxsize=MOST_SHAPES)
def _weight_launch(
    N: int, K: int, num_blocks: int, dtype: torch.dtype, transposed: bool, count: int, stride: int
) -> PreparedLaunch:
    """For `count` matrices [N, K] of `num_blocks` blocks each."""
    block = block_of_sizes(N * K, num_blocks)
    if not transposed:
        rows = _WEIGHT_TILE // block
        return PreparedLaunch(
            _cast_rows,
            (cdiv(num_blocks, rows), count),
            *(num_blocks, stride, MAX_FINITE[dtype], rows, block, num_blocks % rows == 0),
            num_warps=_NUM_WARPS,
            enable_fp_fusion=True,
        )
    if N % 4:
        raise ValueError(f"a transposed FP8 payload needs M={N} to be a multiple of 4 (the FP8 GEMM: of 16)")
    row_in_block = K % _TILE_K == 0 and block % _TILE_K == 0  # then a tile's rows start on multiples of its width
    return PreparedLaunch(
        _cast_transposed,
        (cdiv(N, _TILE_N) * cdiv(K, _TILE_K), count),
        *(N, K, stride, MAX_FINITE[dtype], block, row_in_block, _TILE_N, _TILE_K),
        num_warps=_NUM_WARPS,
        enable_fp_fusion=True,
    )
