"""Statistics of a cast to FP8 in Triton: `reference.measure_cast_` in one launch.

Counts, maxima and the histogram are exact. Sums of FP64 values depend on the order of addition, by some units in their
last place.
"""

# The parameters of a Triton kernel have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...dtypes import MAX_FINITE
from ..shapes import cdiv
from .reference import ABOVE_LARGEST, LOWEST_EXPONENT, NUM_EXPONENTS, Statistic, measured_block

#: Rows of 128 elements that a program reads. 32 · 128 elements are 16 a thread, whose FP64 values fit into registers.
_ROWS = 32
_NUM_WARPS = 8
_INF_BITS = tl.constexpr(0x7F800000)
#: Bins that the kernel counts into, a power of two; the last one takes what is left out.
_BINS = tl.constexpr(64)


@triton.jit
def _total(x):
    return tl.sum(tl.sum(x, axis=1), axis=0)


@triton.jit
def _is_finite(x):
    return (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < _INF_BITS


@triton.jit
def _measure_cast(
    value, payload, scales, statistics, statistics_bits, num_rows, num_columns,
    value_stride, payload_stride, scale_row_stride, scale_block_stride,
    FP_MAX: tl.constexpr, ABOVE: tl.constexpr, LOWEST: tl.constexpr, EXPONENTS: tl.constexpr,
    FIRST_SUM: tl.constexpr, FIRST_EXPONENT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`reference.measure_cast_` of ROWS rows of one block of columns. `statistics_bits`: `statistics` as int64."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    block = tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    is_row = rows < num_rows
    inside = is_row & (columns < num_columns)
    x = tl.load(value + rows * value_stride + columns, mask=inside, other=0.0).to(tl.float32)
    # An element outside is taken for one inside of the same payload, because FP8 has no constant to load instead.
    place = tl.where(inside, rows * payload_stride + columns, 0)
    rounded = tl.load(payload + place).to(tl.float32)
    scale = tl.load(scales + rows * scale_row_stride + block * scale_block_stride, mask=is_row, other=1.0)
    wide = x.to(tl.float64)
    restored = rounded.to(tl.float64) * scale.to(tl.float64)
    finite = inside & _is_finite(x) & _is_finite(rounded) & _is_finite(scale)
    zero = tl.zeros([ROWS, BLOCK], tl.float32)
    magnitude = tl.where(finite, tl.abs(x), zero)
    quotient = tl.where(finite, tl.div_rn(magnitude, tl.where(finite, scale + zero, zero + 1.0)), zero)
    nonzero = finite & (x != 0.0)
    # Magnitudes are ordered as their bits are.
    amax = tl.max(tl.max(magnitude, axis=1), axis=0).to(tl.float64)
    fill = tl.div_rn(tl.max(tl.max(quotient, axis=1), axis=0), FP_MAX).to(tl.float64)
    tl.atomic_max(statistics_bits, amax.to(tl.int64, bitcast=True), sem="relaxed")
    tl.atomic_max(statistics_bits + 1, fill.to(tl.int64, bitcast=True), sem="relaxed")
    sums = statistics + FIRST_SUM
    tl.atomic_add(sums, _total(finite.to(tl.int32)).to(tl.float64), sem="relaxed")
    tl.atomic_add(sums + 1, _total((inside & (finite == 0)).to(tl.int32)).to(tl.float64), sem="relaxed")
    tl.atomic_add(sums + 2, _total((quotient > FP_MAX * ABOVE).to(tl.int32)).to(tl.float64), sem="relaxed")
    tl.atomic_add(sums + 3, _total(nonzero.to(tl.int32)).to(tl.float64), sem="relaxed")
    tl.atomic_add(sums + 4, _total((nonzero & (rounded == 0.0)).to(tl.int32)).to(tl.float64), sem="relaxed")
    square = tl.where(finite, wide * wide, 0.0)
    error = tl.where(finite, restored - wide, 0.0)
    tl.atomic_add(sums + 5, _total(square), sem="relaxed")
    tl.atomic_add(sums + 6, _total(error * error), sem="relaxed")
    tl.atomic_add(sums + 7, _total(square * square), sem="relaxed")
    exponents = (quotient.to(tl.int32, bitcast=True) >> 23) - 127 - LOWEST
    bins = tl.minimum(tl.maximum(exponents, 0), EXPONENTS - 1)
    bins = tl.where(nonzero, bins, _BINS - 1)
    counts = tl.histogram(tl.reshape(bins, [ROWS * BLOCK]), _BINS)
    index = tl.arange(0, _BINS)
    tl.atomic_add(statistics + FIRST_EXPONENT + index, counts.to(tl.float64), mask=index < EXPONENTS, sem="relaxed")


def measure_cast_(value: Tensor, payload: Tensor, scales: Tensor, statistics: Tensor) -> None:
    """`reference.measure_cast_`."""
    rows, columns = value.shape
    assert value.stride(1) == payload.stride(1) == 1 or columns == 1, (value.stride(), payload.stride())
    block = measured_block(value, scales)
    grid = (cdiv(rows, _ROWS), cdiv(columns, block))
    _measure_cast[grid](
        value, payload, scales, statistics, statistics.view(torch.int64), rows, columns,
        value.stride(0), payload.stride(0), scales.stride(0), scales.stride(1),
        MAX_FINITE[payload.dtype], ABOVE_LARGEST, LOWEST_EXPONENT, NUM_EXPONENTS,
        int(Statistic.COUNT), int(Statistic.EXPONENTS), _ROWS, block, num_warps=_NUM_WARPS,
        enable_fp_fusion=True,
    )  # fmt: skip
