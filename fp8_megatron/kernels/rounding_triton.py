"""Stochastic rounding in Triton: the bits and the rounding of `rounding`, bit for bit.

An element costs 4 instructions for its bits without gaps, and 4 or 9 for rounding a moment or a master. Products with
powers of two are exact, so it does not matter whether they are fused with sums.
"""

# The parameters of a Triton kernel have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from .rounding import FACTOR, SECOND_FACTOR, Places

_FACTOR = tl.constexpr(FACTOR)
_SECOND_FACTOR = tl.constexpr(SECOND_FACTOR)

# How rows of a shard end inside a tile's large blocks: never, at most once in each, or anywhere.
_NO_GAPS, _WIDE, _NARROW = 0, 1, 2


@triton.jit
def _mix(x):
    """`rounding.mix` of uint32."""
    x = _half_mix((x ^ (x >> 16)) * _FACTOR)
    return x ^ (x >> 16)


@triton.jit
def _half_mix(x):
    return (x ^ (x >> 15)) * _SECOND_FACTOR


@triton.jit
def unit_of(places, start, n, num_step, offsets, UNIT: tl.constexpr, EXTENT: tl.constexpr):
    """What the bits of `EXTENT` elements from `start` depend on.

    They lie in one unit. If they do not, the results are those of each large block, [1, ROWS, 1].

    Args:
        places: `Places.table`; not read if UNIT is 0.
        UNIT: elements of a unit; 0: the storage is one parameter of seed 0.

    Returns:
        The hash's input at the first element, uint32; the first element's number in its unit, and left, width and gap
        (times the hash's factor), int32.
    """
    step_key = _mix(num_step.to(tl.int32).to(tl.uint32, bitcast=True))
    if UNIT == 0:
        key = start.to(tl.uint32) * _FACTOR + _mix(step_key)
        return key, 0, 0, 1, key
    else:
        row = 0
        if UNIT % EXTENT != 0:
            row = tl.arange(0, offsets.shape[1])[None, :, None] * (offsets.shape[0] * offsets.shape[2])
        unit = (start + row) // UNIT
        facts = places + unit * 5
        inside = start + row < n
        seed = tl.load(facts, mask=inside, other=0).to(tl.uint32, bitcast=True)
        first = tl.load(facts + 1, mask=inside, other=0).to(tl.uint32, bitcast=True)
        left = tl.load(facts + 2, mask=inside, other=0)
        width = tl.load(facts + 3, mask=inside, other=1)
        gap = tl.load(facts + 4, mask=inside, other=0).to(tl.uint32, bitcast=True)
        # The offsets of a large block count from the tile's first element.
        number = (start - unit * UNIT).to(tl.int32)
        key = (first + number.to(tl.uint32, bitcast=True)) * _FACTOR + _mix(seed + step_key)
        return key, number, left, width, gap * _FACTOR


@triton.jit
def rounding_bits(key, number, left, width, gap, skipped, offsets, GAPS: tl.constexpr):
    """`rounding.rounding_bits` of a tile, uint32, from `unit_of`; the tile begins `skipped` elements after it."""
    position = skipped + offsets
    x = key + position.to(tl.uint32, bitcast=True) * _FACTOR
    if GAPS == 1:
        row = tl.arange(0, offsets.shape[1])[None, :, None] * (offsets.shape[0] * offsets.shape[2])
        at = number + skipped + row
        rows = tl.where(at < left, 0, 1 + (at - left) // width)
        x += rows.to(tl.uint32, bitcast=True) * gap
        x = tl.where(offsets - row >= left + rows * width - at, x + gap, x)
    if GAPS == 2:
        at = number + position
        rows = tl.where(at < left, 0, 1 + (at - left) // width)
        x += rows.to(tl.uint32, bitcast=True) * gap
    return _half_mix(x)


@triton.jit
def exp_avg_bits(bits, COUNT: tl.constexpr):
    """`rounding.exp_avg_bits`, int32."""
    return (bits & ((1 << COUNT) - 1)).to(tl.int32, bitcast=True)


@triton.jit
def exp_avg_sq_bits(bits, COUNT: tl.constexpr):
    """`rounding.exp_avg_sq_bits`, int32."""
    return (bits >> (32 - COUNT)).to(tl.int32, bitcast=True)


@triton.jit
def round_to_grid(x, factor, bits, dtype: tl.constexpr, SECOND: tl.constexpr, SCALED: tl.constexpr, has_values=True):
    """`rounding.round_to_grid`: numbers of `dtype`, of which x · factor is below the largest. An inf or a NaN gives
    anything.

    Args:
        factor: a power of two.
        SECOND: a second moment, not below 0.
        SCALED: whether the storage has scales. If so, first moments below the smallest number become 0.
        has_values: where true, second moments with scales are at least the smallest number.
    """
    MANTISSA: tl.constexpr = 3 if dtype == tl.float8e4nv else 10 if dtype == tl.float16 else 7
    TO_SUBNORMAL: tl.constexpr = 2.0**-120 if dtype == tl.float8e4nv else 2.0**-112 if dtype == tl.float16 else 1.0
    CODE: tl.constexpr = tl.int8 if dtype == tl.float8e4nv else tl.int16
    scaled = x * factor * TO_SUBNORMAL  # the product of both factors may be below FP32's range
    # The smallest number, scaled, from its bits: Triton takes a literal below FP32's normal range for FP64.
    smallest = tl.full([], 1 << (23 - MANTISSA), tl.int32).to(tl.float32, bitcast=True)
    if SECOND:
        if SCALED:
            scaled = tl.maximum(scaled, tl.where(has_values, smallest, 0.0))
        rounded = scaled.to(tl.int32, bitcast=True) + exp_avg_sq_bits(bits, 23 - MANTISSA)
        # Without a sign the bits that are left are those of the number in `dtype`.
        return (rounded >> (23 - MANTISSA)).to(CODE).to(dtype, bitcast=True)
    else:
        rounded = scaled.to(tl.int32, bitcast=True) + exp_avg_bits(bits, 23 - MANTISSA)
        rounded &= -(1 << (23 - MANTISSA))
        if SCALED:
            rounded = tl.where(tl.abs(scaled) < smallest, 0, rounded)
        return (rounded.to(tl.float32, bitcast=True) * (1.0 / TO_SUBNORMAL)).to(dtype)


@triton.jit
def round_sum_to_grid(x, change, bits, smallest_normal, MANTISSA: tl.constexpr):
    """`rounding.round_sum_to_grid`, FP32, with the noise of `bits` (uint32).

    Args:
        smallest_normal: the scale times the format's smallest normal number.
    """
    SNAP: tl.constexpr = 12582912.0 / (1 << MANTISSA)
    SNAP_AND_A_STEP: tl.constexpr = 12582913.0 / (1 << MANTISSA)
    STEP_BITS: tl.constexpr = 0x3F800000 - (MANTISSA << 23)
    binade = ((x + change).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    binade = tl.maximum(binade, smallest_normal, propagate_nan=tl.PropagateNan.ALL)
    snapped = tl.fma(binade, SNAP, x)
    rest = (x - tl.fma(binade, -SNAP, snapped)) + change
    # Random bits below a float's exponent are uniform over one binade: here one to two steps.
    dither = ((bits >> 9) + STEP_BITS).to(tl.float32, bitcast=True)
    return tl.fma(binade, -SNAP_AND_A_STEP, libdevice.add_rd(snapped, tl.fma(dither, binade, rest)))


def place_arguments(n: int, places: Places, stand_in: Tensor, large_block: int) -> tuple[Tensor, int, int]:
    """The table, UNIT and GAPS of the kernels.

    Args:
        stand_in: any tensor, passed where there is no table.
        large_block: elements of the largest scale block.

    Raises:
        ValueError: a unit that is not made of whole scale blocks.
    """
    if places.table is None:
        return stand_in, 0, _NO_GAPS
    unit = n // places.table.shape[0]
    if unit * places.table.shape[0] != n or unit % large_block:
        raise ValueError(f"{n} elements in {places.table.shape[0]} units: not whole scale blocks of {large_block}")
    if not places.narrowest:
        return places.table, unit, _NO_GAPS
    return places.table, unit, _WIDE if places.narrowest >= large_block else _NARROW
