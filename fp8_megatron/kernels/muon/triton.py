"""The elementwise halves of Muon's step in Triton, each in one pass: `reference`, bit for bit. A momentum in int8 is
rounded to the neighbouring code now and then, because quotients differ in their last bit.

Products are not fused with sums: both halves only wait for memory (at O3 five bytes an element for the momentum, nine
for the master).
"""

# The parameters of a Triton kernel have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..adamw.reference import FlatState
from ..adamw.split_master import SplitMaster
from ..adamw.split_triton import MANTISSA_BITS, SMALLEST_NORMAL, join_master, split_master, value_of_count
from ..adamw.state_triton import (
    TILE_OF_FLOATS,
    TILE_OF_ROUNDED,
    Tiling,
    chunk_size,
    fp_max_bits,
    load_tile,
    pointers,
    rounds,
    store_master,
    store_moment,
    tile_offsets,
)
from ..quantize.triton import magnitude_bits, reciprocal
from ..rounding import Places
from ..rounding_triton import round_sum_to_grid, rounding_bits, unit_of
from ..shapes import cdiv
from .reference import MomentumState


@triton.jit
def _store_beside(value, out, start, offsets, n, EVEN: tl.constexpr):
    if EVEN:
        tl.store(out + start + offsets, value.to(out.dtype.element_ty))
    else:
        tl.store(out + start + offsets, value.to(out.dtype.element_ty), mask=start + offsets < n)


@triton.jit
def _momentum_step(
    grad,
    grad_scales,
    momentum,
    momentum_scales,
    direction,
    places,
    grad_factor,
    step,
    n,
    beta,
    one_minus_beta,
    NESTEROV: tl.constexpr,
    GRAD_SCALES: tl.constexpr,
    MOMENTUM_SCALES: tl.constexpr,
    MOMENTUM_MAX_BITS: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    UNIT: tl.constexpr,
    GAPS: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """`reference.momentum_step_` of `TILES` tiles of ROWS · SPLIT · BLOCK elements, of the n of flat operands."""
    TILE: tl.constexpr = ROWS * SPLIT * BLOCK
    factor = tl.load(grad_factor)
    if tl.abs(factor) < float("inf"):  # false for a NaN too: the step is skipped
        num_step = tl.load(step)
        offsets = tile_offsets(SPLIT, ROWS, BLOCK)
        bits = tl.zeros(offsets.shape, tl.uint32)
        for tile in range(TILES):
            start = (tl.program_id(0).to(tl.int64) * TILES + tile) * TILE
            if ROUNDS:
                key, number, left, width, gap = unit_of(places, start, n, num_step, offsets, UNIT, TILE)
                bits = rounding_bits(key, number, left, width, gap, 0, offsets, GAPS)
            g = one_minus_beta * load_tile(grad, grad_scales, start, offsets, n, factor, GRAD_SCALES, EVEN)
            m = load_tile(momentum, momentum_scales, start, offsets, n, beta, MOMENTUM_SCALES, EVEN) + g
            store_moment(
                *(m, momentum, momentum_scales, start, offsets, n, bits),
                *(False, MOMENTUM_MAX_BITS, MOMENTUM_SCALES, EVEN),
            )
            _store_beside(beta * m + g if NESTEROV else m, direction, start, offsets, n, EVEN)


@triton.jit
def _orthogonal_step(
    update,
    master,
    master_scales,
    weight,
    chunk_amax,
    places,
    grad_factor,
    step,
    n,
    lr,
    weight_decay,
    HAS_WEIGHT: tl.constexpr,
    HAS_CHUNK_AMAX: tl.constexpr,
    MASTER_SCALES: tl.constexpr,
    MASTER_MAX_BITS: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    UNIT: tl.constexpr,
    GAPS: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """`reference.orthogonal_step_` of `TILES` tiles of ROWS · SPLIT · BLOCK elements, of the n of flat operands."""
    TILE: tl.constexpr = ROWS * SPLIT * BLOCK
    if tl.abs(tl.load(grad_factor)) < float("inf"):  # false for a NaN too: the step is skipped
        num_step = tl.load(step)
        offsets = tile_offsets(SPLIT, ROWS, BLOCK)
        largest = tl.zeros(offsets.shape, tl.float32)
        bits = tl.zeros(offsets.shape, tl.uint32)
        for tile in range(TILES):
            start = (tl.program_id(0).to(tl.int64) * TILES + tile) * TILE
            if ROUNDS:
                key, number, left, width, gap = unit_of(places, start, n, num_step, offsets, UNIT, TILE)
                bits = rounding_bits(key, number, left, width, gap, 0, offsets, GAPS)
            p = load_tile(master, master_scales, start, offsets, n, 1.0, MASTER_SCALES, EVEN)
            made = load_tile(update, update, start, offsets, n, 1.0, 0, EVEN)
            stored = store_master(
                *(p, -lr * (made + weight_decay * p), master, master_scales, start, offsets, n, bits),
                *(MASTER_MAX_BITS, MASTER_SCALES, EVEN),
            )
            if HAS_WEIGHT:
                _store_beside(stored, weight, start, offsets, n, EVEN)
            if HAS_CHUNK_AMAX:
                largest = tl.maximum(largest, tl.abs(stored), propagate_nan=tl.PropagateNan.ALL)
        if HAS_CHUNK_AMAX:
            tl.store(chunk_amax + tl.program_id(0), tl.max(magnitude_bits(largest)).to(tl.float32, bitcast=True))


@triton.jit
def _orthogonal_split_step(
    update,
    weight,
    correction,
    scales,
    new_scales,
    chunk_matrix,
    chunk_amax,
    places,
    grad_factor,
    step,
    n,
    lr,
    weight_decay,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    GAPS: tl.constexpr,
):
    """`reference.orthogonal_split_step_` of one chunk of n elements: `TILES` tiles of ROWS · SPLIT · BLOCK."""
    TILE: tl.constexpr = ROWS * SPLIT * BLOCK
    if tl.abs(tl.load(grad_factor)) < float("inf"):  # false for a NaN too: the step is skipped
        num_step = tl.load(step)
        matrix = tl.load(chunk_matrix + tl.program_id(0))
        old_scale = tl.load(scales + matrix)
        new_scale = tl.load(new_scales + matrix)
        inverse = reciprocal(new_scale)
        offsets = tile_offsets(SPLIT, ROWS, BLOCK)
        largest = tl.full([], 0, tl.int32)
        for tile in range(TILES):
            start = (tl.program_id(0).to(tl.int64) * TILES + tile) * TILE
            key, number, left, width, gap = unit_of(places, start, n, num_step, offsets, UNIT, TILE)
            bits = rounding_bits(key, number, left, width, gap, 0, offsets, GAPS)
            p = join_master(tl.load(weight + start + offsets), tl.load(correction + start + offsets), old_scale)
            made = tl.load(update + start + offsets).to(tl.float32)
            change = -lr * (made + weight_decay * p)
            p = round_sum_to_grid(p, change, bits, new_scale * SMALLEST_NORMAL, MANTISSA_BITS)
            code, rest, count = split_master(p, inverse)
            tl.store(weight + start + offsets, code)
            tl.store(correction + start + offsets, rest)
            largest = tl.maximum(largest, tl.max(count))
        tl.store(chunk_amax + tl.program_id(0), value_of_count(largest, 0, new_scale))


def momentum_step_(
    state: MomentumState, direction: Tensor, beta: float, nesterov: bool, grad_factor: Tensor, step: Tensor
) -> None:
    """`reference.momentum_step_`, one launch.

    Raises:
        ValueError: more than two sizes of scale block.
    """
    n, operands = direction.numel(), (state.grad, state.momentum)
    is_rounded = rounds(state.momentum)
    tiling = Tiling.of(operands, chunk_size(n, None), TILE_OF_ROUNDED if is_rounded else TILE_OF_FLOATS)
    places, unit, gaps = tiling.places(n, state.places, direction)
    _momentum_step[(cdiv(n, tiling.chunk),)](
        *pointers(operands),
        direction,
        places,
        grad_factor,
        step,
        n,
        beta,
        1.0 - beta,
        nesterov,
        *tiling.kinds,
        *fp_max_bits(state.momentum),
        *tiling.shape,
        n % tiling.chunk == 0,
        unit,
        gaps,
        is_rounded,
        num_warps=tiling.num_warps,
        enable_fp_fusion=False,
    )


def orthogonal_step_(
    update: Tensor,
    master: FlatState,
    places: Places,
    lr: float,
    weight_decay: float,
    grad_factor: Tensor,
    step: Tensor,
    weight: Tensor | None,
    chunk_amax: Tensor | None,
) -> None:
    """`reference.orthogonal_step_`, one launch.

    Raises:
        ValueError: chunks that are not whole blocks.
    """
    n, is_rounded = update.numel(), rounds(master)
    tiling = Tiling.of([master], chunk_size(n, chunk_amax), TILE_OF_ROUNDED if is_rounded else TILE_OF_FLOATS)
    table, unit, gaps = tiling.places(n, places, update)
    _orthogonal_step[(cdiv(n, tiling.chunk),)](
        update,
        *pointers([master]),
        update if weight is None else weight,
        update if chunk_amax is None else chunk_amax,
        table,
        grad_factor,
        step,
        n,
        lr,
        weight_decay,
        weight is not None,
        chunk_amax is not None,
        *tiling.kinds,
        *fp_max_bits(master),
        *tiling.shape,
        n % tiling.chunk == 0,
        unit,
        gaps,
        is_rounded,
        num_warps=tiling.num_warps,
        enable_fp_fusion=False,
    )


def orthogonal_split_step_(
    update: Tensor,
    master: SplitMaster,
    lr: float,
    weight_decay: float,
    grad_factor: Tensor,
    step: Tensor,
    chunk_amax: Tensor,
) -> None:
    """`reference.orthogonal_split_step_`, one launch, one program a chunk."""
    n = update.numel()
    tiling = Tiling.of([FlatState(update)], chunk_size(n, master.chunk_matrix), TILE_OF_ROUNDED)
    table, unit, gaps = tiling.places(n, master.places, update)
    _orthogonal_split_step[(master.chunk_matrix.numel(),)](
        update,
        master.weight.view(torch.uint8),
        master.correction,
        master.scales,
        master.new_scales,
        master.chunk_matrix,
        chunk_amax,
        table,
        grad_factor,
        step,
        n,
        lr,
        weight_decay,
        *tiling.shape,
        unit,
        gaps,
        num_warps=tiling.num_warps,
        enable_fp_fusion=False,
    )
