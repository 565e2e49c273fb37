"""Activations fused with their casts to FP8 with scales of blocks, and their backward, in Triton: the operators of
`activation`, and of experts' activations (`grouped`), whose rows have probabilities.

Bytes per element of a 16-bit activation, of one input / gated, beside 4/128 for each payload's scales: forward 3 / 5;
backward 4 + 3 / 6 + 5. The layouts of backward have different scales, so programs cast some rows of a tile of 128×128
for one, or some of its columns for the other, as in `quantize.blocks_triton`: neighbours, of which one finds the input
in L2. Column sums and the probabilities' gradients cost 4 bytes for each 128 elements. Programs whose rows belong to no
expert return.
"""

# The parameters of a Triton kernel have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...activation_functions import Activation
from ...dtypes import GEMM_BLOCK, MAX_FINITE
from ..launch import MOST_SHAPES, PreparedLaunch
from ..quantize.blocks import block_scales_shape
from ..quantize.blocks_triton import cast_block_rows, cast_transposed
from ..quantize.triton import load_inside, no_values, sum_of_programs
from ..shapes import cdiv, empty
from .reference import NO_EXPERTS, ExpertRows
from .triton import constant, value_and_derivatives, value_of, weighted

#: Rows, or columns, of a tile that a program casts. Few in backward, so that several programs fit on a multiprocessor.
_PART, _BACKWARD_PART = 32, 16
_NUM_WARPS = 4
#: Neighbouring columns that a thread loads, of those that it casts along rows. Fewer leave it fewer columns to scale.
_TOGETHER = 2


@triton.jit
def _inputs(z, offsets, mask, F, KIND: tl.constexpr, EVEN: tl.constexpr):
    """(z, z), or (gate, up), in FP32."""
    first = load_inside(z + offsets, mask, EVEN).to(tl.float32)
    second = first
    if KIND[1]:
        second = load_inside(z + F + offsets, mask, EVEN).to(tl.float32)
    return first, second


@triton.jit
def _activate(
    z, probs, offsets, payload, scales, T, F, E,
    FP_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, KIND: tl.constexpr, EXPERTS: tl.constexpr, EVEN: tl.constexpr,
    BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """A block of PART rows. `EXPERTS`: the rows end at offsets[E], and each has its probability."""
    blocks = F // BLOCK
    first_row, block = tl.program_id(0) // blocks * PART, tl.program_id(0) % blocks
    end = tl.load(offsets + E) if EXPERTS else T
    if first_row >= end:
        return
    rows = first_row + tl.arange(0, PART)[:, None]
    columns = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    width = 2 * F if KIND[1] else F
    first, second = _inputs(z, rows.to(tl.int64) * width + columns, rows < T, F, KIND, EVEN)
    values = weighted(value_of(first, second, KIND), probs, rows, EXPERTS)
    cast_block_rows(values, payload, scales, rows, block, T, F, FP_MAX, POWER_OF_TWO, EVEN, BLOCK)


@triton.jit
def _grads(
    grad, z, probs, offsets, z_offsets, rows, mask, F, KIND: tl.constexpr, EXPERTS: tl.constexpr, EVEN: tl.constexpr
):
    """The activation, times the probability of its row; the gradients of z's halves; and grad times activation."""
    first, second = _inputs(z, z_offsets, mask, F, KIND, EVEN)
    g = load_inside(grad + offsets, mask, EVEN).to(tl.float32)
    value, d_first, d_second = value_and_derivatives(first, second, KIND)
    product = g * value
    g = weighted(g, probs, rows, EXPERTS)
    return weighted(value, probs, rows, EXPERTS), g * d_first, g * d_second, product


@triton.jit
def _backward_rows(
    grad, z, probs, payload, scales, sums, T, F, width, first_row, block,
    FP_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, KIND: tl.constexpr, EXPERTS: tl.constexpr, EVEN: tl.constexpr,
    BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """PART rows of one block each; grad, z and probs begin at the first row."""
    lane = tl.arange(0, PART)[:, None]
    columns = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    rows = first_row + lane
    _, g_first, g_second, product = _grads(
        grad, z, probs, lane * F + columns, lane * width + columns, lane, rows < T, F, KIND, EXPERTS, EVEN
    )
    if EXPERTS:
        tl.store(sums + tl.cast(block, tl.int64) * T + rows, tl.sum(product, axis=1, keep_dims=True))
    cast_block_rows(g_first, payload, scales, rows, block, T, width, FP_MAX, POWER_OF_TWO, EVEN, BLOCK)
    if KIND[1]:
        second = F // BLOCK + block
        cast_block_rows(g_second, payload, scales, rows, second, T, width, FP_MAX, POWER_OF_TWO, EVEN, BLOCK)


@triton.jit
def _backward_columns(
    grad, z, probs, payload_t, scales_t, activation_t, activation_scales, sums, T, F, width, tile_m, k0,
    FP_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, SUM_COLUMNS: tl.constexpr, KIND: tl.constexpr,
    EXPERTS: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """PART columns of one block each, transposed; grad, z and probs begin at the first row. A thread loads `TOGETHER`
    columns at a time."""
    lane = 4 * tl.arange(0, BLOCK // 4)[:, None]
    columns = k0 + tl.max_contiguous(tl.arange(0, PART), TOGETHER)[None, :]
    inside = tile_m * BLOCK + lane < T  # T is a multiple of 4: four rows are in or out together
    at, z_at = lane * F + columns, lane * width + columns
    a0, f0, s0, _ = _grads(grad, z, probs, at, z_at, lane, inside, F, KIND, EXPERTS, EVEN)
    a1, f1, s1, _ = _grads(grad + F, z + width, probs + 1, at, z_at, lane, inside, F, KIND, EXPERTS, EVEN)
    a2, f2, s2, _ = _grads(grad + 2 * F, z + 2 * width, probs + 2, at, z_at, lane, inside, F, KIND, EXPERTS, EVEN)
    a3, f3, s3, _ = _grads(grad + 3 * F, z + 3 * width, probs + 3, at, z_at, lane, inside, F, KIND, EXPERTS, EVEN)
    cast_transposed(
        a0, a1, a2, a3, activation_t, activation_scales, T, F, tile_m, k0, FP_MAX, POWER_OF_TWO, EVEN, BLOCK, PART
    )  # fmt: skip
    cast_transposed(
        f0, f1, f2, f3, payload_t, scales_t, T, width, tile_m, k0, FP_MAX, POWER_OF_TWO, EVEN, BLOCK, PART
    )  # fmt: skip
    if KIND[1]:
        cast_transposed(
            s0, s1, s2, s3, payload_t, scales_t, T, width, tile_m, F + k0, FP_MAX, POWER_OF_TWO, EVEN, BLOCK, PART
        )  # fmt: skip
    if SUM_COLUMNS:
        base = sums + tl.cast(tile_m, tl.int64) * width + k0 + tl.arange(0, PART)
        tl.store(base, tl.sum((f0 + f1) + (f2 + f3), axis=0))
        if KIND[1]:
            tl.store(base + F, tl.sum((s0 + s1) + (s2 + s3), axis=0))


@triton.jit
def _activate_backward(
    grad, z, probs, offsets, payload, scales, payload_t, scales_t, activation_t, activation_scales, sums, T, F, E,
    FP_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, SUM_COLUMNS: tl.constexpr, KIND: tl.constexpr,
    EXPERTS: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """A part of one layout of a tile of BLOCK rows and columns. A tile's programs are neighbours; odd ones write the
    transposes. sums: with `EXPERTS` FP32 [F / BLOCK, T], grad times activation of a block's columns; with `SUM_COLUMNS`
    FP32 [tiles of rows, width]. Offsets inside a tile are 32 bits."""
    PARTS: tl.constexpr = BLOCK // PART
    width = 2 * F if KIND[1] else F
    block, part, tile_m = tl.program_id(0) // (2 * PARTS), tl.program_id(0) // 2 % PARTS, tl.program_id(1)
    end = tl.load(offsets + E) if EXPERTS else T
    if tile_m * BLOCK >= end:
        return
    is_rows = tl.program_id(0) % 2 == 0
    first_row = tile_m * BLOCK + (part * PART if is_rows else 0)
    grad += tl.cast(first_row, tl.int64) * F
    z += tl.cast(first_row, tl.int64) * width
    probs += first_row
    if is_rows:
        _backward_rows(
            grad, z, probs, payload, scales, sums, T, F, width, first_row, block,
            FP_MAX, POWER_OF_TWO, KIND, EXPERTS, EVEN, BLOCK, PART,
        )  # fmt: skip
    else:
        _backward_columns(
            grad, z, probs, payload_t, scales_t, activation_t, activation_scales, sums, T, F, width, tile_m,
            block * BLOCK + part * PART, FP_MAX, POWER_OF_TWO, SUM_COLUMNS, KIND, EXPERTS, EVEN, BLOCK, PART, TOGETHER,
        )  # fmt: skip


def activation_quantize_blocks(
    z: Tensor, activation: Activation, dtype: torch.dtype, power_of_two: bool
) -> tuple[Tensor, Tensor]:
    """`reference.activation_quantize_blocks` in one launch."""
    return quantize_rows_in_blocks(z, activation, dtype, power_of_two, NO_EXPERTS)


def quantize_rows_in_blocks(
    z: Tensor, activation: Activation, dtype: torch.dtype, power_of_two: bool, experts: ExpertRows
) -> tuple[Tensor, Tensor]:
    """`activation_quantize_blocks`, of experts too."""
    T, F = len(z), z.shape[1] // activation.row.num_inputs
    payload, scales = _blocks(T, F, dtype, z.device)
    launch, _ = _launches(T, F, _num_experts(experts), MAX_FINITE[dtype], power_of_two, False, constant(activation))
    launch(z.contiguous(), *_operands(experts, z.device), payload, scales)
    return payload, scales


def activation_backward_quantize_blocks(
    grad: Tensor, z: Tensor, activation: Activation, dtype: torch.dtype, column_sums: bool, power_of_two: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`reference.activation_backward_quantize_blocks`: one launch, and one that adds up the tiles' column sums."""
    return backward_quantize_rows_in_blocks(grad, z, activation, dtype, column_sums, power_of_two, NO_EXPERTS)


def backward_quantize_rows_in_blocks(
    grad: Tensor,
    z: Tensor,
    activation: Activation,
    dtype: torch.dtype,
    column_sums: bool,
    power_of_two: bool,
    experts: ExpertRows,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`activation_backward_quantize_blocks`, of experts too: then the sums are the probabilities' gradients, [T]."""
    (T, Z), F = z.shape, grad.shape[1]
    device = z.device
    outputs = (*_blocks(T, Z, dtype, device), *_blocks(Z, T, dtype, device), *_blocks(F, T, dtype, device))
    num_sums = (
        (F // GEMM_BLOCK, T) if experts.probs is not None else (cdiv(T, GEMM_BLOCK), Z) if column_sums else (1, 0)
    )
    sums = empty(*num_sums, torch.float32, device)
    _, launch = _launches(
        T, F, _num_experts(experts), MAX_FINITE[dtype], power_of_two, column_sums, constant(activation)
    )
    launch(grad.contiguous(), z.contiguous(), *_operands(experts, device), *outputs, sums)
    return *outputs, sum_of_programs(sums[None])[0]


def _num_experts(experts: ExpertRows) -> int:
    return 0 if experts.offsets is None else len(experts.offsets) - 1


def _operands(experts: ExpertRows, device: torch.device) -> tuple[Tensor, Tensor]:
    none = no_values(torch.float32, device)
    return none if experts.probs is None else experts.probs, none if experts.offsets is None else experts.offsets


def _blocks(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    return empty(rows, columns, dtype, device), empty(*block_scales_shape(rows, columns), torch.float32, device)


@lru_cache(maxsize=MOST_SHAPES)
def _launches(
    T: int,
    F: int,
    num_experts: int,
    fp_max: float,
    power_of_two: bool,
    column_sums: bool,
    kind: tuple[str | float, ...],
) -> tuple[PreparedLaunch, PreparedLaunch]:
    """Forward and backward."""
    cast = (T, F, num_experts, fp_max, power_of_two)
    rows = (kind, num_experts > 0, T % GEMM_BLOCK == 0, GEMM_BLOCK)
    tiles, blocks = cdiv(T, GEMM_BLOCK), F // GEMM_BLOCK
    return (
        PreparedLaunch(
            _activate,
            (tiles * blocks * (GEMM_BLOCK // _PART),),
            *(*cast, *rows, _PART),
            num_warps=_NUM_WARPS,
            enable_fp_fusion=True,
        ),
        PreparedLaunch(
            _activate_backward,
            (2 * blocks * (GEMM_BLOCK // _BACKWARD_PART), tiles),
            *(*cast, column_sums, *rows, _BACKWARD_PART, _TOGETHER),
            num_warps=_NUM_WARPS,
            enable_fp_fusion=True,
        ),
    )
