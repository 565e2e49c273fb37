"""The products of a step of Newton-Schulz in Triton: one persistent kernel over the tiles of all matrices.

Of a symmetric product it computes the tiles on and below the diagonal, and stores each twice, the second time
transposed. Tiles come and go through tensor maps (TMA). A matrix has the same bits in any batch.
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

from ..shapes import cdiv


class Tiling(NamedTuple):
    """How the kernel is cut and launched.

    Attributes:
        size: rows of a tile, and columns of the squares it consists of.
        width: squares of a tile, side by side: 1 or 2.
        depth: elements of a sum that are loaded together.
        programs: on one multiprocessor.
    """

    size: int
    width: int
    depth: int
    num_warps: int
    num_stages: int
    programs: int


#: All have the same bits. Measured on an H200: 64 rows, two programs a multiprocessor, are 5 to 20% faster below 4,096.
_LARGE = 4096


@cache
def _lower_tiling(device: int, rows: int) -> Tiling:
    """For a symmetric product."""
    if not _has_large_memory(device):
        return Tiling(128, 1, 32, 8, 3, 1)
    return Tiling(128, 1, 64, 8, 3, 1) if rows >= _LARGE else Tiling(64, 2, 64, 4, 4, 2)


@cache
def _whole_tiling(device: int) -> Tiling:
    """For another one."""
    return Tiling(128, 2, 64, 8, 3, 1) if _has_large_memory(device) else Tiling(128, 1, 32, 8, 3, 1)


def _has_large_memory(device: int) -> bool:
    """Whether a block may take 227 KiB of shared memory."""
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


@cache
def _num_multiprocessors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit
def _lower_tile(tile, WIDTH: tl.constexpr):
    """Row and column of a tile on or below the diagonal, in tiles: row by row, where `WIDTH` rows are as long."""
    pair = (tile // WIDTH).to(tl.float32)
    group = ((tl.sqrt(8.0 * pair + 1.0) - 1.0) * 0.5).to(tl.int32)
    group -= (WIDTH * (group * (group + 1) // 2) > tile).to(tl.int32)
    group += (WIDTH * ((group + 1) * (group + 2) // 2) <= tile).to(tl.int32)
    rest = tile - WIDTH * (group * (group + 1) // 2)
    return WIDTH * group + rest // (group + 1), rest % (group + 1)


@triton.jit
def _load(stack, matrix, place, k, SIZE: tl.constexpr, DEPTH: tl.constexpr, BY_K: tl.constexpr):
    """[SIZE, DEPTH] of a matrix; `BY_K`: the elements of a sum lie side by side."""
    if BY_K:
        return stack.load([matrix, place, k]).reshape(SIZE, DEPTH)
    else:
        return stack.load([matrix, k, place]).reshape(DEPTH, SIZE).T


@triton.jit
def _store(
    total, addend, out, matrix, row, column, alpha, beta,
    SIZE: tl.constexpr, SYMMETRIC: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """A square, and under `SYMMETRIC` its mirror image, but nothing above the diagonal."""
    if not SYMMETRIC or column <= row:
        value = alpha * total
        if ADDS:
            value += beta * addend.load([matrix, row, column]).reshape(SIZE, SIZE).to(tl.float32)
        square = value.to(tl.bfloat16)
        if SYMMETRIC:
            if column == row:  # how a tensor core adds is not documented
                places = tl.arange(0, SIZE)
                square = tl.where(places[:, None] >= places[None, :], square, square.T)
            else:
                out.store([matrix, column, row], square.T.reshape(1, SIZE, SIZE))
        out.store([matrix, row, column], square.reshape(1, SIZE, SIZE))


@triton.jit
def _store_tile(
    total, addend, out, matrix, row, column, alpha, beta,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, SYMMETRIC: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """Square by square."""
    if WIDTH == 1:
        _store(total, addend, out, matrix, row, column, alpha, beta, SIZE, SYMMETRIC, ADDS)
    else:
        first, second = tl.split(tl.permute(tl.reshape(total, (SIZE, 2, SIZE)), (0, 2, 1)))
        _store(first, addend, out, matrix, row, column, alpha, beta, SIZE, SYMMETRIC, ADDS)
        _store(second, addend, out, matrix, row, column + SIZE, alpha, beta, SIZE, SYMMETRIC, ADDS)


@triton.jit
def _product(
    left, right, addend, out, matrices, row_tiles, column_tiles, tiles, K, alpha, beta,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, SYMMETRIC: tl.constexpr, ADDS: tl.constexpr,
    LEFT_BY_K: tl.constexpr, RIGHT_BY_K: tl.constexpr,
):  # fmt: skip
    """out = alpha · left·rightᵀ + beta · addend of each matrix, which has `tiles` tiles. All four are tensor maps."""
    for index in tl.range(tl.program_id(0), matrices * tiles, tl.num_programs(0), flatten=True):
        matrix, tile = index // tiles, index % tiles
        if SYMMETRIC:
            row_tile, column_tile = _lower_tile(tile, WIDTH)
        else:  # those that follow each other have the same columns
            row_tile, column_tile = tile % row_tiles, tile // row_tiles
        row, column = row_tile * SIZE, column_tile * (WIDTH * SIZE)
        total = tl.zeros([SIZE, WIDTH * SIZE], tl.float32)
        for k in range(0, K, DEPTH):
            a = _load(left, matrix, row, k, SIZE, DEPTH, LEFT_BY_K)
            b = _load(right, matrix, column, k, WIDTH * SIZE, DEPTH, RIGHT_BY_K)
            total = tl.dot(a, b.T, total)
        if not SYMMETRIC or column <= row:  # always: Triton 3.6 takes branches over a tile's parts inside another alone
            _store_tile(total, addend, out, matrix, row, column, alpha, beta, SIZE, WIDTH, SYMMETRIC, ADDS)


def symmetric_mm_(out: Tensor, x: Tensor, addend: Tensor | None, alpha: float, beta: float) -> None:
    """`products_reference.symmetric_mm_`, one launch."""
    _launch(out, x, x, addend, alpha, beta, is_symmetric=True)


def symmetric_times_(out: Tensor, factor: Tensor, x: Tensor, beta: float) -> None:
    """`products_reference.symmetric_times_`, one launch."""
    if x.stride(2) == 1:
        _launch(out, factor, x.mT, x, 1.0, beta, is_symmetric=False)
    else:  # its transposition is xᵀ·factor + beta · xᵀ
        _launch(out.mT, x.mT, factor, x.mT, 1.0, beta, is_symmetric=False)


def _launch(
    out: Tensor,
    left: Tensor,
    right: Tensor,
    addend: Tensor | None,
    alpha: float,
    beta: float,
    *,
    is_symmetric: bool,
) -> None:
    """`_product` of left [b, rows, k] and right [b, columns, k]."""
    device = out.get_device()
    matrices, rows, columns = out.shape
    tiling = _lower_tiling(device, rows) if is_symmetric else _whole_tiling(device)
    size, width, depth, num_warps, num_stages, programs = tiling
    row_tiles, column_tiles = cdiv(rows, size), cdiv(columns, width * size)
    # Below the diagonal, groups of `width` rows grow by one tile; the last one may have fewer rows.
    groups = cdiv(row_tiles, width)
    lower = width * groups * (groups + 1) // 2 - (width * groups - row_tiles) * groups
    tiles = lower if is_symmetric else row_tiles * column_tiles
    grid = (min(matrices * tiles, _num_multiprocessors(device) * programs),)
    of_left, left_by_k = _map(left, size, depth)
    of_right, right_by_k = _map(right, width * size, depth)
    squares = [1, size, size]
    _product[grid](
        of_left,
        of_right,
        TensorDescriptor.from_tensor(out if addend is None else addend, squares),
        TensorDescriptor.from_tensor(out, squares),
        matrices,
        row_tiles,
        column_tiles,
        tiles,
        left.shape[2],
        alpha,
        beta,
        SIZE=size,
        WIDTH=width,
        DEPTH=depth,
        SYMMETRIC=is_symmetric,
        ADDS=addend is not None,
        LEFT_BY_K=left_by_k,
        RIGHT_BY_K=right_by_k,
        num_warps=num_warps,
        num_stages=num_stages,
        enable_fp_fusion=True,
    )


def _map(stack: Tensor, size: int, depth: int) -> tuple[TensorDescriptor, bool]:
    """The tensor map of [b, places, k] as it is stored, and whether its sums are."""
    if stack.stride(2) == 1:
        return TensorDescriptor.from_tensor(stack, [1, size, depth]), True
    return TensorDescriptor.from_tensor(stack.mT, [1, depth, size]), False
