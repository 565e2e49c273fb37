"""Clipping by the global norm, on the device."""

from __future__ import annotations

import torch
from torch import Tensor


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients are multiplied by, FP32 [1]: min(1, max_norm / norm), 1 if max_norm is 0, NaN for a bad norm.

    With NaN the optimizer step writes nothing.
    """
    factor = torch.ones_like(norm) if max_norm <= 0 else (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return torch.where(torch.isfinite(norm), factor, torch.full_like(norm, torch.nan))
