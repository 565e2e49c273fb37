"""How good a low-precision value is: signal-to-noise ratio, saturation, underflow."""

from __future__ import annotations

import math

from torch import Tensor

from ..formats import FP8_DTYPES, MAX_FINITE
from ..kernels import reference


def snr_db(value: Tensor, reference_value: Tensor) -> float:
    """10·log10(Σ ref² / Σ (value − ref)²) in FP64; inf where they are equal, −inf or NaN never pass a lower bound."""
    expected = reference_value.detach().double()
    noise = (value.detach().double() - expected).square().sum().item()
    signal = expected.square().sum().item()
    if noise == 0.0:
        return math.inf
    return 10.0 * math.log10(signal / noise) if signal > 0.0 else -math.inf


def saturated_fraction(payload: Tensor) -> float:
    """Fraction of an FP8 payload's elements at the format's largest magnitude."""
    assert payload.dtype in FP8_DTYPES, payload.dtype
    return (reference.decode(payload).abs() >= MAX_FINITE[payload.dtype]).float().mean().item()


def underflow_fraction(value: Tensor, payload: Tensor) -> float:
    """Fraction of the non-zero elements of `value` that became zero in `payload`."""
    nonzero = value != 0
    lost = nonzero & (reference.decode(payload).view(value.shape) == 0)
    return (lost.sum() / nonzero.sum().clamp_min(1)).item()
