"""Backward functions that are not differentiated again."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch.autograd import function

_Gradients = TypeVar("_Gradients")


def once_differentiable(backward: Callable[..., _Gradients]) -> Callable[..., _Gradients]:
    """torch's decorator of this name, without its context where gradients are off, as in a backward without
    ``create_graph``. The context costs the host 2 µs a call.
    """
    guarded: Callable[..., _Gradients] = function.once_differentiable(backward)

    @wraps(backward)
    def call(ctx: Any, *grads: Any) -> _Gradients:
        return guarded(ctx, *grads) if torch.is_grad_enabled() else backward(ctx, *grads)

    return call
