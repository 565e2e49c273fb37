"""The specification of the statistics of a cast to FP8, in plain PyTorch."""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from ...dtypes import FP8_DTYPES, GEMM_BLOCK, MAX_FINITE, MX_BLOCK, NV_BLOCK
from ..reference import decode
from ..registration import operator

#: Numbers of one tensor's statistics.
NUM_STATISTICS = 64
#: Lowest exponent of the histogram; it counts smaller ones, too. The highest one counts larger ones.
LOWEST_EXPONENT = -32
#: A quotient above the largest payload by less than this is that payload: the scale itself is rounded.
ABOVE_LARGEST = 1.0 + 2.0**-16


class Statistic(IntEnum):
    """The place of each number. The first two are maxima, the others are sums."""

    AMAX = 0
    """Largest |x|."""
    FILL = 1
    """Largest |x| / (scale · fp_max); above 1 the cast saturates."""
    COUNT = 2
    """Elements that are finite before and after the cast. The numbers below cover only these."""
    NON_FINITE = 3
    """All other elements."""
    SATURATED = 4
    """Elements with |x| > scale · fp_max."""
    NONZERO = 5
    """Elements that are not 0."""
    UNDERFLOWED = 6
    """Elements that are not 0 and become 0."""
    SQUARES = 7
    """Σ x²."""
    ERRORS = 8
    """Σ (payload · scale − x)²."""
    FOURTHS = 9
    """Σ x⁴."""
    EXPONENTS = 10
    """From here on: a histogram of ⌊log₂(|x| / scale)⌋ from `LOWEST_EXPONENT` on, without zeros."""


NUM_MAXIMA = Statistic.COUNT.value
NUM_EXPONENTS = NUM_STATISTICS - Statistic.EXPONENTS.value


def measured_block(value: Tensor, scales: Tensor) -> int:
    """How many columns of `value` [M, K] a column of `scales` is for: 128, 32 or 16."""
    for block in (GEMM_BLOCK, MX_BLOCK, NV_BLOCK):
        if scales.shape == (value.shape[0], -(-value.shape[1] // block)):
            return block
    raise AssertionError(f"scales {list(scales.shape)} are not those of a matrix {list(value.shape)}")


def _check_cast(value: Tensor, payload: Tensor, scales: Tensor, statistics: Tensor) -> None:
    assert value.ndim == 2 and payload.shape == value.shape and payload.dtype in FP8_DTYPES, (value.shape, payload)
    measured_block(value, scales)
    assert statistics.dtype == torch.float64 and statistics.shape == (NUM_STATISTICS,), statistics
    assert statistics.is_contiguous() and scales.dtype == torch.float32, (statistics.stride(), scales.dtype)


@operator(gpu=".triton", mutates=["statistics"], check=_check_cast)
def measure_cast_(value: Tensor, payload: Tensor, scales: Tensor, statistics: Tensor) -> None:
    """Add the statistics of a cast to `statistics` (see `Statistic`). Sums are FP64. No host sync.

    Args:
        value: x [M, K] before the cast, any float dtype; payload: FP8 [M, K]. Their rows may be strided.
        scales: FP32 [M, ⌈K / 128⌉], [M, K / 32] or [M, K / 16], one for as many elements of a row, with any strides.
            An expanded tensor is one scale for all.
        statistics: FP64 [`NUM_STATISTICS`].
    """
    x = value.float()
    scale = scales.repeat_interleave(measured_block(value, scales), dim=1)[:, : x.shape[1]]
    wide = x.double()
    restored = decode(payload).double() * scale.double()
    finite = torch.isfinite(x) & torch.isfinite(restored)
    quotient = torch.where(finite, x.abs() / scale, 0.0)
    largest = MAX_FINITE[payload.dtype]
    nonzero = finite & (x != 0)
    is_zero = payload.view(torch.uint8).bitwise_and(0x7F) == 0
    square = torch.where(finite, wide * wide, 0.0)
    error = torch.where(finite, restored - wide, 0.0)
    maxima = torch.stack([torch.where(finite, x.abs(), 0.0).max(), (quotient / largest).max()]).double()
    statistics[:NUM_MAXIMA] = torch.maximum(statistics[:NUM_MAXIMA], maxima)
    statistics[NUM_MAXIMA : Statistic.EXPONENTS] += torch.stack(
        [
            finite.sum(),
            (~finite).sum(),
            (quotient > largest * ABOVE_LARGEST).sum(),
            nonzero.sum(),
            (nonzero & is_zero).sum(),
            square.sum(),
            (error * error).sum(),
            (square * square).sum(),
        ]
    )
    exponents = (quotient.contiguous().view(torch.int32) >> 23) - 127
    bins = (exponents - LOWEST_EXPONENT).clamp(0, NUM_EXPONENTS - 1)[nonzero]
    statistics[Statistic.EXPONENTS :] += torch.bincount(bins, minlength=NUM_EXPONENTS)
