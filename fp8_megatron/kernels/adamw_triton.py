"""The fused optimizer in Triton: `reference.adamw_step_` and `derive_fp8_weights_`.

One read and one write of every operand is the whole cost (12 bytes a parameter at level O3, scales not counted), so one
program owns whole scale blocks of every operand and, when the new master's amax is wanted, one whole chunk.
"""

# The parameters of a Triton kernel have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from ..formats import MAX_FINITE
from .blockwise_triton import FP_MAX_BITS, block_amax_bits, block_scale, block_size
from .quantize_triton import encode, magnitude_bits, reciprocal

# Eight elements a thread: 16-byte accesses of 16-bit operands, 8-byte ones of FP8. Few warps, so barriers are cheap.
_TILE = 1024
_ELEMENTS_PER_WARP = 256
# Elements of a program where no chunk says: enough to spread the bias corrections over.
_DEFAULT_CHUNK = 4096

# How an operand's scales lie over a tile [SPLIT, ROWS, BLOCK] (the large blocks are its rows, each of SPLIT small
# ones; in this order one warp holds a whole large block): none, one a small block, one a large block.
_UNSCALED, _NARROW, _WIDE = 0, 1, 2


@triton.jit
def _load(payload, scales, start, offsets, n, coefficient, SCALES: tl.constexpr, EVEN: tl.constexpr):
    """`coefficient` times the FP32 values of an operand's tile that begins at element `start`; zeros beyond `n`."""
    if EVEN:
        value = tl.load(payload + start + offsets).to(tl.float32)
    else:
        value = tl.load(payload + start + offsets, mask=start + offsets < n, other=0.0).to(tl.float32)
    if SCALES != 0:
        EXTENT: tl.constexpr = offsets.shape[2] if SCALES == 1 else offsets.shape[0] * offsets.shape[2]
        index = _scale_index(offsets.shape[0], offsets.shape[1], SCALES)
        if EVEN:
            scale = tl.load(scales + start // EXTENT + index)
        else:
            scale = tl.load(scales + start // EXTENT + index, mask=start + index * EXTENT < n, other=1.0)
        # Scales are powers of two, so the order of the two products does not matter, and this one is done once a block.
        return value * (scale * coefficient)
    return value * coefficient


@triton.jit
def _scale_index(SPLIT: tl.constexpr, ROWS: tl.constexpr, SCALES: tl.constexpr):
    """Indices of a tile's scales, shaped to broadcast against it."""
    rows = tl.arange(0, ROWS)[None, :, None]
    if SCALES == 1:
        rows = rows * SPLIT + tl.arange(0, SPLIT)[:, None, None]
    return rows


@triton.jit
def _store(
    value, payload, scales, start, offsets, n, FP_MAX_BITS: tl.constexpr, SCALES: tl.constexpr, EVEN: tl.constexpr
):
    """Store FP32 values in the operand's own dtype.

    Returns what was stored, in FP32, and stored magnitudes (bits) that include the tile's largest.
    """
    mask = None
    if not EVEN:
        mask = start + offsets < n
    if SCALES == 0:
        stored = value.to(payload.dtype.element_ty)
        tl.store(payload + start + offsets, stored, mask=mask)
        return stored.to(tl.float32), magnitude_bits(stored)
    else:
        bits = block_amax_bits(value, 2)
        if SCALES == 2:
            bits = tl.max(bits, axis=0, keep_dims=True)
        scale, inverse = block_scale(bits, FP_MAX_BITS)
        EXTENT: tl.constexpr = offsets.shape[2] if SCALES == 1 else offsets.shape[0] * offsets.shape[2]
        index = _scale_index(offsets.shape[0], offsets.shape[1], SCALES)
        if EVEN:
            tl.store(scales + start // EXTENT + index, scale)
        else:
            tl.store(scales + start // EXTENT + index, scale, mask=start + index * EXTENT < n)
        stored = (value * inverse).to(payload.dtype.element_ty)
        tl.store(payload + start + offsets, stored, mask=mask)
        # Rounding is monotonic: the largest stored magnitude is the rounded largest magnitude.
        largest = (bits.to(tl.float32, bitcast=True) * inverse).to(payload.dtype.element_ty)
        return stored.to(tl.float32) * scale, magnitude_bits(largest.to(tl.float32) * scale)


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
):
    factor = tl.load(grad_factor)
    if tl.abs(factor) < float("inf"):  # false for a NaN too: the step is skipped
        num_step = tl.load(step)
        step_size = lr / -_expm1(num_step * log_beta1)
        inverse_correction2 = 1.0 / -_expm1(num_step * log_beta2)
        offsets = (
            tl.arange(0, SPLIT)[:, None, None] * BLOCK
            + tl.arange(0, ROWS)[None, :, None] * (SPLIT * BLOCK)
            + tl.arange(0, BLOCK)[None, None, :]
        )
        amax_bits = tl.full([], 0, tl.int32)
        for tile in tl.static_range(TILES):
            start = (tl.program_id(0).to(tl.int64) * TILES + tile) * (ROWS * SPLIT * BLOCK)
            g = _load(grad, grad_scales, start, offsets, n, factor, GRAD_SCALES, EVEN)
            p = _load(master, master_scales, start, offsets, n, decay, MASTER_SCALES, EVEN)
            if not DECOUPLED:
                g += weight_decay * p
            m = _load(exp_avg, exp_avg_scales, start, offsets, n, beta1, EXP_AVG_SCALES, EVEN) + one_minus_beta1 * g
            v = _load(exp_avg_sq, exp_avg_sq_scales, start, offsets, n, beta2, EXP_AVG_SQ_SCALES, EVEN)
            v += one_minus_beta2 * g * g
            p -= libdevice.fast_dividef(step_size * m, tl.sqrt(v * inverse_correction2) + eps)
            _store(m, exp_avg, exp_avg_scales, start, offsets, n, EXP_AVG_MAX_BITS, EXP_AVG_SCALES, EVEN)
            _store(v, exp_avg_sq, exp_avg_sq_scales, start, offsets, n, EXP_AVG_SQ_MAX_BITS, EXP_AVG_SQ_SCALES, EVEN)
            stored, stored_bits = _store(
                p, master, master_scales, start, offsets, n, MASTER_MAX_BITS, MASTER_SCALES, EVEN
            )
            if HAS_WEIGHT:
                if EVEN:
                    tl.store(weight + start + offsets, stored.to(weight.dtype.element_ty))
                else:
                    tl.store(weight + start + offsets, stored.to(weight.dtype.element_ty), mask=start + offsets < n)
            if HAS_CHUNK_AMAX:
                amax_bits = tl.maximum(amax_bits, tl.max(stored_bits))
        if HAS_CHUNK_AMAX:
            tl.store(chunk_amax + tl.program_id(0), amax_bits.to(tl.float32, bitcast=True))


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
        value = _load(master, master_scales, start, offsets, n, 1.0, MASTER_SCALES, True)
        tl.store(payload + start + offsets, encode(value, inverse, FP_MAX, payload.dtype.element_ty))


def _tiling(chunk: int, blocks: list[int]) -> tuple[int, int, int, int]:
    """TILES, ROWS, SPLIT, BLOCK of a program that owns one chunk of whole blocks.

    Raises:
        ValueError: more than two block sizes, or a chunk that is not made of whole blocks.
    """
    sizes = sorted(set(blocks)) or [128]
    small, large = sizes[0], sizes[-1]
    if len(sizes) > 2:
        raise ValueError(f"operands have scale blocks of {sizes} elements; at most two sizes can be stepped together")
    tile = min(max(_TILE, large), chunk & -chunk)  # the largest power of two that divides the chunk
    if tile < large:
        raise ValueError(f"a chunk of {chunk} elements is not made of whole tiles of scale blocks of {large}")
    return chunk // tile, tile // large, large // small, small


def _chunk(n: int, per_chunk: Tensor | None) -> int:
    if per_chunk is None:
        return _DEFAULT_CHUNK
    assert n % per_chunk.numel() == 0, (n, per_chunk.numel())
    return n // per_chunk.numel()


def adamw_step_(
    grad: Tensor,
    grad_scales: Tensor | None,
    exp_avg: Tensor,
    exp_avg_scales: Tensor | None,
    exp_avg_sq: Tensor,
    exp_avg_sq_scales: Tensor | None,
    master: Tensor,
    master_scales: Tensor | None,
    weight: Tensor | None,
    chunk_amax: Tensor | None,
    grad_factor: Tensor,
    step: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
) -> None:
    """`reference.adamw_step_`, one launch. Products may be fused with sums; √ and ÷ are good to 2 ulp.

    Raises:
        ValueError: more than two sizes of scale block, or chunks that are not whole blocks.
    """
    n = master.numel()
    operands = (
        (grad, grad_scales),
        (exp_avg, exp_avg_scales),
        (exp_avg_sq, exp_avg_sq_scales),
        (master, master_scales),
    )
    blocks = [0 if scales is None else block_size(payload, scales) for payload, scales in operands]
    chunk = _chunk(n, chunk_amax)
    tiles, rows, split, block = _tiling(chunk, [size for size in blocks if size])
    kinds = [_UNSCALED if size == 0 else _NARROW if size == block else _WIDE for size in blocks]
    tile = rows * split * block
    _adamw_step[(triton.cdiv(n, tiles * tile),)](
        grad,
        grad if grad_scales is None else grad_scales,
        exp_avg,
        exp_avg if exp_avg_scales is None else exp_avg_scales,
        exp_avg_sq,
        exp_avg_sq if exp_avg_sq_scales is None else exp_avg_sq_scales,
        master,
        master if master_scales is None else master_scales,
        master if weight is None else weight,
        master if chunk_amax is None else chunk_amax,
        grad_factor,
        step,
        n,
        lr,
        beta1,
        1.0 - beta1,
        _log(beta1),
        beta2,
        1.0 - beta2,
        _log(beta2),
        eps,
        weight_decay,
        1.0 - lr * weight_decay if decoupled else 1.0,
        decoupled,
        weight is not None,
        chunk_amax is not None,
        *kinds,
        FP_MAX_BITS.get(exp_avg.dtype, 0),
        FP_MAX_BITS.get(exp_avg_sq.dtype, 0),
        FP_MAX_BITS.get(master.dtype, 0),
        tiles,
        rows,
        split,
        block,
        n % (tiles * tile) == 0,
        num_warps=max(1, tile // _ELEMENTS_PER_WARP),
    )


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0.0 else -math.inf


def derive_fp8_weights_(
    master: Tensor, master_scales: Tensor | None, payload: Tensor, weight_scales: Tensor, chunk_tensor: Tensor
) -> None:
    """`reference.derive_fp8_weights_`, one launch, one program a chunk.

    Raises:
        ValueError: chunks that are not whole blocks.
    """
    n = master.numel()
    block = None if master_scales is None else block_size(master, master_scales)
    tiles, rows, _, block_of_tile = _tiling(_chunk(n, chunk_tensor), [] if block is None else [block])
    _derive_fp8_weights[(chunk_tensor.numel(),)](
        master,
        master if master_scales is None else master_scales,
        payload,
        weight_scales,
        chunk_tensor,
        n,
        MAX_FINITE[payload.dtype],
        _UNSCALED if block is None else _NARROW,
        tiles,
        rows,
        block_of_tile,
        num_warps=max(1, rows * block_of_tile // _ELEMENTS_PER_WARP),
    )
