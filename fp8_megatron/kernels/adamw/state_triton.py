"""Flat state of the fused optimizer in Triton: reads and writes a tile of an operand in any storage dtype.

These functions correspond to the specification's `quantize.blockwise.load_state` and `store_state_`. One program owns
whole scale blocks of every operand, so a step reads and writes each operand once.
"""

# The parameters of a Triton kernel have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...dtypes import COMPANDED_DTYPES
from ..companding_triton import companded_scale, decode_companded, round_companded
from ..quantize.blockwise_triton import FP_MAX_BITS, block_scale, block_size
from ..quantize.triton import magnitude_bits
from ..rounding import Places
from ..rounding_triton import (
    exp_avg_bits,
    exp_avg_sq_bits,
    place_arguments,
    round_sum_to_grid,
    round_to_grid,
)
from .reference import AdamHyper, FlatState

# Elements of a tile. A thread has eight: 16-byte accesses of 16-bit operands, 8-byte ones of FP8.
# Measured on H200 (optimizer_h200.json): what only moves bytes is fastest with four warps a tile. Steps that round have
# ten times the arithmetic, and are fastest with one warp, which needs no barriers.
TILE_OF_FLOATS, TILE_OF_ROUNDED = 1024, 256
_ELEMENTS_PER_WARP = 256
# Elements of a program if no chunk determines it: enough to spread the cost of the bias corrections.
_DEFAULT_CHUNK = 4096

# How an operand's scales lie over a tile [SPLIT, ROWS, BLOCK] (the large blocks are its rows, each of SPLIT small
# ones; in this order one warp holds a whole large block): none, one a small block, one a large block.
UNSCALED, NARROW, WIDE = 0, 1, 2


@triton.jit
def tile_offsets(SPLIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Positions of a tile's elements in it."""
    return (
        tl.arange(0, SPLIT)[:, None, None] * BLOCK
        + tl.arange(0, ROWS)[None, :, None] * (SPLIT * BLOCK)
        + tl.arange(0, BLOCK)[None, None, :]
    )


@triton.jit
def load_tile(
    payload,
    scales,
    start,
    offsets,
    n,
    coefficient,
    SCALES: tl.constexpr,
    EVEN: tl.constexpr,
):
    """`coefficient` times the FP32 values of an operand's tile that begins at element `start`; zeros beyond `n`."""
    if EVEN:
        value = tl.load(payload + start + offsets)
    else:
        value = tl.load(payload + start + offsets, mask=start + offsets < n, other=0.0)
    if SCALES != 0:
        EXTENT: tl.constexpr = offsets.shape[2] if SCALES == 1 else offsets.shape[0] * offsets.shape[2]
        index = _scale_index(offsets.shape[0], offsets.shape[1], SCALES)
        if EVEN:
            scale = tl.load(scales + start // EXTENT + index)
        else:
            scale = tl.load(scales + start // EXTENT + index, mask=start + index * EXTENT < n, other=1.0)
        if payload.dtype.element_ty.is_int():
            return decode_companded(value, scale) * coefficient
        else:
            # Scales are powers of two, so the order of the products does not matter; this product is made once a block.
            return value.to(tl.float32) * (scale * coefficient)
    return value.to(tl.float32) * coefficient


@triton.jit
def _scale_index(SPLIT: tl.constexpr, ROWS: tl.constexpr, SCALES: tl.constexpr):
    """Indices of a tile's scales, shaped to broadcast against it."""
    rows = tl.arange(0, ROWS)[None, :, None]
    if SCALES == 1:
        rows = rows * SPLIT + tl.arange(0, SPLIT)[:, None, None]
    return rows


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _block_bits(value, SCALES: tl.constexpr):
    """The amaxes of a tile's scale blocks, as bits, NaN above inf."""
    # A thread takes the largest of its eight elements as floats, where |x| costs nothing. Integers then have a
    # reduction over a warp in one instruction.
    SPLIT: tl.constexpr = value.shape[0]
    ROWS: tl.constexpr = value.shape[1]
    BLOCK: tl.constexpr = value.shape[2]
    if SCALES == 2:
        blocks = tl.permute(tl.abs(value), (1, 0, 2)).reshape((ROWS, SPLIT * BLOCK // 8, 8))
        bits = tl.max(magnitude_bits(tl.reduce(blocks, 2, _larger)), axis=1)[None, :, None]
    else:
        blocks = tl.abs(value).reshape((SPLIT, ROWS, BLOCK // 8, 8))
        bits = tl.max(magnitude_bits(tl.reduce(blocks, 3, _larger)), axis=2, keep_dims=True)
    return bits


@triton.jit
def _store_scales(scale, scales, start, offsets, n, SCALES: tl.constexpr, EVEN: tl.constexpr):
    EXTENT: tl.constexpr = offsets.shape[2] if SCALES == 1 else offsets.shape[0] * offsets.shape[2]
    index = _scale_index(offsets.shape[0], offsets.shape[1], SCALES)
    if EVEN:
        tl.store(scales + start // EXTENT + index, scale)
    else:
        tl.store(scales + start // EXTENT + index, scale, mask=start + index * EXTENT < n)


@triton.jit
def _store(value, payload, start, offsets, n, EVEN: tl.constexpr):
    if EVEN:
        tl.store(payload + start + offsets, value)
    else:
        tl.store(payload + start + offsets, value, mask=start + offsets < n)


@triton.jit
def store_moment(
    value,
    payload,
    scales,
    start,
    offsets,
    n,
    bits,
    SECOND: tl.constexpr,
    FP_MAX_BITS: tl.constexpr,
    SCALES: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Store an FP32 moment in its own dtype, rounded stochastically with the `bits` of the tile's elements.

    In a scaled block that is not all zeros, second moments (`SECOND`) become at least the smallest number; first
    moments below it become 0.
    """
    dtype: tl.constexpr = payload.dtype.element_ty
    if SCALES == 0:
        if dtype == tl.float32:
            _store(value, payload, start, offsets, n, EVEN)
        else:
            rounded = round_to_grid(value, 1.0, bits, dtype, SECOND, False)
            rounded = tl.where(tl.abs(value) < float("inf"), rounded, value.to(dtype))
            _store(rounded, payload, start, offsets, n, EVEN)
    else:
        amax_bits = _block_bits(value, SCALES)
        if dtype.is_int():
            scale = companded_scale(amax_bits)
            noise = exp_avg_sq_bits(bits, 23) if SECOND else exp_avg_bits(bits, 23)
            encoded = round_companded(value, scale, noise, dtype)
        else:
            scale, inverse = block_scale(amax_bits, FP_MAX_BITS)
            encoded = round_to_grid(value, inverse, bits, dtype, SECOND, True, amax_bits > 0)
        _store_scales(scale, scales, start, offsets, n, SCALES, EVEN)
        _store(encoded, payload, start, offsets, n, EVEN)


@triton.jit
def store_master(
    p,
    change,
    payload,
    scales,
    start,
    offsets,
    n,
    bits,
    FP_MAX_BITS: tl.constexpr,
    SCALES: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Store the master p + change (FP32) in its own dtype, rounded stochastically with the `bits` of the elements.

    Returns the stored values in FP32.
    """
    dtype: tl.constexpr = payload.dtype.element_ty
    MANTISSA: tl.constexpr = 3 if dtype == tl.float8e4nv else 10 if dtype == tl.float16 else 7
    NORMAL: tl.constexpr = 2.0**-6 if dtype == tl.float8e4nv else 2.0**-14 if dtype == tl.float16 else 2.0**-102
    if SCALES == 0:
        if dtype == tl.float32:
            stored = p + change
        else:
            stored = round_sum_to_grid(p, change, bits, NORMAL, MANTISSA)
        _store(stored.to(dtype), payload, start, offsets, n, EVEN)
        return stored
    else:
        amax_bits = _block_bits(p + change, SCALES)
        # The exact sum is below the float after the rounded one. With its scale no sum is rounded beyond the largest
        # code.
        scale, inverse = block_scale(amax_bits, FP_MAX_BITS - 1)
        _store_scales(scale, scales, start, offsets, n, SCALES, EVEN)
        stored = round_sum_to_grid(p, change, bits, scale * NORMAL, MANTISSA)
        _store((stored * inverse).to(dtype), payload, start, offsets, n, EVEN)
        return stored


@dataclass(frozen=True)
class Tiling:
    """How a program cuts its chunk into tiles, `tiles` of [split, rows, block].

    Attributes:
        kinds: how each operand's scales lie over a tile.
    """

    tiles: int
    rows: int
    split: int
    block: int
    kinds: tuple[int, ...]

    @classmethod
    def of(cls, operands: Sequence[FlatState], chunk: int, tile: int) -> Tiling:
        """The tiling for these operands and programs of `chunk` elements, in tiles of `tile` or a large block.

        Raises:
            ValueError: more than two block sizes, or a chunk that is not made of whole blocks.
        """
        blocks = [0 if scales is None else block_size(payload, scales) for payload, scales in operands]
        sizes = sorted({size for size in blocks if size}) or [128]
        small, large = sizes[0], sizes[-1]
        if len(sizes) > 2:
            raise ValueError(
                f"operands have scale blocks of {sizes} elements; at most two sizes can be stepped together"
            )
        tile = min(max(tile, large), chunk & -chunk)  # the largest power of two that divides the chunk
        if tile < large:
            raise ValueError(f"a chunk of {chunk} elements is not made of whole tiles of scale blocks of {large}")
        kinds = tuple(UNSCALED if size == 0 else NARROW if size == small else WIDE for size in blocks)
        return cls(chunk // tile, tile // large, large // small, small, kinds)

    @property
    def chunk(self) -> int:
        """Elements of a program."""
        return self.tiles * self.rows * self.split * self.block

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """TILES, ROWS, SPLIT, BLOCK of the kernels."""
        return self.tiles, self.rows, self.split, self.block

    def places(self, n: int, places: Places, stand_in: Tensor) -> tuple[Tensor, int, int]:
        """PLACES, UNIT and GAPS of the kernels; see `place_arguments`."""
        return place_arguments(n, places, stand_in, self.split * self.block)

    @property
    def num_warps(self) -> int:
        """Warps that hold eight elements of a tile a thread."""
        return max(1, self.rows * self.split * self.block // _ELEMENTS_PER_WARP)

    def unroll(self, moments: Sequence[FlatState], unit: int, gaps: int) -> int:
        """Tiles of a program that are computed at once: two, if a thread has registers for both.

        Companded moments take more of them, and so do places that are looked up in each tile or have gaps.
        """
        is_companded = any(moment.payload.dtype in COMPANDED_DTYPES for moment in moments)
        return 1 if is_companded or unit % self.chunk or gaps else 2


def chunk_size(n: int, per_chunk: Tensor | None) -> int:
    """Elements of a program: a chunk, if one value per chunk is read or written."""
    if per_chunk is None:
        return _DEFAULT_CHUNK
    assert n % per_chunk.numel() == 0, (n, per_chunk.numel())
    return n // per_chunk.numel()


def pointers(operands: Sequence[FlatState]) -> list[Tensor]:
    """Payload and scales of each operand. If there are no scales, the payload stands in for them; it is not read."""
    return [tensor for payload, scales in operands for tensor in (payload, payload if scales is None else scales)]


def fp_max_bits(*operands: FlatState) -> Iterator[int]:
    """`FP_MAX_BITS` of each operand; 0 for a dtype that is not scaled."""
    return (FP_MAX_BITS.get(operand.payload.dtype, 0) for operand in operands)


def adam_arguments(hyper: AdamHyper, *moments: FlatState) -> tuple[float, ...]:
    """lr, beta1, 1 - beta1, log beta1, beta2, 1 - beta2, log beta2, eps, weight_decay, decay, shrink and largest_change
    of the kernels."""
    lr, beta1, beta2, eps, weight_decay, decoupled = hyper
    shrink = lr * weight_decay if decoupled else 0.0
    largest_change = hyper.largest_change if rounds(*moments) else math.inf
    betas = (beta1, 1.0 - beta1, _log(beta1), beta2, 1.0 - beta2, _log(beta2))
    return lr, *betas, eps, weight_decay, 1.0 - shrink, shrink, largest_change


def rounds(*operands: FlatState) -> bool:
    """Whether one of them is stored in fewer bits than it is computed in."""
    return any(operand.payload.dtype is not torch.float32 for operand in operands)


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0.0 else -math.inf
