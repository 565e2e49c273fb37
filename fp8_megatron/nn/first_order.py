"""Backward functions that are not differentiated again."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from ..errors import UserError

_is_batched = torch._C._functorch.is_legacy_batchedtensor
_Gradients = TypeVar("_Gradients")

_TOLD = (
    "an FP8 layer has no second derivative, which a gradient penalty or create_graph=True asks for: keep the layers "
    "that the penalty passes as torch.nn.Linear (filter=…)"
)
_BATCHED = (
    "an FP8 layer takes one gradient at a time, and is_grads_batched=True, or vectorize=True of "
    "torch.autograd.functional, gives it a batch: leave it out"
)


def once_differentiable(backward: Callable[..., _Gradients]) -> Callable[..., _Gradients]:
    """torch's decorator of this name, with the fix in its error, and without its context where gradients are off, as in
    a backward without ``create_graph``. The context costs the host 2 µs a call.

    torch's detaches the results, so a second derivative that is asked of an input alone finds no way to it, and is
    zero without an error (``torch.autograd.functional.hvp``). A constant gradient of the output makes its results
    constants, although they depend on the weight: a gradient penalty would move nothing. Here both are errors.

    Raises:
        UserError: the gradients are a batch of gradients (``is_grads_batched``).
        RuntimeError: in a second backward, which passes the results.
    """

    @wraps(backward)
    def call(ctx: Any, *grads: Any) -> Any:
        if grads[0] is not None and _is_batched(grads[0]):
            raise UserError(_BATCHED)
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            made: Any = backward(ctx, *grads)
        # What is linear in its first argument has a derivative that depends on the other ones.
        if any(ctx.needs_input_grad[1:]) or any(isinstance(grad, Tensor) and grad.requires_grad for grad in grads):
            anchor = torch.empty(0, requires_grad=True)
            outputs = made if isinstance(made, tuple) else (made,)
            failing = _NoSecond.apply(outputs, anchor, *grads)
            return failing if isinstance(made, tuple) else failing[0]
        return made

    return call


class _NoSecond(torch.autograd.Function):
    """The gradients `made`, as if they depended on `inputs`; differentiating them is an error."""

    @staticmethod
    def forward(ctx: Any, made: tuple[Any, ...], *inputs: Any) -> tuple[Any, ...]:
        return tuple(value.detach() if isinstance(value, Tensor) else value for value in made)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        raise RuntimeError(_TOLD)
