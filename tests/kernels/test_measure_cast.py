"""Statistics of a cast: the specification against float64, and Triton against the specification."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fp8_megatron.dtypes import E4M3, E5M2, MAX_FINITE
from fp8_megatron.kernels import ops
from fp8_megatron.kernels.health.reference import measure_cast_
from fp8_megatron.kernels.ops import Statistic

from .cases import Case

FILLS = ("gaussian", "zero", "outlier", "nan", "inf", "denormal", "wide", "limit")


def scales_of(x: Tensor, dtype: torch.dtype, factor: float, *, blocks: bool) -> Tensor:
    """Scales of `x` [M, K] for `measure_cast_`, `factor` times what its finite values need."""
    rows, columns = x.shape
    num_blocks = -(-columns // 128)
    finite = torch.where(torch.isfinite(x), x, 0).float().abs()
    if blocks:
        padded = torch.nn.functional.pad(finite, (0, num_blocks * 128 - columns))
        amax = padded.view(rows, num_blocks, 128).amax(dim=2)
    else:
        amax = finite.max().view(1, 1).expand(rows, num_blocks)
    return torch.where(amax > 0, amax / MAX_FINITE[dtype] * factor, 1.0).clamp_min(2.0**-126)


def cast(x: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` [M, K] with those scales."""
    wide = scales.repeat_interleave(128, dim=1)[:, : x.shape[1]]
    return ops.encode(x, wide, dtype)


def by_hand(x: Tensor, payload: Tensor, scales: Tensor) -> list[float]:
    """The statistics up to the histogram, one element after the other."""
    largest = MAX_FINITE[payload.dtype]
    amax = fill = squares = errors = fourths = 0.0
    count = non_finite = saturated = nonzero = underflowed = 0
    for m in range(x.shape[0]):
        for k in range(x.shape[1]):
            value, scale = x[m, k].item(), scales[m, k // 128].item()
            restored = payload[m, k].float().item() * scale
            if not (math.isfinite(value) and math.isfinite(restored)):
                non_finite += 1
                continue
            count += 1
            amax, fill = max(amax, abs(value)), max(fill, abs(value) / scale / largest)
            saturated += abs(value) / scale > largest * (1 + 2**-16)
            nonzero += value != 0
            underflowed += value != 0 and restored == 0
            squares, errors = squares + value**2, errors + (restored - value) ** 2
            fourths += value**4
    return [amax, fill, count, non_finite, saturated, nonzero, underflowed, squares, errors, fourths]


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("factor", [1.0, 0.01, 1000.0])
@pytest.mark.parametrize("fill", FILLS)
def test_specification_against_float64(fill: str, factor: float, dtype: torch.dtype, blocks: bool) -> None:
    x = Case((6, 200), torch.bfloat16, fill).make("cpu")
    scales = scales_of(x, dtype, factor, blocks=blocks)
    payload = cast(x, scales, dtype)
    found = torch.zeros(64, dtype=torch.float64)
    measure_cast_(x, payload, scales, found)
    expected = by_hand(x, payload, scales)
    # The quotient is one FP32 division, twice: 2⁻²³. Sums of 1,200 FP64 terms: far below 1e-12.
    assert found[: Statistic.EXPONENTS].tolist() == pytest.approx(expected, rel=2**-22)
    assert found[Statistic.EXPONENTS :].sum() == found[Statistic.NONZERO]


def test_the_histogram_counts_octaves_of_the_quotient() -> None:
    x = torch.tensor([[0.0, 1.0, 1.5, -2.0, 4.0, 2.0**-10, 2.0**40, 2.0**-60, -3.99]])
    found = torch.zeros(64, dtype=torch.float64)
    scales = torch.full((1, 1), 2.0)
    measure_cast_(x, cast(x, scales, E4M3), scales, found)
    bins = {index + ops.LOWEST_EXPONENT: n for index, n in enumerate(found[Statistic.EXPONENTS :].tolist()) if n}
    assert bins == {-1: 2, 0: 2, 1: 1, -11: 1, 21: 1, -32: 1}


def test_statistics_add_up_over_calls() -> None:
    """Maxima stay, sums double."""
    x = Case((8, 256)).make("cpu")
    scales = scales_of(x, E4M3, 1.0, blocks=False)
    once, twice = torch.zeros(64, dtype=torch.float64), torch.zeros(64, dtype=torch.float64)
    for target in (once, twice, twice):
        measure_cast_(x, cast(x, scales, E4M3), scales, target)
    factors = torch.tensor([1.0] * ops.NUM_MAXIMA + [2.0] * (64 - ops.NUM_MAXIMA))
    assert torch.equal(twice, once * factors)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 128), (33, 200), (1024, 4096), (16384, 128)])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("fill", FILLS)
def test_triton_against_the_specification(fill: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Maxima and counts are equal; sums of n positive FP64 terms differ by at most n · 2⁻⁵³ in all."""
    for source, factor, blocks in ((torch.bfloat16, 0.01, True), (torch.float32, 1.0, False)):
        x = Case(shape, source, fill).make("cpu")
        scales = scales_of(x, dtype, factor, blocks=blocks)
        payload = cast(x, scales, dtype)
        expected, found = torch.zeros(64, dtype=torch.float64), torch.zeros(64, dtype=torch.float64, device="cuda")
        measure_cast_(x[::3], payload[::3], scales[::3], expected)
        ops.measure_cast_(x.cuda()[::3], payload.cuda()[::3], scales.cuda()[::3], found)
        sums = [Statistic.SQUARES, Statistic.ERRORS, Statistic.FOURTHS]
        exact = [index for index in range(64) if index not in sums]
        assert torch.equal(found.cpu()[exact], expected[exact])
        torch.testing.assert_close(found.cpu()[sums], expected[sums], rtol=x.numel() * 2.0**-53, atol=0.0)
