"""Scales from amaxes, with the rules that no kernel needs to know: shared scales and the old scale kept."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels import reference


def scale_from_amax(amax: Tensor, dtype: torch.dtype, *, power_of_two: bool) -> Tensor:
    """Dequantising scale of current scaling, FP32, elementwise: see `reference.scale_from_amax`."""
    return reference.scale_from_amax(amax, dtype, power_of_two=power_of_two)


def updated_scale(amax: Tensor, previous: Tensor, fp_max: Tensor, *, power_of_two: bool) -> Tensor:
    """Dequantising scales of delayed scaling: `previous` is kept where `amax` is 0 or not finite.

    Args:
        amax, previous, fp_max: FP32 [num_slots]; fp_max is the largest finite value of each slot's format.
    """
    scale = amax / fp_max
    if power_of_two:
        scale = reference.round_up_to_power_of_two(scale)
    usable = torch.isfinite(amax) & (amax > 0)
    return torch.where(usable, scale, previous)
