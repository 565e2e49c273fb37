"""The casts of one linear layer in few launches, in Triton: `layer`.

A launch has programs of several kinds. Each kind computes as in a launch of its own, so the bits are the same.
"""

# The parameters of a Triton kernel have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...dtypes import E4M3, MAX_FINITE
from ..launch import MOST_SHAPES, Launcher, PreparedLaunch
from ..memory import empty, empty_vector
from ..sizes import cdiv
from .blockwise_triton import BlockCast, block_cast, cast_blocks
from .grad_output_triton import cast_matrix
from .layer import StoredWeight
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
    transpose_tile,
)
from .vector_triton import cast_part
from .weight_triton import cast_weight_blocks, cast_weight_transposed, rows_cast, tiles_cast

_BIAS_TILE = 1024
_E4M3_MAX = MAX_FINITE[E4M3]


@Launcher
@triton.jit
def _amax_and_casts(
    x, partials, weight, scales, scale, payload, bias, bias_out, n, num_parts, num_blocks, N, num_biases,
    FP_MAX: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EVEN_BLOCKS: tl.constexpr,
    TILE: tl.constexpr, EVEN: tl.constexpr, BIAS_TILE: tl.constexpr,
):  # fmt: skip
    """Programs of the bias, of the weight and of the amax, which comes last: the cast that follows finds in L2 what it
    read. There may be none of a kind; ROWS of 0 and BIAS_TILE of 0 say so to the compiler."""
    others = tl.num_programs(0) - num_parts
    program = tl.program_id(0)
    if program >= others:
        amax_of_part(x, partials, n, program - others, num_parts, TILE, EVEN)
    elif program < num_biases:
        if BIAS_TILE > 0:
            cast_part(bias, bias_out, program, N, BIAS_TILE)
    else:
        if ROWS > 0:
            cast_weight_blocks(
                weight, scales, scale, payload, program - num_biases, num_blocks, FP_MAX, ROWS, BLOCK, EVEN_BLOCKS
            )


@Launcher
@triton.jit
def _amax_and_transpose(
    x, partials, weight, scales, scale, weight_t, n, num_parts, N, K,
    FP_MAX: tl.constexpr, BLOCK: tl.constexpr, ROW_IN_BLOCK: tl.constexpr,
    TILE: tl.constexpr, EVEN: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Programs of the weight, which is cast if it has blocks, and of the amax."""
    others = tl.num_programs(0) - num_parts
    program = tl.program_id(0)
    if program >= others:
        amax_of_part(x, partials, n, program - others, num_parts, TILE, EVEN)
    else:
        if BLOCK > 0:
            cast_weight_transposed(
                weight, scales, scale, weight_t, program, N, K, FP_MAX, BLOCK, ROW_IN_BLOCK, TILE_M, TILE_K
            )
        else:
            transpose_tile(weight, weight_t, program, N, K, TILE_M, TILE_K)


@Launcher
@triton.jit
def _quantize_blocks_and_sum(
    x, payload, scales, partial_sums, sums, n, num_blocks, num_sums, R, C,
    FP_MAX_BITS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr,
    CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program < num_sums:
        sum_columns(partial_sums, sums, program, R, C, CHUNK, COLUMNS)
    else:
        cast_blocks(x, payload, scales, program - num_sums, n, num_blocks, FP_MAX_BITS, ROWS, BLOCK, EVEN)


def quantize_layer_input(
    x: Tensor,
    weight: StoredWeight,
    bias: Tensor | None,
    dtype: torch.dtype,
    output_dtype: torch.dtype,
    scale: Tensor | None,
    power_of_two: bool,
    amax_out: Tensor | None,
    transposed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`layer.quantize_layer_input` in two launches; one if a scale is given and there is nothing beside `x`.

    Raises:
        ValueError: `transposed` with M not a multiple of 4, or see `blockwise_triton.block_of_sizes`.
    """
    x, device, stored = x.contiguous(), x.device, weight.payload
    (N, K), current, casts_weight = stored.shape, scale is None, weight.cast_scale is not None
    casts_bias = bias is not None and bias.dtype != output_dtype
    taken = room_for_scale(current, device)
    partials = used = taken if scale is None else scale
    weight_cast = empty(N, K, E4M3, device) if casts_weight else no_values(E4M3, device)
    bias_cast, num_parts = no_values(output_dtype, device), 0
    if current or casts_weight or casts_bias:
        num_biases = 0
        if bias is not None and casts_bias:
            num_biases = bias.numel()
            bias_cast = empty_vector(num_biases, output_dtype, device)
        num_blocks = weight.scales.numel() if casts_weight else 0
        num_parts, launch = _input_launch(x.numel() if current else 0, N * K, num_blocks, num_biases)
        if current:
            partials = empty_vector(num_parts, torch.int32, device)
        bias_in = bias.contiguous() if bias is not None and casts_bias else bias_cast
        cast_scale = used if weight.cast_scale is None else weight.cast_scale
        launch(x, partials, stored, weight.scales, cast_scale, weight_cast, bias_in, bias_cast)
    payload, payload_t = cast_with_scale(
        x, used, partials, num_parts, dtype, current, power_of_two, True, transposed, amax_out
    )
    return payload, payload_t, taken, weight_cast, bias_cast


@lru_cache(maxsize=MOST_SHAPES)
def _input_launch(n: int, numel: int, num_blocks: int, num_biases: int) -> tuple[int, PreparedLaunch]:
    """How many programs take the amax of `n` elements, and the launch; a number of 0 means that there is nothing."""
    num_parts, bias_programs = num_amax_parts(n), cdiv(num_biases, _BIAS_TILE)
    programs, rows, block, is_even = rows_cast(numel, num_blocks) if num_blocks else (0, 0, 0, False)
    return num_parts, _amax_and_casts.prepared(
        (bias_programs + programs + num_parts,),
        *(n, num_parts, num_blocks, num_biases, bias_programs, _E4M3_MAX, rows, block, is_even),
        *(AMAX_TILE, n % AMAX_TILE == 0, _BIAS_TILE if num_biases else 0),
        num_warps=NUM_WARPS,
        enable_fp_fusion=True,
    )


def quantize_layer_grad(
    x: Tensor,
    weight: StoredWeight,
    dtype: torch.dtype,
    scale: Tensor | None,
    power_of_two: bool,
    amax_out: Tensor | None,
    transposed: bool,
    column_sums: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`layer.quantize_layer_grad` in two launches.

    Raises:
        ValueError: M or N is not a multiple of 4, or with `column_sums` N not of 16; or see
            `blockwise_triton.block_of_sizes`.
    """
    x, device, stored = x.contiguous(), x.device, weight.payload
    (N, K), current, casts_weight = stored.shape, scale is None, weight.cast_scale is not None
    taken = room_for_scale(current, device)
    partials = used = taken if scale is None else scale
    num_blocks = weight.scales.numel() if casts_weight else 0
    num_parts, launch = _grad_launch(x.numel() if current else 0, N, K, num_blocks)
    if current:
        partials = empty_vector(num_parts, torch.int32, device)
    weight_t = empty(K, N, E4M3 if casts_weight else stored.dtype, device)
    launch(x, partials, stored, weight.scales, used if weight.cast_scale is None else weight.cast_scale, weight_t)
    if column_sums:
        payload, payload_t, sums = cast_matrix(
            x, used, partials, num_parts, dtype, current, power_of_two, amax_out, transposed
        )
    else:
        payload, payload_t = cast_with_scale(
            x, used, partials, num_parts, dtype, current, power_of_two, True, transposed, amax_out
        )
        sums = no_values(torch.float32, device).view(0, N)
    return payload, payload_t, sums, taken, weight_t


@lru_cache(maxsize=MOST_SHAPES)
def _grad_launch(n: int, N: int, K: int, num_blocks: int) -> tuple[int, PreparedLaunch]:
    """How many programs take the amax of `n` elements, and the launch; `num_blocks` is 0 for an FP8 weight."""
    if N % 4:
        raise ValueError(f"transposing an FP8 payload needs M={N} to be a multiple of 4 (the FP8 GEMM: of 16)")
    num_parts = num_amax_parts(n)
    programs, block, row_in_block = cdiv(N, TILE_M) * cdiv(K, TILE_K), 0, False
    if num_blocks:
        programs, block, row_in_block = tiles_cast(N, K, num_blocks)
    return num_parts, _amax_and_transpose.prepared(
        (programs + num_parts,),
        *(n, num_parts, N, K, _E4M3_MAX, block, row_in_block, AMAX_TILE, n % AMAX_TILE == 0, TILE_M, TILE_K),
        num_warps=NUM_WARPS,
        enable_fp_fusion=True,
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
