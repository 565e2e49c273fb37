"""The grouped FP8 GEMMs in Triton, where `gemm_cuda` has none: one persistent launch for all experts, scheduled by
offsets on the device.

Tiles come through tensor maps (TMA). A weight gradient's sums are short, one for each token of an expert: two programs
share a multiprocessor, so that one adds while the other writes.

Hopper adds FP8 products in an accumulator shorter than FP32 (arXiv 2412.19437, section 3.3.2). Sums of 2,048 to 7,168
random products are off by 0.8e-3 to 1.9e-3, beside the 27e-3 of the operands' own rounding, so they are left there.
With scales of blocks each block's sum is added to one in FP32, so tiles are smaller: both sums are in registers.
"""

# The parameters of a Triton kernel have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...dtypes import E4M3, GEMM_BLOCK, GRAD_BLOCK, GROUP_ROWS
from ..quantize.blockwise_triton import FP_MAX_BITS, block_amax_bits, block_scale
from ..shapes import cdiv, empty, next_power_of_2
from . import gemm_cuda

#: A weight of an expert that is larger does not stay in the L2 cache, so tiles of several row tiles go together.
_LARGE_WEIGHT = 32 << 20
_ROW_TILES_TOGETHER = 4


class _TileSizes(NamedTuple):
    """How a kernel is cut: columns of an output tile, elements of a sum that are loaded together, and the launch."""

    columns: int
    depth: int
    num_warps: int
    num_stages: int
    programs: int  # on one multiprocessor


@cache
def _row_tiles(device: int, has_blocks: bool) -> _TileSizes:
    if not _has_large_memory(device):
        return _TileSizes(128, 64, 8, 3, 1)
    if has_blocks:
        return _TileSizes(128, 128, 8, 4, 1)
    return _TileSizes(256, 128, 8, 4 if _is_hopper(device) else 3, 1)


@cache
def _wgrad_tiles(device: int, is_fp8: bool, has_blocks: bool) -> _TileSizes:
    if not _has_large_memory(device):
        return _TileSizes(GRAD_BLOCK if is_fp8 else 64, 64, 8, 3, 1)
    if has_blocks:
        return _TileSizes(128, 128, 8, 3, 1)
    return _TileSizes(128, 128, 4, 3, 2) if is_fp8 else _TileSizes(128, 128, 8, 4, 1)


def _is_hopper(device: int) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


def _has_large_memory(device: int) -> bool:
    """Whether a block may take 227 KiB of shared memory: on GPUs of data centres from Hopper on."""
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


@cache
def _num_multiprocessors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit
def _grouped_rows(
    a, b, out, scale_a, scale_b, offsets, scale_stride, tile_stride, block_stride, E, N, K, R,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EXPERTS: tl.constexpr, TOGETHER: tl.constexpr,
    HALVES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [R, N] = a [R, K] · b [E, N, K]ᵀ of each row's expert; a, b and out are tensor maps.

    `BLOCK`: elements of the sum that share a scale of a row [K / BLOCK, R], and of a tile of the weight, whose scale
    is `scale_stride` behind that of the expert before, `tile_stride` behind that of the columns before, `block_stride`
    behind that of the block before. 0: a and each matrix of b have one scale.
    """
    column_tiles = tl.cdiv(N, COLUMNS)
    row_tiles = tl.load(offsets + E) // ROWS
    experts = tl.arange(0, EXPERTS)
    starts = tl.load(offsets + experts, mask=experts < E, other=2147483647)
    if not BLOCK:
        factor = tl.load(scale_a)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=True):
        together = TOGETHER * column_tiles
        first = tile // together * TOGETHER
        height = tl.minimum(row_tiles - first, TOGETHER)
        row = (first + tile % together % height) * ROWS
        column = tile % together // height * COLUMNS
        expert = tl.sum((starts <= row).to(tl.int32)) - 1
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for k in range(0, K, DEPTH):
            left = a.load([row, k])
            right = b.load([expert, column, k]).reshape(COLUMNS, DEPTH)
            if BLOCK:
                tl.static_assert(COLUMNS <= BLOCK and DEPTH <= BLOCK)
                of_rows = tl.load(scale_a + k // BLOCK * R + row + tl.arange(0, ROWS))
                of_tile = expert * scale_stride + column // BLOCK * tile_stride + k // BLOCK * block_stride
                total += tl.dot(left, right.T) * (of_rows * tl.load(scale_b + of_tile))[:, None]
            else:
                total = tl.dot(left, right.T, total)
        if not BLOCK:
            total *= factor * tl.load(scale_b + expert * scale_stride)
        if HALVES:
            left_half, right_half = tl.split(tl.permute(tl.reshape(total, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))
            out.store([row, column], left_half.to(tl.bfloat16))
            out.store([row, column + COLUMNS // 2], right_half.to(tl.bfloat16))
        else:
            out.store([row, column], total.to(tl.bfloat16))


@triton.jit
def _grouped_wgrad(
    g_t, x_t, out, scales, scale_g, scale_x, offsets, E, N, K,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, ADDS: tl.constexpr,
    BLOCK: tl.constexpr, FP_MAX_BITS: tl.constexpr, SUM_BLOCK: tl.constexpr,
):  # fmt: skip
    """out [E, N, K] = g_t [N, R] · x_t [K, R]ᵀ over each expert's columns; g_t, x_t and out are tensor maps.

    `BLOCK`: elements of `out` that share a scale; 0: it is in 16 or 32 bits. `SUM_BLOCK`: elements of the sum that
    share a scale of g_t [R / SUM_BLOCK, N] and of x_t [R / SUM_BLOCK, K]; 0: both have one scale.
    """
    column_tiles = tl.cdiv(K, COLUMNS)
    of_expert = tl.cdiv(N, ROWS) * column_tiles
    if not SUM_BLOCK:
        factor = tl.load(scale_g) * tl.load(scale_x)
    for tile in tl.range(tl.program_id(0), E * of_expert, tl.num_programs(0), flatten=True):
        expert = tile // of_expert
        row = tile % of_expert // column_tiles * ROWS
        column = tile % column_tiles * COLUMNS
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for first in range(tl.load(offsets + expert), tl.load(offsets + expert + 1), DEPTH):
            left = g_t.load([row, first])
            right = x_t.load([column, first])
            if SUM_BLOCK:
                tl.static_assert(DEPTH <= SUM_BLOCK)
                n, k = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
                of_rows = tl.load(scale_g + first // SUM_BLOCK * N + n, mask=n < N, other=0.0)
                of_columns = tl.load(scale_x + first // SUM_BLOCK * K + k, mask=k < K, other=0.0)
                total += tl.dot(left, right.T) * of_rows[:, None] * of_columns[None, :]
            else:
                total = tl.dot(left, right.T, total)
        if not SUM_BLOCK:
            total *= factor
        if BLOCK:
            values = tl.reshape(total, (ROWS, COLUMNS // BLOCK, BLOCK))
            scale, inverse = block_scale(block_amax_bits(values, 2), FP_MAX_BITS)
            out.store([expert, row, column], tl.reshape((values * inverse).to(tl.float8e4nv), (1, ROWS, COLUMNS)))
            rows = row + tl.arange(0, ROWS)[:, None]
            blocks = column // BLOCK + tl.arange(0, COLUMNS // BLOCK)[None, :]
            places = scales + (expert.to(tl.int64) * N + rows) * (K // BLOCK) + blocks
            tl.store(places, tl.reshape(scale, (ROWS, COLUMNS // BLOCK)), mask=(rows < N) & (blocks < K // BLOCK))
        else:
            if ADDS:
                total += out.load([expert, row, column]).reshape(ROWS, COLUMNS).to(tl.float32)
            out.store([expert, row, column], tl.reshape(total.to(out.dtype), (1, ROWS, COLUMNS)))


def grouped_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offsets: Tensor) -> Tensor:
    """`gemm_reference.grouped_mm`."""
    in_cuda = gemm_cuda.grouped_mm(a, b, scale_a, scale_b, offsets)
    if in_cuda is not None:
        return in_cuda
    (rows, depth), (experts, columns, _) = a.shape, b.shape
    out = empty(rows, columns, torch.bfloat16, a.device)
    has_blocks = scale_a.ndim == 2
    tiles = _row_tiles(a.get_device(), has_blocks)
    halves = tiles.columns > 128  # a whole tile would leave less memory for what is loaded
    grid = (_num_multiprocessors(a.get_device()) * tiles.programs,)
    _grouped_rows[grid](
        TensorDescriptor.from_tensor(a, [GROUP_ROWS, tiles.depth]),
        TensorDescriptor.from_tensor(b, [1, tiles.columns, tiles.depth]),
        TensorDescriptor.from_tensor(out, [GROUP_ROWS, tiles.columns // 2 if halves else tiles.columns]),
        scale_a,
        scale_b,
        offsets,
        *(scale_b.stride() if has_blocks else (scale_b.stride(0), 0, 0)),
        experts,
        columns,
        depth,
        rows,
        ROWS=GROUP_ROWS,
        COLUMNS=tiles.columns,
        DEPTH=tiles.depth,
        EXPERTS=next_power_of_2(experts),
        TOGETHER=_ROW_TILES_TOGETHER if columns * depth > _LARGE_WEIGHT else 1,
        HALVES=halves,
        BLOCK=GEMM_BLOCK if has_blocks else 0,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=True,
    )
    return out


def grouped_wgrad_(
    out: Tensor, g_t: Tensor, x_t: Tensor, scale_g: Tensor, scale_x: Tensor, offsets: Tensor, adds: bool
) -> None:
    """`gemm_reference.grouped_wgrad_`."""
    _launch_wgrad(out, None, g_t, x_t, scale_g, scale_x, offsets, adds)


def grouped_wgrad_to_fp8_(
    out: Tensor, scales: Tensor, g_t: Tensor, x_t: Tensor, scale_g: Tensor, scale_x: Tensor, offsets: Tensor
) -> None:
    """`gemm_reference.grouped_wgrad_to_fp8_`."""
    _launch_wgrad(out, scales, g_t, x_t, scale_g, scale_x, offsets, False)


def _launch_wgrad(
    out: Tensor,
    scales: Tensor | None,
    g_t: Tensor,
    x_t: Tensor,
    scale_g: Tensor,
    scale_x: Tensor,
    offsets: Tensor,
    adds: bool,
) -> None:
    experts, rows, columns = out.shape
    has_blocks = scale_g.ndim == 2
    tiles = _wgrad_tiles(out.get_device(), scales is not None, has_blocks)
    num_tiles = experts * cdiv(rows, GROUP_ROWS) * cdiv(columns, tiles.columns)
    grid = (min(num_tiles, _num_multiprocessors(out.get_device()) * tiles.programs),)
    _grouped_wgrad[grid](
        TensorDescriptor.from_tensor(g_t, [GROUP_ROWS, tiles.depth]),
        TensorDescriptor.from_tensor(x_t, [tiles.columns, tiles.depth]),
        TensorDescriptor.from_tensor(out, [1, GROUP_ROWS, tiles.columns]),
        scale_g if scales is None else scales,
        scale_g,
        scale_x,
        offsets,
        experts,
        rows,
        columns,
        ROWS=GROUP_ROWS,
        COLUMNS=tiles.columns,
        DEPTH=tiles.depth,
        ADDS=adds,
        BLOCK=0 if scales is None else GRAD_BLOCK,
        FP_MAX_BITS=FP_MAX_BITS[E4M3],
        SUM_BLOCK=GEMM_BLOCK if has_blocks else 0,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=True,
    )
