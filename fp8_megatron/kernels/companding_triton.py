"""Companded integers in Triton: `companding.encode` and `decode`, bit for bit.

For kernels compiled with ``enable_fp_fusion=False``: each product and sum is rounded separately, and fused operations
are written as `fma`. The code is bound by instructions, not memory. IEEE's divisions and roots test for arguments out
of range; shorter sequences replace them, equally exact where the result matters. Additions replace conversions.
The optimizer's step rounds with `round_companded`, which is approximate and takes any kernel.
"""

# The parameters of a Triton kernel have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

_SMALLEST_NORMAL = tl.constexpr(1.1754943508222875e-38)
_INF_BITS = tl.constexpr(0x7F800000)
# Added to a float in [0, 2²²) it leaves the nearest integer in the low bits.
_INTEGER = tl.constexpr(8388608.0)
_INTEGER_BITS = tl.constexpr(0x4B000000)


@triton.jit
def floor(x):
    """⌊x⌋ of FP32 x in [0, 2²²); no conversion."""
    nearest = (x + _INTEGER) - _INTEGER
    return tl.where(nearest > x, nearest - 1.0, nearest)


@triton.jit
def integer(x):
    """int32 of an FP32 integer in [0, 2²²)."""
    return (x + _INTEGER).to(tl.int32, bitcast=True) - _INTEGER_BITS


@triton.jit
def companded_scale(bits):
    """The scale of blocks whose amax has these bits (`block_amax_bits`): the amax, 1 for zeros, NaN beyond numbers."""
    scale = tl.maximum(bits.to(tl.float32, bitcast=True), _SMALLEST_NORMAL)
    scale = tl.where(bits == 0, 1.0, scale)
    return tl.where(bits < _INF_BITS, scale, float("nan"))


@triton.jit
def _expand(code, dtype: tl.constexpr):
    # Quotients in two instructions: the reciprocal in two parts gives all of these codes correctly rounded.
    if dtype == tl.int8:
        share = tl.fma(code, 0.007874015718698502, code * 2.9332994366804144e-11)
        return share * tl.abs(share)
    else:
        share = tl.fma(code, 0.003921568859368563, code * -2.319175823606301e-10)
        return (share * share) * (share * share)


@triton.jit
def decode_companded(payload, scale):
    """`companding.decode`: FP32."""
    return _expand(payload.to(tl.float32), payload.dtype) * scale


@triton.jit
def _quotient(x, divisor, inverse):
    """x / divisor, correctly rounded, where divisor is in [1, 4) and x neither subnormal nor near it.

    Two corrections by the exact remainder (Markstein; what a division does once its operands are found in range).
    """
    quotient = x * inverse
    quotient = tl.fma(tl.fma(-quotient, divisor, x), inverse, quotient)
    return tl.fma(tl.fma(-quotient, divisor, x), inverse, quotient)


@triton.jit
def _square_root(x):
    """√x, correctly rounded, of x in [2⁻¹⁰⁰, 2¹⁰⁰]: a root with its range test left out."""
    inverse = tl.rsqrt(x)
    root = x * inverse
    return tl.fma(tl.fma(-root, root, x), inverse * 0.5, root)


@triton.jit
def _quotient_is_above(x, divisor, noise):
    """Whether fl(x / divisor) > noise · 2⁻²⁴, for integers `noise` in [0, 2²⁴); false where divisor is a NaN.

    The quotient of two floats is never half way between two floats. It is therefore rounded to above 2⁻²⁴ · noise
    exactly if the exact quotient is more than half a unit above it. Near that point the remainder is exact.
    """
    divisor = divisor * 5.9604644775390625e-08  # 2⁻²⁴
    power = (noise.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.fma(-noise, divisor, x) > power * 5.9604644775390625e-08 * divisor


@triton.jit
def encode_companded(x, scale, noise, dtype: tl.constexpr):
    """`companding.encode` in blocks whose scale is `companded_scale` of their own amax.

    Args:
        noise: 2²⁴ times the noise of `companding.encode`, integers in FP32; 2²³ rounds to nearest.
    """
    LARGEST: tl.constexpr = 127.0 if dtype == tl.int8 else 255.0
    if dtype == tl.int8:
        magnitude = tl.abs(x)
    else:
        magnitude = tl.maximum(x, 0.0)
    # In units of a power of two near the scale nothing that matters is subnormal.
    exponent = tl.minimum(scale.to(tl.int32, bitcast=True) & 0x7F800000, 0x7E800000)
    unit = (0x7F000000 - exponent).to(tl.float32, bitcast=True)
    divisor = scale * unit
    share = _quotient(magnitude * unit, divisor, tl.div_rn(1.0, divisor))
    # A share below 2⁻³³ has code 0, whatever its bits. The value used here for a NaN also has code 0.
    root = _square_root(tl.maximum(share, 8.673617379884035e-19))
    if dtype == tl.uint8:
        root = _square_root(root)
    code = tl.minimum(floor(root * LARGEST), LARGEST - 1.0)
    below = _expand(code, dtype) * scale * unit
    above = _expand(code + 1.0, dtype) * scale * unit
    code = tl.where(_quotient_is_above(magnitude * unit - below, above - below, noise), code + 1.0, code)
    if dtype == tl.int8:
        return tl.where(x < 0.0, -integer(code), integer(code)).to(dtype)
    else:
        positive = (magnitude > 0.0) & (scale == scale)
        return integer(tl.where(positive, tl.maximum(code, 1.0), code)).to(dtype)


@triton.jit
def round_companded(x, scale, bits, dtype: tl.constexpr):
    """`companding.encode` with the noise of `bits` (int32, 23 random bits), for a step of the optimizer.

    Quotients and roots are approximate: the chance of rounding up differs by less than 2⁻¹⁵ from the exact one. A root
    on the wrong side of a code does not matter, because a place of 1 in a step is a place of 0 in the next.

    Args:
        x: uint8 takes x ≥ 0.
        scale: `companded_scale` of the amax of x's block.
    """
    MOST: tl.constexpr = 16129.0 if dtype == tl.int8 else 4228250625.0
    # In units of a power of two near the scale nothing that matters is subnormal.
    exponent = tl.minimum(scale.to(tl.int32, bitcast=True) & 0x7F800000, 0x7E800000)
    unit = (0x7F000000 - exponent).to(tl.float32, bitcast=True)
    inverse = tl.where(scale == scale, libdevice.fast_dividef(MOST, scale * unit), 0.0)
    y = tl.minimum((tl.abs(x) * unit) * inverse, MOST)
    root = tl.sqrt(y)
    # Random bits below a float's exponent are uniform over [1, 2).
    dither = (bits + 0x3F800000).to(tl.float32, bitcast=True)
    if dtype == tl.int8:
        code = libdevice.add_rd(root, _INTEGER) - _INTEGER
        rest = tl.fma(-code, code, y)
        gap = tl.fma(code, 2.0, 1.0)
        code = tl.where(tl.fma(-dither, gap, rest + gap) > 0.0, code + 1.0, code)
        # The low byte of a float whose last place is 1 is the integer's, in two's complement.
        signed = tl.where(x < 0.0, -code, code)
        return (signed + 12582912.0).to(tl.int32, bitcast=True).to(dtype)
    else:
        code = tl.minimum(libdevice.add_rd(tl.sqrt(root), 2.0 - dither), 255.0)
        positive = (x > 0.0) & (scale == scale)
        code = tl.where(positive, tl.maximum(code, 1.0), 0.0)
        return libdevice.add_rd(code, _INTEGER).to(tl.int32, bitcast=True).to(dtype)
