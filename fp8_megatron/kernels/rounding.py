"""Stochastic rounding of optimizer state: the random bits of every element, and rounding to a format's numbers.

A value between two neighbouring numbers of a format goes up with the probability that makes the average exact. Rounded
to nearest, updates below half a step would be lost, every time.

The random bits are a hash of (parameter, place of the element in the whole parameter, step) in 32-bit integer
arithmetic. Nothing is stored. Every kernel and every layout over ranks draws the same bits for the same element.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor

#: The odd factors of Wellons' "lowbias32".
FACTOR, SECOND_FACTOR = 0x7FEB352D, 0x846CA68B


class Places(NamedTuple):
    """Where the elements of flat storage [n] lie in the whole model.

    A unit is n / units elements of one parameter. Element j of it has place ``first + j + gap · rows``, where `rows` is
    the number of row ends in front of it: 0 for j < left, else ``1 + (j - left) // width``. All numbers count modulo
    2³².

    Attributes:
        table: int32 [units, 5]: seed of the parameter, first, left, width, gap. None: one parameter of seed 0, whole.
        narrowest: the smallest width of a row that a gap follows; 0 if there are no gaps.
    """

    table: Tensor | None = None
    narrowest: int = 0


class Grid(NamedTuple):
    """The numbers of a float format: `mantissa_bits` after the leading one; `smallest_normal` = 2ᵉ."""

    mantissa_bits: int
    smallest_exponent: int

    @property
    def dropped_bits(self) -> int:
        """Bits of an FP32 mantissa that the format does not have."""
        return 23 - self.mantissa_bits

    @property
    def to_subnormal(self) -> float:
        """The power of two that takes the format's subnormal numbers to those of FP32."""
        return 2.0 ** (-126 - self.smallest_exponent)

    @property
    def smallest(self) -> float:
        """The smallest number above 0."""
        return 2.0 ** (self.smallest_exponent - self.mantissa_bits)

    @property
    def snap(self) -> float:
        """1.5 · 2²³ steps of the binade of 1: added to a number of that binade, it leaves a whole number of steps."""
        return 1.5 * 2.0 ** (23 - self.mantissa_bits)


#: Formats that the optimizer rounds to stochastically.
GRIDS = {
    torch.float8_e4m3fn: Grid(3, -6),
    torch.float16: Grid(10, -14),
    torch.bfloat16: Grid(7, -126),
}
#: Sums below two to this power are multiples of its step. Noise of 23 bits of a smaller step is no FP32 number.
SMALLEST_SUM = -102
#: The split master's 16-bit float (see `adamw.split_master`).
E4M11 = Grid(11, -6)


def seed_of(name: str) -> int:
    """The seed of a parameter, from its name in the whole model: an int32."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little", signed=True)


def rounding_bits(numel: int, step: Tensor, places: Places) -> Tensor:
    """int32 [numel], 32 random bits an element: a hash of (seed, place, step).

    The hash is a bijection of the seed's and step's key, so over seeds and steps the 32 bits are uniform and
    independent.

    Args:
        step: [1], the count of the optimizer step, on the bits' device.
    """
    device = step.device
    table = places.table
    if table is None:
        table = torch.tensor([[0, 0, numel, numel, 0]], dtype=torch.int32, device=device)
    seed, first, left, width, gap = (table[:, i : i + 1] for i in range(5))
    place = torch.arange(numel // len(table), device=device, dtype=torch.int32)[None, :]
    if places.narrowest:
        rows = torch.where(place < left, 0, 1 + (place - left).div(width, rounding_mode="floor"))
        place = place + rows.to(torch.int32) * gap
    key = mix(seed + mix(step.to(torch.int32)))
    return half_mix((place + first) * FACTOR + key).view(-1)


def mix(x: Tensor) -> Tensor:
    """A bijection of 32 bits (in int32) whose every output bit depends on every input bit: Wellons' "lowbias32"."""
    # The masks make int32's arithmetic shifts logical; products wrap around.
    x = half_mix((x ^ ((x >> 16) & 0xFFFF)) * FACTOR)
    return x ^ ((x >> 16) & 0xFFFF)


def half_mix(x: Tensor) -> Tensor:
    """`mix` between its first and its last step, a bijection too."""
    return (x ^ ((x >> 15) & 0x1FFFF)) * (SECOND_FACTOR - 2**32)


def exp_avg_bits(bits: Tensor, count: int) -> Tensor:
    """`count` random bits for the first moment, int32: the lower bits."""
    return bits & ((1 << count) - 1)


def exp_avg_sq_bits(bits: Tensor, count: int) -> Tensor:
    """`count` random bits for the second moment, int32: the upper bits.

    The master has them too. A step computes its change from the second moment before that is rounded, so no error is
    multiplied with another.
    """
    return (bits >> (32 - count)) & ((1 << count) - 1)


def uniform(bits: Tensor) -> Tensor:
    """FP32 in (0, 1) of 23 random bits: odd multiples of 2⁻²⁴, with the mean 1/2."""
    return (2 * bits + 1).float() * 2.0**-24


def master_noise(bits: Tensor) -> Tensor:
    """FP32 in [0, 1) for the master: the upper 23 bits, as multiples of 2⁻²³."""
    return exp_avg_sq_bits(bits, 23).float() * 2.0**-23


def round_to_grid(
    x: Tensor, bits: Tensor, grid: Grid, factor: Tensor | float = 1.0, least: Tensor | None = None
) -> Tensor:
    """FP32 ``x · factor``, rounded stochastically to numbers of `grid`; exact on average, subnormal numbers included.

    Scaled so that the format's subnormal numbers are those of FP32, every number of the format is an FP32 number whose
    last bits are 0. Random bits are added to them, and they are cut off.

    Args:
        bits: int32, as many random bits as `grid.dropped_bits`.
        factor: a power of two that broadcasts.
        least: smaller values of x · factor count as this.
    """
    scaled = x * factor * grid.to_subnormal  # the product of both factors may be below FP32's range
    if least is not None:
        scaled = torch.maximum(scaled, least * grid.to_subnormal)
    as_bits = scaled.view(torch.int32) + bits
    rounded = (as_bits & -(1 << grid.dropped_bits)).view(torch.float32) * (1.0 / grid.to_subnormal)
    return torch.where(torch.isfinite(scaled), rounded, scaled)


def round_sum_to_grid(x: Tensor, change: Tensor, noise: Tensor, grid: Grid, scale: Tensor | float = 1.0) -> Tensor:
    """FP32 ``x + change``, rounded stochastically to `scale` times numbers of `grid`; exact on average.

    The sum is never rounded to FP32: a change far below half a unit of FP32 arrives too. With x on the grid and
    `change` 0, the result is x. Magnitudes are below 2¹⁰⁰. BF16 numbers below 2⁻¹⁰² are multiples of 2⁻¹⁰⁹.

    Args:
        change: FP32, of any size beside `x`.
        noise: FP32 of `master_noise`.
        scale: a power of two that broadcasts, or NaN, which gives NaN.
    """
    binade = ((x + change).view(torch.int32) & 0x7F800000).view(torch.float32)
    smallest = 2.0 ** max(grid.smallest_exponent, SMALLEST_SUM)
    binade = torch.maximum(binade, torch.as_tensor(scale, device=x.device) * smallest)
    step = binade * 2.0**-grid.mantissa_bits
    # A float plus `snap` is a whole number of steps; what it lost is added to the change.
    snapped = x + binade * grid.snap
    rest = (x - (snapped - binade * grid.snap)) + change
    # One to two steps are added. Rounded down, the sum is one step above x + change, stochastically rounded.
    dithered = rest + (1.0 + noise) * step
    total = snapped + dithered
    total = torch.where(total - snapped > dithered, total - step, total)
    return total - (binade * grid.snap + step)
