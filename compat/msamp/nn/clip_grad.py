"""Clipping by the norm of all gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def clip_grad_norm_(
    parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale gradients so that their norm is at most `max_norm`; returns the norm before.

    Gradients in FP8 are scaled through their scales. `torch.nn.utils.clip_grad_norm_` does the same.

    Args:
        max_norm: 0 or less only measures.

    Raises:
        RuntimeError: the norm is not finite, with `error_if_nonfinite`.
    """
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if max_norm > 0:
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite)
    grads = [param.grad for param in params if param.grad is not None]
    return torch.nn.utils.get_total_norm(grads, norm_type, error_if_nonfinite)
