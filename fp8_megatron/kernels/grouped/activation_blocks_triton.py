"""Experts' activations fused with their casts to FP8 with scales of blocks, and their backward.

Bytes per element of a 16-bit activation, of one input / gated, beside 4/128 for each payload's scales: forward 3 / 5;
backward 4 + 3 / 6 + 5, and 4 for each row and 128 columns (the probabilities' gradients). The layouts of backward have
different scales, so programs cast some rows of a tile of 128×128 for one, or some of its columns for the other, as in
`quantize.blocks_triton`: neighbours, of which one finds the input in L2. Programs whose rows belong to nobody return.
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
from ..activation.triton import constant, load_inputs, value_and_derivatives, value_of, weighted
from ..launch import MOST_SHAPES, PreparedLaunch
from ..quantize.blocks import block_scales_shape
from ..quantize.blocks_triton import cast_transposed
from ..quantize.triton import encode, magnitude_bits, reciprocal, scale_from_amax_bits, sum_of_programs
from ..shapes import empty

#: Rows, or columns, of a tile that a program casts.
_PART = 32
_NUM_WARPS = 4


@triton.jit
def _cast_rows(
    values,
    payload,
    scales,
    rows,
    block,
    R,
    width,
    FP_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of some rows of payload [R, width], and its scales in [width / BLOCK, R]."""
    scale = scale_from_amax_bits(tl.max(magnitude_bits(values), axis=1, keep_dims=True), FP_MAX, POWER_OF_TWO)
    columns = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    encoded = encode(values, reciprocal(scale), FP_MAX, payload.dtype.element_ty)
    tl.store(payload + rows.to(tl.int64) * width + columns, encoded)
    tl.store(scales + tl.cast(block, tl.int64) * R + rows, scale)


@triton.jit
def _activate(
    z, probs, offsets, payload, scales, R, F, E,
    FP_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """A block of PART rows."""
    blocks = F // BLOCK
    first_row, block = tl.program_id(0) // blocks * PART, tl.program_id(0) % blocks
    if first_row < tl.load(offsets + E):
        rows = first_row + tl.arange(0, PART)[:, None]
        columns = block * BLOCK + tl.arange(0, BLOCK)[None, :]
        first, second = load_inputs(z, rows, columns, columns < F, F, KIND)
        values = weighted(value_of(first, second, KIND), probs, rows, True)
        _cast_rows(values, payload, scales, rows, block, R, F, FP_MAX, POWER_OF_TWO, BLOCK)


@triton.jit
def _grads(grad, z, probs, rows, columns, F, KIND: tl.constexpr):
    """Activation times probability, the gradients of z's halves, and grad times activation."""
    first, second = load_inputs(z, rows, columns, columns < F, F, KIND)
    g = tl.load(grad + rows.to(tl.int64) * F + columns).to(tl.float32)
    value, d_first, d_second = value_and_derivatives(first, second, KIND)
    product = g * value
    g = weighted(g, probs, rows, True)
    return weighted(value, probs, rows, True), g * d_first, g * d_second, product


@triton.jit
def _backward_rows(
    grad, z, probs, payload, scales, sums, R, F, width, first_row, block,
    FP_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """PART rows of one block each."""
    rows = first_row + tl.arange(0, PART)[:, None]
    columns = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    _, g_first, g_second, product = _grads(grad, z, probs, rows, columns, F, KIND)
    tl.store(sums + tl.cast(block, tl.int64) * R + rows, tl.sum(product, axis=1, keep_dims=True))
    _cast_rows(g_first, payload, scales, rows, block, R, width, FP_MAX, POWER_OF_TWO, BLOCK)
    if KIND[1]:
        _cast_rows(g_second, payload, scales, rows, F // BLOCK + block, R, width, FP_MAX, POWER_OF_TWO, BLOCK)


@triton.jit
def _backward_columns(
    grad, z, probs, payload_t, scales_t, activation_t, activation_scales, R, F, width, tile_m, k0,
    FP_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """PART columns of one block each, transposed."""
    rows = tile_m * BLOCK + 4 * tl.arange(0, BLOCK // 4)[:, None]
    columns = k0 + tl.arange(0, PART)[None, :]
    a0, f0, s0, _ = _grads(grad, z, probs, rows, columns, F, KIND)
    a1, f1, s1, _ = _grads(grad, z, probs, rows + 1, columns, F, KIND)
    a2, f2, s2, _ = _grads(grad, z, probs, rows + 2, columns, F, KIND)
    a3, f3, s3, _ = _grads(grad, z, probs, rows + 3, columns, F, KIND)
    cast_transposed(
        a0, a1, a2, a3, activation_t, activation_scales, R, F, tile_m, k0, FP_MAX, POWER_OF_TWO, True, BLOCK, PART
    )  # fmt: skip
    cast_transposed(
        f0, f1, f2, f3, payload_t, scales_t, R, width, tile_m, k0, FP_MAX, POWER_OF_TWO, True, BLOCK, PART
    )  # fmt: skip
    if KIND[1]:
        cast_transposed(
            s0, s1, s2, s3, payload_t, scales_t, R, width, tile_m, F + k0, FP_MAX, POWER_OF_TWO, True, BLOCK, PART
        )  # fmt: skip


@triton.jit
def _activate_backward(
    grad, z, probs, offsets, payload, scales, payload_t, scales_t, activation_t, activation_scales, sums, R, F, E,
    FP_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """A part of one layout of a tile of BLOCK rows and columns. A tile's programs are neighbours; odd ones write the
    transposes. sums FP32 [F / BLOCK, R]: grad times activation, of a block's columns."""
    PARTS: tl.constexpr = BLOCK // PART
    width = 2 * F if KIND[1] else F
    tile, part = tl.program_id(0) // (2 * PARTS), tl.program_id(0) // 2 % PARTS
    tile_m, block = tile // (F // BLOCK), tile % (F // BLOCK)
    if tile_m * BLOCK < tl.load(offsets + E):
        if tl.program_id(0) % 2 == 0:
            _backward_rows(
                grad, z, probs, payload, scales, sums, R, F, width, tile_m * BLOCK + part * PART, block,
                FP_MAX, POWER_OF_TWO, KIND, BLOCK, PART,
            )  # fmt: skip
        else:
            _backward_columns(
                grad, z, probs, payload_t, scales_t, activation_t, activation_scales, R, F, width, tile_m,
                block * BLOCK + part * PART, FP_MAX, POWER_OF_TWO, KIND, BLOCK, PART,
            )  # fmt: skip


def expert_activation_quantize_blocks(
    z: Tensor, probs: Tensor, offsets: Tensor, activation: Activation, dtype: torch.dtype, power_of_two: bool
) -> tuple[Tensor, Tensor]:
    """`activation_reference.expert_activation_quantize_blocks` in one launch."""
    R, F = len(z), z.shape[1] // activation.row.num_inputs
    payload, scales = _blocks(R, F, dtype, z.device)
    launch, _ = _launches(R, F, len(offsets) - 1, MAX_FINITE[dtype], power_of_two, constant(activation))
    launch(z.contiguous(), probs, offsets, payload, scales)
    return payload, scales


def expert_activation_backward_quantize_blocks(
    grad: Tensor,
    z: Tensor,
    probs: Tensor,
    offsets: Tensor,
    activation: Activation,
    dtype: torch.dtype,
    power_of_two: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`activation_reference.expert_activation_backward_quantize_blocks`: one launch, and one that adds up the blocks'
    gradients of probabilities."""
    (R, Z), F = z.shape, grad.shape[1]
    outputs = (*_blocks(R, Z, dtype, z.device), *_blocks(Z, R, dtype, z.device), *_blocks(F, R, dtype, z.device))
    sums = empty(F // GEMM_BLOCK, R, torch.float32, z.device)
    _, launch = _launches(R, F, len(offsets) - 1, MAX_FINITE[dtype], power_of_two, constant(activation))
    launch(grad.contiguous(), z.contiguous(), probs, offsets, *outputs, sums)
    return *outputs, sum_of_programs(sums[None])[0]


def _blocks(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    return empty(rows, columns, dtype, device), empty(*block_scales_shape(rows, columns), torch.float32, device)


@lru_cache(maxsize=MOST_SHAPES)
def _launches(
    R: int, F: int, num_experts: int, fp_max: float, power_of_two: bool, kind: tuple[str | float, ...]
) -> tuple[PreparedLaunch, PreparedLaunch]:
    """Forward and backward."""
    numbers = (R, F, num_experts, fp_max, power_of_two, kind, GEMM_BLOCK, _PART)
    blocks = R // _PART * (F // GEMM_BLOCK)
    return (
        PreparedLaunch(_activate, (blocks,), *numbers, num_warps=_NUM_WARPS, enable_fp_fusion=True),
        PreparedLaunch(_activate_backward, (2 * blocks,), *numbers, num_warps=_NUM_WARPS, enable_fp_fusion=True),
    )
