"""Stochastic rounding: the random bits of an element, whatever the layout, and rounding against float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fp8_megatron.kernels import rounding
from fp8_megatron.kernels.rounding import E4M11, GRIDS, Grid, Places

FORMATS = {"E4M3": GRIDS[torch.float8_e4m3fn], "FP16": GRIDS[torch.float16], "BF16": GRIDS[torch.bfloat16]}
LARGEST = {"E4M3": 448.0, "FP16": 65504.0, "BF16": 1e4}
FORMATS["E4M11"], LARGEST["E4M11"] = E4M11, 448.0
FACTOR, SECOND_FACTOR = 0x7FEB352D, 0x846CA68B


def bits_of(numel: int, step: int, places: Places | None = None) -> Tensor:
    return rounding.rounding_bits(numel, torch.tensor([float(step)]), places or Places())


def half_mix(x: int) -> int:
    return (x ^ x >> 15) * SECOND_FACTOR % 2**32


def lowbias32(x: int) -> int:
    x = half_mix((x ^ x >> 16) * FACTOR % 2**32)
    return x ^ x >> 16


def test_bits_are_the_hash_they_say() -> None:
    """The kernels' contract: 32-bit integers, bit for bit, modulo 2³²."""
    table = torch.tensor([[-5, 2**31 - 100, 3, 8, 24]], dtype=torch.int32)
    for step in (1, 2000, 2**24 - 1):
        key = lowbias32((-5 + lowbias32(step)) % 2**32)
        actual = [bit % 2**32 for bit in bits_of(256, step, Places(table, 8)).tolist()]
        for element in range(256):
            rows = 0 if element < 3 else 1 + (element - 3) // 8
            place = 2**31 - 100 + element + 24 * rows
            assert actual[element] == half_mix((place * FACTOR + key) % 2**32), element


def streams(bits: Tensor) -> list[Tensor]:
    """The noise of the first moment, and that of the second moment and the master."""
    return [rounding.uniform(take(bits, 23)) for take in (rounding.exp_avg_bits, rounding.exp_avg_sq_bits)]


def test_noise_is_uniform_and_independent() -> None:
    """Over elements, between the moments of an element, between steps, and between neighbours and rows."""
    n = 2**18
    draws = [noise for step in (7, 8) for noise in streams(bits_of(n, step))]
    for noise in draws:
        assert noise.min() > 0.0 and noise.max() < 1.0
        counts = torch.histc(noise, 256, 0.0, 1.0)
        # χ² of 255 degrees of freedom: mean 255, standard deviation √510 = 22.6; six of them.
        assert abs((counts - n / 256).square().sum().item() / (n / 256) - 255) < 6 * 22.6
    shifted = [draws[i].roll(distance) for i in range(2) for distance in (1, 2, 16, 256, 1000, 4096)]
    correlations = torch.corrcoef(torch.stack([*draws, *shifted]))
    # A correlation of n independent pairs scatters by 1/√n.
    assert (correlations - torch.eye(len(correlations))).abs().max() < 6 / math.sqrt(n)


def awkward(name: str) -> Tensor:
    """Numbers of every binade of a format and below it, powers of two and their neighbours, of both signs."""
    generator = torch.Generator().manual_seed(0)
    low = max(FORMATS[name].smallest_exponent, -40) - FORMATS[name].mantissa_bits - 3
    high = math.log2(LARGEST[name])
    exponents = low + (high - low) * torch.rand(2000, generator=generator)
    powers = torch.exp2(torch.arange(math.ceil(low), math.floor(high) + 1))
    below = powers * (1 - 2.0**-24)
    x = torch.cat([torch.exp2(exponents), powers, below, powers * (1 + 2.0**-20), torch.tensor([LARGEST[name]])])
    return torch.cat([x, -x])


def neighbours(x: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """The numbers of a format around float64 `x`, and their distance."""
    exponent = x.abs().clamp_min(2.0**grid.smallest_exponent).log2().floor()
    step = torch.exp2(exponent - grid.mantissa_bits)
    below = (x / step).floor() * step
    return below, step


def mean_is_right(x: Tensor, draw: list[Tensor], grid: Grid, stays: Tensor) -> None:
    """Results are numbers around `x` (float64). The mean is within six standard errors; where `stays`, x is the result.

    The variance of a draw is p(1-p) steps²; the mean of few rare events is not normal, so six events are allowed. A sum
    that FP32 would round up to a power of two may go to the grid above that power: two steps.
    """
    below, step = neighbours(x, grid)
    num = len(draw)
    total = torch.zeros_like(x)
    for rounded in draw:
        total += rounded.double()
        away = (rounded.double() - x).abs()
        assert (away < 2 * step).all() and ((away < step) | (away >= step * (1 - 2.0**-12))).all()
        assert torch.equal(neighbours(rounded.double(), grid)[0], rounded.double())
        assert torch.equal(rounded.double()[stays], x[stays])
    up = (x - below) / step
    error = (total / num - x).abs()
    assert (error <= step * (6 * (up * (1 - up) / num).sqrt() + 6 / num)).all()


@pytest.mark.parametrize("name", ["E4M3", "FP16", "BF16"])
def test_a_value_is_rounded_right_on_average(name: str) -> None:
    grid, x = FORMATS[name], awkward(name)
    draw = []
    for step in range(400):
        noise = rounding.exp_avg_bits(bits_of(x.numel(), step), grid.dropped_bits)
        draw.append(rounding.round_to_grid(x, noise, grid))
    mean_is_right(x.double(), draw, grid, neighbours(x.double(), grid)[0] == x)


@pytest.mark.parametrize("relative", [1.0, 1e-2, 1e-5, 1e-9])
@pytest.mark.parametrize("name", FORMATS)
def test_a_sum_is_rounded_right_on_average(name: str, relative: float) -> None:
    """Of numbers on the grid and changes down to 10⁻⁹ of them, in both directions; scaled by a power of two too."""
    grid, scale = FORMATS[name], 1.0 if name == "BF16" else 2.0**-9
    x = awkward(name) * 0.49
    x = neighbours(x.double(), grid)[0].float() * scale
    x[::5] = 0.0
    # Not down to 0: a sum that cancels is right to 2⁻¹⁰⁹ only.
    change = relative * x * torch.randn(x.numel(), generator=torch.Generator().manual_seed(1)).clamp(-0.9, 1)
    change[::3] = 0.0
    draw = []
    for step in range(400):
        noise = rounding.master_noise(bits_of(x.numel(), step))
        draw.append(rounding.round_sum_to_grid(x, change, noise, grid, scale) / scale)
    mean_is_right((x.double() + change.double()) / scale, draw, grid, change == 0.0)


@pytest.mark.parametrize("name", FORMATS)
def test_a_change_far_below_a_step_arrives(name: str) -> None:
    """10⁻⁵ of a step, 65,536 elements of one number: FP32 cannot add it, and as many as should go up."""
    grid, n = FORMATS[name], 2**16
    for number in (1.0, -1.0, 1.5, 1.0 - 2.0 ** -(grid.mantissa_bits + 1)):
        step = 2.0 ** -(grid.mantissa_bits + (number < 1.0 and number > 0))
        for change in (2e-3 * step, -2e-3 * step):
            x = torch.full((n,), number)
            moved = torch.zeros(n, dtype=torch.float64)
            for count in range(20):
                noise = rounding.master_noise(bits_of(n, count))
                rounded = rounding.round_sum_to_grid(x, torch.full((n,), change), noise, grid)
                moved += rounded.double() - number
            # 1.3 million draws with probability up to 4e-3: 2,600 events, 2% of them; six.
            assert moved.mean().item() / 20 == pytest.approx(change, rel=0.12)


def test_a_probability_of_a_millionth_is_kept() -> None:
    """Every noise that occurs near 1 is tried: the share that goes up is exact to 2⁻²³."""
    grid = GRIDS[torch.float16]
    noise = torch.arange(2**23 - 64, 2**23) * 2.0**-23
    for probability in (1e-6, 3e-6, 7e-6):
        x = torch.ones(64)
        rounded = rounding.round_sum_to_grid(x, torch.full_like(x, probability * 2.0**-10), noise, grid)
        share = (rounded > 1.0).sum().item() / 2**23
        assert share == pytest.approx(probability, abs=2.0**-23)


def test_what_is_not_finite_stays_so() -> None:
    grid = GRIDS[torch.bfloat16]
    x = torch.tensor([math.nan, math.inf, -math.inf, 1.0])
    x.view(torch.int32)[0] = 0x7FFFFFFF  # a GPU's NaN
    rounded = rounding.round_to_grid(x, torch.full((4,), 0xFFFF, dtype=torch.int32), grid)
    assert rounded.isfinite().tolist() == [False, False, False, True]
    summed = rounding.round_sum_to_grid(x, torch.zeros(4), torch.full((4,), 0.75), grid)
    assert summed.isfinite().tolist() == [False, False, False, True]


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("axis", [0, 1])
def test_parts_of_a_parameter_have_the_bits_of_the_whole(axis: int, pieces: int) -> None:
    if axis == 1 and pieces == 2:
        pytest.skip("only rows come in two pieces")
    from fp8_megatron.sharding.region import Region

    shape, size = (24, 40), 2
    whole = bits_of(24 * 40, 5).view(shape)
    for rank in range(size):
        local = (12, 40) if axis == 0 else (24, 20)
        cut = Region(local, axis, pieces, rank, size).cut
        assert cut is not None
        table = torch.tensor([[0, cut.first, cut.width, cut.width, cut.stride - cut.width]], dtype=torch.int32)
        actual = bits_of(12 * 40, 5, Places(table, cut.width)).view(local)
        expected = torch.cat(whole.chunk(size * pieces, dim=axis)[rank::size], dim=axis)
        assert torch.equal(actual, expected)
