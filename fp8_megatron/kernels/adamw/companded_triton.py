"""`reference.adamw_step_` in Triton, bit for bit, for moments that are companded.

A code is chosen by comparing rounding remainders, so the arithmetic repeats the reference's, operation by operation,
without contraction. The time goes to its more than 200 instructions per element, not to the 9 bytes.
"""

# The parameters of a Triton kernel have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..quantize.triton import magnitude_bits
from ..rounding_triton import rounding_bits, unit_of
from ..sizes import cdiv
from .operands import AdamHyper, AdamState
from .state_triton import (
    TILE_OF_EXACT,
    Tiling,
    adam_arguments,
    chunk_size,
    fp_max_bits,
    load_tile,
    pointers,
    store_master,
    store_moment,
    tile_offsets,
)


@triton.jit
def bias_correction(num_step, log_beta):
    """1 - betaᵗ in FP32, computed in FP64 from the FP32 exponent."""
    x = (num_step * log_beta).to(tl.float64)
    # Above -1/4 the thirteenth term of the series of (eˣ - 1) / x is 2⁻⁵⁴ of the first.
    series = tl.full([], 1.0, tl.float64)
    for k in tl.static_range(13, 1, -1):
        series = 1.0 + x * (1.0 / k) * series
    return -tl.where(x < -0.25, tl.exp(x) - 1.0, x * series).to(tl.float32)


@triton.jit
def adam_change(
    g,
    p,
    exp_avg,
    exp_avg_scales,
    exp_avg_sq,
    exp_avg_sq_scales,
    start,
    offsets,
    n,
    bits,
    step_size,
    bias_correction2,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    eps,
    weight_decay,
    largest_change,
    DECOUPLED: tl.constexpr,
    EXP_AVG_SCALES: tl.constexpr,
    EXP_AVG_SQ_SCALES: tl.constexpr,
    EXP_AVG_MAX_BITS: tl.constexpr,
    EXP_AVG_SQ_MAX_BITS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """`reference.adam_change_` of a tile; moments move in place."""
    if not DECOUPLED:
        g = g + weight_decay * p
    m = load_tile(exp_avg, exp_avg_scales, start, offsets, n, beta1, EXP_AVG_SCALES, EVEN, True)
    m += one_minus_beta1 * g
    v = load_tile(exp_avg_sq, exp_avg_sq_scales, start, offsets, n, beta2, EXP_AVG_SQ_SCALES, EVEN, True)
    v += one_minus_beta2 * g * g
    store_moment(
        *(m, exp_avg, exp_avg_scales, start, offsets, n, bits),
        *(False, EXP_AVG_MAX_BITS, EXP_AVG_SCALES, EVEN),
    )
    store_moment(
        *(v, exp_avg_sq, exp_avg_sq_scales, start, offsets, n, bits),
        *(True, EXP_AVG_SQ_MAX_BITS, EXP_AVG_SQ_SCALES, EVEN),
    )
    change = tl.div_rn(step_size * m, tl.sqrt_rn(tl.div_rn(v, bias_correction2)) + eps)
    return tl.clamp(change, -largest_change, largest_change, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _companded_adamw_step(
    grad,
    grad_scales,
    exp_avg,
    exp_avg_scales,
    exp_avg_sq,
    exp_avg_sq_scales,
    master,
    master_scales,
    weight,
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
    HAS_WEIGHT: tl.constexpr,
    HAS_CHUNK_AMAX: tl.constexpr,
    GRAD_SCALES: tl.constexpr,
    EXP_AVG_SCALES: tl.constexpr,
    EXP_AVG_SQ_SCALES: tl.constexpr,
    MASTER_SCALES: tl.constexpr,
    EXP_AVG_MAX_BITS: tl.constexpr,
    EXP_AVG_SQ_MAX_BITS: tl.constexpr,
    MASTER_MAX_BITS: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    UNIT: tl.constexpr,
    GAPS: tl.constexpr,
):
    TILE: tl.constexpr = ROWS * SPLIT * BLOCK
    MASTER_ROUNDS: tl.constexpr = master.dtype.element_ty != tl.float32
    factor = tl.load(grad_factor)
    if tl.abs(factor) < float("inf"):  # false for a NaN too: the step is skipped
        num_step = tl.load(step)
        step_size = tl.div_rn(1.0, bias_correction(num_step, log_beta1)) * lr
        bias_correction2 = bias_correction(num_step, log_beta2)
        offsets = tile_offsets(SPLIT, ROWS, BLOCK)
        largest = tl.zeros(offsets.shape, tl.float32)
        for tile in range(TILES):
            start = (tl.program_id(0).to(tl.int64) * TILES + tile) * TILE
            key, number, left, width, gap = unit_of(places, start, n, num_step, offsets, UNIT, TILE)
            bits = rounding_bits(key, number, left, width, gap, 0, offsets, GAPS)
            g = load_tile(grad, grad_scales, start, offsets, n, factor, GRAD_SCALES, EVEN, True)
            p = load_tile(master, master_scales, start, offsets, n, 1.0, MASTER_SCALES, EVEN, True)
            change = adam_change(
                g,
                p,
                exp_avg,
                exp_avg_scales,
                exp_avg_sq,
                exp_avg_sq_scales,
                start,
                offsets,
                n,
                bits,
                step_size,
                bias_correction2,
                beta1,
                one_minus_beta1,
                beta2,
                one_minus_beta2,
                eps,
                weight_decay,
                largest_change,
                DECOUPLED,
                EXP_AVG_SCALES,
                EXP_AVG_SQ_SCALES,
                EXP_AVG_MAX_BITS,
                EXP_AVG_SQ_MAX_BITS,
                EVEN,
            )
            if MASTER_ROUNDS:
                change = shrink * p + change
            else:
                p = p * decay
            stored = store_master(
                *(p, -change, master, master_scales, start, offsets, n, bits),
                *(MASTER_MAX_BITS, MASTER_SCALES, EVEN),
            )
            if HAS_WEIGHT:
                if EVEN:
                    tl.store(weight + start + offsets, stored.to(weight.dtype.element_ty))
                else:
                    tl.store(weight + start + offsets, stored.to(weight.dtype.element_ty), mask=start + offsets < n)
            if HAS_CHUNK_AMAX:
                largest = tl.maximum(largest, tl.abs(stored), propagate_nan=tl.PropagateNan.ALL)
        if HAS_CHUNK_AMAX:
            tl.store(chunk_amax + tl.program_id(0), tl.max(magnitude_bits(largest)).to(tl.float32, bitcast=True))


def companded_adamw_step_(
    state: AdamState,
    hyper: AdamHyper,
    grad_factor: Tensor,
    step: Tensor,
    weight: Tensor | None,
    chunk_amax: Tensor | None,
) -> None:
    """`reference.adamw_step_`, one launch.

    Raises:
        ValueError: more than two sizes of scale block, or chunks that are not whole blocks.
    """
    master = state.master.payload
    n = master.numel()
    operands = state[:4]
    tiling = Tiling.of(operands, chunk_size(n, chunk_amax), TILE_OF_EXACT)
    places, unit, gaps = tiling.places(n, state.places, master)
    _companded_adamw_step[(cdiv(n, tiling.chunk),)](
        *pointers(operands),
        master if weight is None else weight,
        master if chunk_amax is None else chunk_amax,
        places,
        grad_factor,
        step,
        n,
        *adam_arguments(hyper, state.exp_avg, state.exp_avg_sq),
        hyper.decoupled,
        weight is not None,
        chunk_amax is not None,
        *tiling.kinds,
        *fp_max_bits(state.exp_avg, state.exp_avg_sq, state.master),
        *tiling.shape,
        n % tiling.chunk == 0,
        unit,
        gaps,
        num_warps=tiling.num_warps,
        enable_fp_fusion=False,
    )
