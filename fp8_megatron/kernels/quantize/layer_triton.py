"""The casts of one linear layer, two in a launch, in Triton: `layer`.

A launch has programs of two kinds. Each kind computes as in a launch of its own, so the bits are the same.
"""

# The parameters of a Triton kernel have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import MOST_SHAPES, Launcher, PreparedLaunch
from ..memory import empty, empty_vector
from ..sizes import cdiv
from .blockwise_triton import BlockCast, block_cast, cast_blocks
from .grad_output_triton import cast_matrix
from .triton import (
    AMAX_TILE,
    NUM_WARPS,
    SUM_COLUMNS,
    SUM_ROWS_AT_ONCE,
    TILE_K,
    TILE_M,
    amax_of_part,
    cast_with_scale,
    no_values,
    num_amax_parts,
    room_for_scale,
    sum_columns,
    sum_of_blocks,
    transpose,
    transpose_tile,
)
from .vector_triton import cast_part

_BIAS_TILE = 1024


@Launcher
@triton.jit
def _amax_and_cast(
    x, partials, bias, out, n, num_parts, N, TILE: tl.constexpr, EVEN: tl.constexpr, BIAS_TILE: tl.constexpr
):  # fmt: skip
    others = tl.num_programs(0) - num_parts
    program = tl.program_id(0)
    if program < others:
        cast_part(bias, out, program, N, BIAS_TILE)
    else:
        amax_of_part(x, partials, n, program - others, num_parts, TILE, EVEN)


@Launcher
@triton.jit
def _amax_and_transpose(
    x, partials, weight, weight_t, n, num_parts, N, K,
    TILE: tl.constexpr, EVEN: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    # The amax comes last: the cast that follows finds in L2 what it read.
    others = tl.num_programs(0) - num_parts
    program = tl.program_id(0)
    if program < others:
        transpose_tile(weight, weight_t, program, N, K, TILE_M, TILE_K)
    else:
        amax_of_part(x, partials, n, program - others, num_parts, TILE, EVEN)


@Launcher
@triton.jit
def _quantize_blocks_and_sum(
    x, payload, scales, partial_sums, sums, n, num_blocks, first_block, R, C,
    FP_MAX_BITS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr,
    CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program < first_block:
        sum_columns(partial_sums, sums, program, R, C, CHUNK, COLUMNS)
    else:
        cast_blocks(x, payload, scales, program - first_block, n, num_blocks, FP_MAX_BITS, ROWS, BLOCK, EVEN)


def quantize_input_and_bias(
    x: Tensor, bias: Tensor, dtype: torch.dtype, bias_dtype: torch.dtype, power_of_two: bool, transposed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`layer.quantize_input_and_bias` in two launches.

    Raises:
        ValueError: `transposed` with M not a multiple of 4.
    """
    x, device = x.contiguous(), x.device
    num_parts, launch = _amax_and_cast_launch(x.numel(), bias.numel())
    partials = empty_vector(num_parts, torch.int32, device)
    out = empty_vector(bias.numel(), bias_dtype, device)
    launch(x, partials, bias.contiguous(), out)
    scale = empty_vector(1, torch.float32, device)
    payload, payload_t = cast_with_scale(
        x, scale, partials, num_parts, dtype, True, power_of_two, True, transposed, None
    )
    return payload, payload_t, scale, out


@lru_cache(maxsize=MOST_SHAPES)
def _amax_and_cast_launch(n: int, num_biases: int) -> tuple[int, PreparedLaunch]:
    num_parts = num_amax_parts(n)
    return num_parts, _amax_and_cast.prepared(
        (cdiv(num_biases, _BIAS_TILE) + num_parts,),
        *(n, num_parts, num_biases, AMAX_TILE, n % AMAX_TILE == 0, _BIAS_TILE),
        num_warps=NUM_WARPS,
    )


def quantize_grad_and_transpose(
    x: Tensor,
    weight: Tensor,
    dtype: torch.dtype,
    scale: Tensor | None,
    power_of_two: bool,
    amax_out: Tensor | None,
    transposed: bool,
    column_sums: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`layer.quantize_grad_and_transpose` in two launches.

    Raises:
        ValueError: M or N is not a multiple of 4, or with `column_sums` N not of 16.
    """
    x, device = x.contiguous(), x.device
    taken = room_for_scale(scale is None, device)
    if scale is None:
        num_parts, launch = _amax_and_transpose_launch(x.numel(), *weight.shape)
        partials = empty_vector(num_parts, torch.int32, device)
        weight_t = empty(weight.shape[1], weight.shape[0], weight.dtype, device)
        launch(x, partials, weight.contiguous(), weight_t)
        used = taken
    else:
        num_parts, partials, used = 0, scale, scale
        weight_t = transpose(weight)
    current = scale is None
    if column_sums:
        payload, payload_t, sums = cast_matrix(
            x, used, partials, num_parts, dtype, current, power_of_two, amax_out, transposed
        )
    else:
        payload, payload_t = cast_with_scale(
            x, used, partials, num_parts, dtype, current, power_of_two, True, transposed, amax_out
        )
        sums = no_values(torch.float32, device).view(0, x.shape[1])
    return payload, payload_t, sums, taken, weight_t


@lru_cache(maxsize=MOST_SHAPES)
def _amax_and_transpose_launch(n: int, N: int, K: int) -> tuple[int, PreparedLaunch]:
    if N % 4:
        raise ValueError(f"transposing an FP8 payload needs M={N} to be a multiple of 4 (the FP8 GEMM: of 16)")
    num_parts = num_amax_parts(n)
    return num_parts, _amax_and_transpose.prepared(
        (cdiv(N, TILE_M) * cdiv(K, TILE_K) + num_parts,),
        *(n, num_parts, N, K, AMAX_TILE, n % AMAX_TILE == 0, TILE_M, TILE_K),
        num_warps=NUM_WARPS,
    )


def sum_partial_sums(partial_sums: Tensor) -> Tensor:
    """`layer.sum_partial_sums` in one launch, in a fixed order."""
    return sum_of_blocks(partial_sums)


def quantize_blockwise_and_sum_(x: Tensor, payload: Tensor, scales: Tensor, partial_sums: Tensor) -> Tensor:
    """`layer.quantize_blockwise_and_sum_` in one launch.

    Raises:
        ValueError: see `blockwise_triton.block_of_sizes`.
    """
    assert payload.is_contiguous() and scales.is_contiguous()
    cast = block_cast(x.numel(), payload.numel(), scales.numel(), payload.dtype)
    sums = empty_vector(partial_sums.shape[1], torch.float32, partial_sums.device)
    _blocks_and_sum_launch(cast, *partial_sums.shape)(x.contiguous(), payload, scales, partial_sums, sums)
    return sums


@lru_cache(maxsize=MOST_SHAPES)
def _blocks_and_sum_launch(cast: BlockCast, R: int, C: int) -> PreparedLaunch:
    num_sums = cdiv(C, SUM_COLUMNS)
    return _quantize_blocks_and_sum.prepared(
        (num_sums + cast.num_programs,),
        *(cast.n, cast.num_blocks, num_sums, R, C),
        *(cast.fp_max_bits, cast.rows, cast.block, cast.is_even, SUM_ROWS_AT_ONCE, SUM_COLUMNS),
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
