"""The fused optimizer in Triton: `reference.adamw_step_` and `derive_fp8_weights_`.

A step reads and writes every operand once (12 bytes a parameter at level O3, without scales). One program therefore
owns whole scale blocks of every operand and, if the new master's amax is requested, one whole chunk. On Hopper
arithmetic limits O3: some 65 instructions an element, of which 29 share the pipe of integers, minima and maxima, which
takes one every second cycle.
"""

# The parameters of a Triton kernel have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from ...dtypes import MAX_FINITE
from ..quantize.triton import encode, magnitude_bits, reciprocal
from ..rounding_triton import rounding_bits, unit_of
from ..shapes import cdiv
from .reference import AdamHyper, AdamState, FlatState
from .state_triton import (
    TILE_OF_FLOATS,
    TILE_OF_ROUNDED,
    Tiling,
    adam_arguments,
    chunk_size,
    fp_max_bits,
    load_tile,
    pointers,
    rounds,
    store_master,
    store_moment,
    tile_offsets,
)

# A learning rate below its reciprocal, 1e-17, moves nothing. With a larger one no divisor is beyond FP32's range.
_MOST_PER_STEP = tl.constexpr(1e17)


@triton.jit
def step_factors(num_step, lr, log_beta1, log_beta2, eps):
    """`per_root` and `eps_per_step` of ``-m / (√v · per_root + eps_per_step)``, Adam's change.

    The step size is inside the divisor.
    """
    per_step = -_expm1(num_step * log_beta1) / lr
    moves = per_step < _MOST_PER_STEP
    per_root = tl.where(moves, per_step / tl.sqrt(-_expm1(num_step * log_beta2)), 0.0)
    return per_root, tl.where(moves, eps * per_step, float("inf"))


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
    per_root,
    eps_per_step,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    weight_decay,
    largest_change,
    DECOUPLED: tl.constexpr,
    ROUNDS: tl.constexpr,
    EXP_AVG_SCALES: tl.constexpr,
    EXP_AVG_SQ_SCALES: tl.constexpr,
    EXP_AVG_MAX_BITS: tl.constexpr,
    EXP_AVG_SQ_MAX_BITS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """What a tile's parameters `p` move by, without decoupled decay; its moments move in place."""
    if not DECOUPLED:
        g += weight_decay * p
    m = load_tile(exp_avg, exp_avg_scales, start, offsets, n, beta1, EXP_AVG_SCALES, EVEN) + one_minus_beta1 * g
    v = load_tile(exp_avg_sq, exp_avg_sq_scales, start, offsets, n, beta2, EXP_AVG_SQ_SCALES, EVEN)
    v += one_minus_beta2 * g * g
    store_moment(
        *(m, exp_avg, exp_avg_scales, start, offsets, n, bits),
        *(False, EXP_AVG_MAX_BITS, EXP_AVG_SCALES, EVEN),
    )
    store_moment(
        *(v, exp_avg_sq, exp_avg_sq_scales, start, offsets, n, bits),
        *(True, EXP_AVG_SQ_MAX_BITS, EXP_AVG_SQ_SCALES, EVEN),
    )
    change = libdevice.fast_dividef(m, -tl.sqrt(v) * per_root - eps_per_step)
    if ROUNDS:
        change = tl.clamp(change, -largest_change, largest_change, propagate_nan=tl.PropagateNan.ALL)
    return change


@triton.jit
def _adamw_step(
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
    ROUNDS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """`reference.adamw_step_` of `TILES` tiles of ROWS · SPLIT · BLOCK elements, of the n of flat operands.

    `weight` gets the new master in its own dtype, `chunk_amax` FP32 [programs] the largest magnitude of it. A gradient
    is multiplied by `grad_factor` FP32 [1]; if that is not finite, nothing is written.
    """
    TILE: tl.constexpr = ROWS * SPLIT * BLOCK
    IN_ONE_UNIT: tl.constexpr = UNIT % (TILES * TILE) == 0
    MASTER_ROUNDS: tl.constexpr = master.dtype.element_ty != tl.float32
    factor = tl.load(grad_factor)
    if tl.abs(factor) < float("inf"):  # false for a NaN too: the step is skipped
        num_step = tl.load(step)
        per_root, eps_per_step = step_factors(num_step, lr, log_beta1, log_beta2, eps)
        offsets = tile_offsets(SPLIT, ROWS, BLOCK)
        largest = tl.zeros(offsets.shape, tl.float32)
        bits = tl.zeros(offsets.shape, tl.uint32)
        first = tl.program_id(0).to(tl.int64) * (TILES * TILE)
        if ROUNDS and IN_ONE_UNIT:
            key, number, left, width, gap = unit_of(places, first, n, num_step, offsets, UNIT, TILES * TILE)
        for tile in tl.range(TILES, loop_unroll_factor=UNROLL):
            start = first + tile * TILE
            g = load_tile(grad, grad_scales, start, offsets, n, factor, GRAD_SCALES, EVEN)
            p = load_tile(
                master, master_scales, start, offsets, n, 1.0 if MASTER_ROUNDS else decay, MASTER_SCALES, EVEN
            )
            if ROUNDS:
                if IN_ONE_UNIT:
                    bits = rounding_bits(key, number, left, width, gap, tile * TILE, offsets, GAPS)
                else:
                    key, number, left, width, gap = unit_of(places, start, n, num_step, offsets, UNIT, TILE)
                    bits = rounding_bits(key, number, left, width, gap, 0, offsets, GAPS)
            change = adam_change(
                *(g, p, exp_avg, exp_avg_scales, exp_avg_sq, exp_avg_sq_scales, start, offsets, n, bits),
                *(per_root, eps_per_step, beta1, one_minus_beta1, beta2, one_minus_beta2, weight_decay, largest_change),
                *(DECOUPLED, ROUNDS, EXP_AVG_SCALES, EXP_AVG_SQ_SCALES, EXP_AVG_MAX_BITS, EXP_AVG_SQ_MAX_BITS, EVEN),
            )
            if MASTER_ROUNDS:
                change -= shrink * p
            stored = store_master(
                *(p, change, master, master_scales, start, offsets, n, bits),
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


@triton.jit
def _expm1(x):
    """eˣ - 1 for x ≤ 0, with a relative error below 2⁻²⁰."""
    # Below -1/4 the subtraction loses two bits; above it the ninth term of the series is 4e-11 of the first.
    series = 1.0 + x / 8.0
    series = 1.0 + x / 7.0 * series
    series = 1.0 + x / 6.0 * series
    series = 1.0 + x / 5.0 * series
    series = 1.0 + x / 4.0 * series
    series = 1.0 + x / 3.0 * series
    series = x * (1.0 + x / 2.0 * series)
    return tl.where(x < -0.25, tl.exp(x) - 1.0, series)


@triton.jit
def _derive_fp8_weights(
    master,
    master_scales,
    payload,
    weight_scales,
    chunk_tensor,
    n,
    FP_MAX: tl.constexpr,
    MASTER_SCALES: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    inverse = reciprocal(tl.load(weight_scales + tl.load(chunk_tensor + tl.program_id(0))))
    offsets = tl.arange(0, ROWS)[None, :, None] * BLOCK + tl.arange(0, BLOCK)[None, None, :]
    for tile in tl.static_range(TILES):
        start = (tl.program_id(0).to(tl.int64) * TILES + tile) * (ROWS * BLOCK)
        value = load_tile(master, master_scales, start, offsets, n, 1.0, MASTER_SCALES, True)
        tl.store(payload + start + offsets, encode(value, inverse, FP_MAX, payload.dtype.element_ty))


def adamw_step_(
    state: AdamState,
    hyper: AdamHyper,
    grad_factor: Tensor,
    step: Tensor,
    weight: Tensor | None,
    chunk_amax: Tensor | None,
) -> None:
    """`reference.adamw_step_`, one launch. Products may be fused with sums; √ and ÷ are accurate to 2 ulp. What is
    rounded stochastically is rounded with the same random bits.

    Raises:
        ValueError: more than two sizes of scale block, or chunks that are not whole blocks.
    """
    master = state.master.payload
    n = master.numel()
    operands = state[:4]
    is_rounded = rounds(*operands[1:])
    tiling = Tiling.of(operands, chunk_size(n, chunk_amax), TILE_OF_ROUNDED if is_rounded else TILE_OF_FLOATS)
    places, unit, gaps = tiling.places(n, state.places, master)
    _adamw_step[(cdiv(n, tiling.chunk),)](
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
        is_rounded,
        tiling.unroll(operands[1:3], unit, gaps),
        num_warps=tiling.num_warps,
        enable_fp_fusion=True,
    )


def derive_fp8_weights_(
    master: Tensor, master_scales: Tensor | None, payload: Tensor, weight_scales: Tensor, chunk_tensor: Tensor
) -> None:
    """`reference.derive_fp8_weights_`, one launch, one program a chunk.

    Raises:
        ValueError: chunks that are not whole blocks.
    """
    n = master.numel()
    tiling = Tiling.of([FlatState(master, master_scales)], chunk_size(n, chunk_tensor), TILE_OF_FLOATS)
    tiles, rows, _, block = tiling.shape
    _derive_fp8_weights[(chunk_tensor.numel(),)](
        master,
        master if master_scales is None else master_scales,
        payload,
        weight_scales,
        chunk_tensor,
        n,
        MAX_FINITE[payload.dtype],
        *tiling.kinds,
        tiles,
        rows,
        block,
        num_warps=tiling.num_warps,
        enable_fp_fusion=True,
    )
