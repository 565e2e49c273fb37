"""The accuracy of low-precision values."""

from __future__ import annotations

import math

from torch import Tensor


def snr_db(value: Tensor, reference_value: Tensor) -> float:
    """10·log10(Σ ref² / Σ (value − ref)²) in FP64; inf if both are equal. −inf and NaN never pass a lower bound."""
    expected = reference_value.detach().double()
    noise = (value.detach().double() - expected).square().sum().item()
    signal = expected.square().sum().item()
    if noise == 0.0:
        return math.inf
    return 10.0 * math.log10(signal / noise) if signal > 0.0 else -math.inf
