"""`split_master.adamw_split_step_` in Triton: FP8 weights with a byte of correction, one pass.

Quotients and roots are approximate (`triton.adam_change`); the rest is exact.

A master is a count of 15 bits and a sign (E4M11). Joining and splitting are integer arithmetic. Shifted to FP32's bit
position, the count is a float; multiplying it by 2¹²⁰ gives the right exponent, for subnormal numbers too.
"""

# The parameters of a Triton kernel have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..companding_triton import integer
from ..quantize.triton import reciprocal
from ..rounding import E4M11
from ..rounding_triton import round_sum_to_grid, rounding_bits, unit_of
from ..shapes import cdiv
from .reference import AdamHyper, SplitAdamState
from .state_triton import (
    TILE_OF_ROUNDED,
    Tiling,
    adam_arguments,
    chunk_size,
    fp_max_bits,
    load_tile,
    pointers,
    tile_offsets,
)
from .triton import adam_change, step_factors

MANTISSA_BITS = tl.constexpr(E4M11.mantissa_bits)
SMALLEST_NORMAL = tl.constexpr(2.0**E4M11.smallest_exponent)
_INF_BITS = tl.constexpr(0x7F800000)
# The count of 448, and the count that represents NaN: E4M3's NaN without a correction.
_LARGEST_COUNT = tl.constexpr(0x7E00)
_NAN_COUNT = tl.constexpr(0x7F00)
_ADOPTED = 1024


@triton.jit
def value_of_count(count, sign, scale):
    """FP32 values of int32 counts and sign bits; NaN above 448's count."""
    value = ((count << 12) | sign).to(tl.float32, bitcast=True) * 1.329227995784916e36 * scale
    return tl.where(count > _LARGEST_COUNT, float("nan"), value)


@triton.jit
def join_master(code, correction, scale):
    """`split_master.join_master` of E4M3 codes (uint8) and corrections (int8)."""
    code = code.to(tl.int32)
    return value_of_count(((code & 0x7F) << 8) + correction.to(tl.int32), (code & 0x80) << 24, scale)


@triton.jit
def split_master(value, inverse):
    """`split_master.split_master` of E4M11 numbers times a scale, given its reciprocal: codes (uint8), corrections
    (int8), int32 counts."""
    bits = (value * inverse).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    is_nan = ((value.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >= _INF_BITS) | (bits > _INF_BITS)
    magnitude = tl.minimum(tl.where(is_nan, 0, bits), 0x43E00000).to(tl.float32, bitcast=True)
    exponent = tl.maximum((magnitude.to(tl.int32, bitcast=True) >> 23) - 120, 1)
    units = magnitude * ((145 - exponent) << 23).to(tl.float32, bitcast=True)  # · 2¹⁸⁻ᵉ
    count = integer(units) + ((exponent - 1) << 11)
    count = tl.where(is_nan, _NAN_COUNT, count)
    code = (count + 128) >> 8
    correction = (count - (code << 8)).to(tl.int8)
    sign = (value.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (code | sign).to(tl.uint8), correction, count


@triton.jit
def _adamw_split_step(
    grad,
    grad_scales,
    exp_avg,
    exp_avg_scales,
    exp_avg_sq,
    exp_avg_sq_scales,
    weight,
    correction,
    weight_scales,
    new_weight_scales,
    chunk_tensor,
    chunk_amax,
    places,
    grad_factor,
    step,
    n,
    lr,
    beta1,
    one_minus_beta1,
    log_beta1,
    beta2,
    one_minus_beta2,
    log_beta2,
    eps,
    weight_decay,
    decay,
    shrink,
    largest_change,
    DECOUPLED: tl.constexpr,
    GRAD_SCALES: tl.constexpr,
    EXP_AVG_SCALES: tl.constexpr,
    EXP_AVG_SQ_SCALES: tl.constexpr,
    EXP_AVG_MAX_BITS: tl.constexpr,
    EXP_AVG_SQ_MAX_BITS: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    GAPS: tl.constexpr,
):
    """`split_master.adamw_split_step_` of one chunk of n elements: `TILES` tiles of ROWS · SPLIT · BLOCK.

    The master is `weight` (E4M3 codes) with `correction` (int8). It is read with the scale of its tensor in
    `weight_scales`, and written with that in `new_weight_scales`, both FP32; `chunk_tensor` says which tensor the
    chunk is of. `chunk_amax` FP32 [chunks] gets the largest magnitude. If `grad_factor` FP32 [1] is not finite, nothing
    is written.
    """
    TILE: tl.constexpr = ROWS * SPLIT * BLOCK
    factor = tl.load(grad_factor)
    if tl.abs(factor) < float("inf"):  # false for a NaN too: the step is skipped
        num_step = tl.load(step)
        per_root, eps_per_step = step_factors(num_step, lr, log_beta1, log_beta2, eps)
        tensor = tl.load(chunk_tensor + tl.program_id(0))
        old_scale = tl.load(weight_scales + tensor)
        new_scale = tl.load(new_weight_scales + tensor)
        inverse = reciprocal(new_scale)
        offsets = tile_offsets(SPLIT, ROWS, BLOCK)
        largest = tl.full([], 0, tl.int32)
        # With one place for all tiles and one maximum after them it took 1,560 µs for 2²⁸ elements on H200, not 1,400.
        for tile in range(TILES):
            start = (tl.program_id(0).to(tl.int64) * TILES + tile) * TILE
            key, number, left, width, gap = unit_of(places, start, n, num_step, offsets, UNIT, TILE)
            bits = rounding_bits(key, number, left, width, gap, 0, offsets, GAPS)
            g = load_tile(grad, grad_scales, start, offsets, n, factor, GRAD_SCALES, True)
            p = join_master(tl.load(weight + start + offsets), tl.load(correction + start + offsets), old_scale)
            change = adam_change(
                *(g, p, exp_avg, exp_avg_scales, exp_avg_sq, exp_avg_sq_scales, start, offsets, n, bits),
                *(per_root, eps_per_step, beta1, one_minus_beta1, beta2, one_minus_beta2, weight_decay, largest_change),
                *(DECOUPLED, True, EXP_AVG_SCALES, EXP_AVG_SQ_SCALES, EXP_AVG_MAX_BITS, EXP_AVG_SQ_MAX_BITS, True),
            )
            change -= shrink * p
            p = round_sum_to_grid(p, change, bits, new_scale * SMALLEST_NORMAL, MANTISSA_BITS)
            code, rest, count = split_master(p, inverse)
            tl.store(weight + start + offsets, code)
            tl.store(correction + start + offsets, rest)
            largest = tl.maximum(largest, tl.max(count))
        tl.store(chunk_amax + tl.program_id(0), value_of_count(largest, 0, new_scale))


@triton.jit
def _adopt_scales(weight_scales, new_weight_scales, grad_factor, num_tensors, TILE: tl.constexpr):
    if tl.abs(tl.load(grad_factor)) < float("inf"):
        offsets = tl.program_id(0) * TILE + tl.arange(0, TILE)
        mask = offsets < num_tensors
        tl.store(weight_scales + offsets, tl.load(new_weight_scales + offsets, mask=mask), mask=mask)


def adamw_split_step_(
    state: SplitAdamState, hyper: AdamHyper, grad_factor: Tensor, step: Tensor, chunk_amax: Tensor
) -> None:
    """`split_master.adamw_split_step_` in two launches: the step, one program a chunk; then the scales it wrote with.

    The second cannot be part of the first, because programs of the first still read the old scales.

    Raises:
        ValueError: more than two sizes of scale block, or chunks that are not whole blocks.
    """
    n = state.weight.numel()
    operands = (state.grad, state.exp_avg, state.exp_avg_sq)
    chunk_tensor, weight_scales, new_weight_scales = state.chunk_tensor, state.weight_scales, state.new_weight_scales
    tiling = Tiling.of(operands, chunk_size(n, chunk_tensor), TILE_OF_ROUNDED)
    places, unit, gaps = tiling.places(n, state.places, chunk_tensor)
    _adamw_split_step[(chunk_tensor.numel(),)](
        *pointers(operands),
        state.weight.view(torch.uint8),
        state.correction,
        weight_scales,
        new_weight_scales,
        chunk_tensor,
        chunk_amax,
        places,
        grad_factor,
        step,
        n,
        *adam_arguments(hyper, state.exp_avg, state.exp_avg_sq),
        hyper.decoupled,
        *tiling.kinds,
        *fp_max_bits(state.exp_avg, state.exp_avg_sq),
        *tiling.shape,
        unit,
        gaps,
        num_warps=tiling.num_warps,
        enable_fp_fusion=True,
    )
    num_tensors = weight_scales.numel()
    _adopt_scales[(cdiv(num_tensors, _ADOPTED),)](
        weight_scales, new_weight_scales, grad_factor, num_tensors, _ADOPTED, enable_fp_fusion=True
    )
