"""Backward functions that are not differentiated again."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

_Gradients = TypeVar("_Gradients")

_TOLD = (
    "an FP8 layer has no second derivative, which a gradient penalty or create_graph=True asks for: keep the layers "
    "that the penalty passes as torch.nn.Linear (filter=…)"
)


def once_differentiable(backward: Callable[..., _Gradients]) -> Callable[..., _Gradients]:
    """torch's decorator of this name, with the fix in its error, and without its context where gradients are off, as in
    a backward without ``create_graph``. The context costs the host 2 µs a call.
    """

    @wraps(backward)
    def call(ctx: Any, *grads: Any) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            made: Any = backward(ctx, *grads)
        if not any(isinstance(grad, Tensor) and grad.requires_grad for grad in grads):
            return made
        outputs = made if isinstance(made, tuple) else (made,)
        fails: Any = torch._C._functions.DelayedError(_TOLD.encode(), len(outputs))
        return fails(*[None if output is None else output.detach().requires_grad_() for output in outputs])

    return call
