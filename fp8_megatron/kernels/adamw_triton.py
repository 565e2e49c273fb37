"""The fused optimizer in Triton: `reference.adamw_step_` and `derive_fp8_weights_`.

One read and one write of every operand is the whole cost (12 bytes a parameter at level O3, scales not counted), so one
program owns whole scale blocks of every operand and, when the new master's amax is wanted, one whole chunk.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from ..formats import MAX_FINITE
from .blockwise_triton import block_size
from .quantize_triton import encode, magnitude_bits, reciprocal, scale_from_amax_bits

# Eight elements a thread: 16-byte accesses of 16-bit operands, 8-byte ones of FP8.
_TILE = 2048
_ELEMENTS_PER_WARP = 256

# How an operand's scales lie over a tile [ROWS, SPLIT, BLOCK]: none, one for each [BLOCK], one for each [SPLIT, BLOCK].
_UNSCALED, _NARROW, _WIDE = 0, 1, 2


@triton.jit
def _load(payload, scales, start, offsets, n, SCALES: tl.constexpr, EVEN: tl.constexpr):
    """FP32 values of the tile of an operand that begins at element `start`; zeros beyond `n`."""
    SPLIT: tl.constexpr = offsets.shape[1]
    BLOCK: tl.constexpr = offsets.shape[2]
    if EVEN:
        value = tl.load(payload + start + offsets).to(tl.float32)
    else:
        value = tl.load(payload + start + offsets, mask=start + offsets < n, other=0.0).to(tl.float32)
    if SCALES != 0:
        EXTENT: tl.constexpr = BLOCK if SCALES == 1 else SPLIT * BLOCK
        index = _scale_index(offsets.shape[0], SPLIT, SCALES)
        if EVEN:
            value *= tl.load(scales + start // EXTENT + index)
        else:
            value *= tl.load(scales + start // EXTENT + index, mask=start + index * EXTENT < n, other=1.0)
    return value


@triton.jit
def _scale_index(ROWS: tl.constexpr, SPLIT: tl.constexpr, SCALES: tl.constexpr):
    """Indices of a tile's scales, shaped to broadcast against it."""
    rows = tl.arange(0, ROWS)[:, None, None]
    if SCALES == 1:
        rows = rows * SPLIT + tl.arange(0, SPLIT)[None, :, None]
    return rows


@triton.jit
def _store(value, payload, scales, start, offsets, n, FP_MAX: tl.constexpr, SCALES: tl.constexpr, EVEN: tl.constexpr):
    """Store FP32 values in the operand's own dtype, and return what was stored, in FP32."""
    SPLIT: tl.constexpr = offsets.shape[1]
    BLOCK: tl.constexpr = offsets.shape[2]
    mask = None
    if not EVEN:
        mask = start + offsets < n
    if SCALES == 0:
        stored = value.to(payload.dtype.element_ty)
        tl.store(payload + start + offsets, stored, mask=mask)
        return stored.to(tl.float32)
    else:
        bits = tl.max(magnitude_bits(value), axis=2, keep_dims=True)
        if SCALES == 2:
            bits = tl.max(bits, axis=1, keep_dims=True)
        scale = scale_from_amax_bits(bits, FP_MAX, True)
        EXTENT: tl.constexpr = BLOCK if SCALES == 1 else SPLIT * BLOCK
        index = _scale_index(offsets.shape[0], SPLIT, SCALES)
        if EVEN:
            tl.store(scales + start // EXTENT + index, scale)
        else:
            tl.store(scales + start // EXTENT + index, scale, mask=start + index * EXTENT < n)
        stored = encode(value, reciprocal(scale), FP_MAX, payload.dtype.element_ty)
        tl.store(payload + start + offsets, stored, mask=mask)
        return stored.to(tl.float32) * scale


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
    EXP_AVG_MAX: tl.constexpr,
    EXP_AVG_SQ_MAX: tl.constexpr,
    MASTER_MAX: tl.constexpr,
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
            tl.arange(0, ROWS)[:, None, None] * (SPLIT * BLOCK)
            + tl.arange(0, SPLIT)[None, :, None] * BLOCK
            + tl.arange(0, BLOCK)[None, None, :]
        )
        amax_bits = tl.zeros([ROWS, SPLIT, BLOCK], tl.int32)
        for tile in tl.static_range(TILES):
            start = (tl.program_id(0).to(tl.int64) * TILES + tile) * (ROWS * SPLIT * BLOCK)
            g = _load(grad, grad_scales, start, offsets, n, GRAD_SCALES, EVEN) * factor
            p = _load(master, master_scales, start, offsets, n, MASTER_SCALES, EVEN)
            m = _load(exp_avg, exp_avg_scales, start, offsets, n, EXP_AVG_SCALES, EVEN)
            v = _load(exp_avg_sq, exp_avg_sq_scales, start, offsets, n, EXP_AVG_SQ_SCALES, EVEN)
            if DECOUPLED:
                p *= decay
            else:
                g += weight_decay * p
            m = beta1 * m + one_minus_beta1 * g
            v = beta2 * v + one_minus_beta2 * g * g
            p -= step_size * m / (tl.sqrt(v * inverse_correction2) + eps)
            _store(m, exp_avg, exp_avg_scales, start, offsets, n, EXP_AVG_MAX, EXP_AVG_SCALES, EVEN)
            _store(v, exp_avg_sq, exp_avg_sq_scales, start, offsets, n, EXP_AVG_SQ_MAX, EXP_AVG_SQ_SCALES, EVEN)
            stored = _store(p, master, master_scales, start, offsets, n, MASTER_MAX, MASTER_SCALES, EVEN)
            if HAS_WEIGHT:
                if EVEN:
                    tl.store(weight + start + offsets, p.to(weight.dtype.element_ty))
                else:
                    tl.store(weight + start + offsets, p.to(weight.dtype.element_ty), mask=start + offsets < n)
            if HAS_CHUNK_AMAX:
                amax_bits = tl.maximum(amax_bits, magnitude_bits(stored))
        if HAS_CHUNK_AMAX:
            tl.store(chunk_amax + tl.program_id(0), tl.max(amax_bits).to(tl.float32, bitcast=True))


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
    offsets = tl.arange(0, ROWS)[:, None, None] * BLOCK + tl.arange(0, BLOCK)[None, None, :]
    for tile in tl.static_range(TILES):
        start = (tl.program_id(0).to(tl.int64) * TILES + tile) * (ROWS * BLOCK)
        value = _load(master, master_scales, start, offsets, n, MASTER_SCALES, True)
        tl.store(payload + start + offsets, encode(value, inverse, FP_MAX, payload.dtype.element_ty))


def _tiling(chunk: int | None, blocks: list[int]) -> tuple[int, int, int, int]:
    """TILES, ROWS, SPLIT, BLOCK of a program that owns whole blocks and, if there are any, one whole chunk.

    Raises:
        ValueError: more than two block sizes, or a chunk that is not made of whole blocks.
    """
    sizes = sorted(set(blocks)) or [128]
    small, large = sizes[0], sizes[-1]
    if len(sizes) > 2:
        raise ValueError(f"operands have scale blocks of {sizes} elements; at most two sizes can be stepped together")
    tile = max(_TILE, large)
    if chunk is not None:
        tile = min(tile, chunk & -chunk)  # the largest power of two that divides the chunk
        if tile < large:
            raise ValueError(f"a chunk of {chunk} elements is not made of whole tiles of scale blocks of {large}")
    return 1 if chunk is None else chunk // tile, tile // large, large // small, small


def _chunk(n: int, per_chunk: Tensor | None) -> int | None:
    if per_chunk is None:
        return None
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
    operands = ((grad, grad_scales), (exp_avg, exp_avg_scales), (exp_avg_sq, exp_avg_sq_scales), (master, master_scales))
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
        1.0 - lr * weight_decay,
        decoupled,
        weight is not None,
        chunk_amax is not None,
        *kinds,
        MAX_FINITE[exp_avg.dtype],
        MAX_FINITE[exp_avg_sq.dtype],
        MAX_FINITE[master.dtype],
        tiles,
        rows,
        split,
        block,
        n % tile == 0,
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
