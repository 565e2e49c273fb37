"""Norms and activations in 16 bits, for formats without a kernel that computes and casts in one pass.

All arithmetic is FP32 and rounded once, to the input's dtype. Backward repeats the same operations on the same numbers,
so its second cast gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..activation_functions import Activation


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, rms: bool) -> tuple[Tensor, Tensor, Tensor]:
    """LayerNorm or RMSNorm of `x` [T, K] in its dtype, mean FP32 [T] (empty under RMSNorm) and rstd FP32 [T]."""
    wide = x.float()
    mean = wide.new_empty(0) if rms else wide.mean(dim=1)
    centred = wide if rms else wide - mean[:, None]
    rstd = torch.rsqrt(centred.square().mean(dim=1) + eps)
    return _normed(centred, weight, bias, rstd).to(x.dtype), mean, rstd


def norm_of_statistics(x: Tensor, weight: Tensor, bias: Tensor | None, mean: Tensor, rstd: Tensor) -> Tensor:
    """Recompute `norm` of `x` from its statistics."""
    wide = x.float()
    centred = wide if mean.numel() == 0 else wide - mean[:, None]
    return _normed(centred, weight, bias, rstd).to(x.dtype)


def _normed(centred: Tensor, weight: Tensor, bias: Tensor | None, rstd: Tensor) -> Tensor:
    value = centred * rstd[:, None] * weight.float()
    return value if bias is None else value + bias.float()


def function_of(activation: Activation) -> Callable[[Tensor], Tensor]:
    """What an activation computes of its input, or of the gate, in the input's dtype: torch's kernel if it has one."""
    row = activation.row
    if row.torch_name is None:
        return (lambda x: row.value(x, *activation.parameters)) if activation.parameters else row.value
    function: Callable[..., Tensor] = getattr(torch.nn.functional, row.torch_name)
    return partial(function, **row.torch_arguments) if row.torch_arguments else function


def _backward(grad: Tensor, x: Tensor, activation: Activation) -> Tensor:
    """The gradient of `function_of`'s input, FP32."""
    row = activation.row
    if row.torch_name is None:
        return grad * row.derivative(x, *activation.parameters)
    backward: Callable[..., Tensor] = getattr(torch.ops.aten, f"{row.torch_name}_backward")
    return backward(grad, x, **row.torch_arguments)


def activated(z: Tensor, activation: Activation) -> Tensor:
    """The activation [..., F] of `z` [..., F], or of [..., 2F] (gate, then up), in its dtype."""
    wide, function = z.float(), function_of(activation)
    if not activation.row.is_gated:
        return function(wide).to(z.dtype)
    gate, up = wide.chunk(2, dim=-1)
    if activation.row.up_value is not None:
        up = activation.row.up_value(up, *activation.parameters)
    return (function(gate) * up).to(z.dtype)


def activation_backward(grad: Tensor, z: Tensor, activation: Activation) -> Tensor:
    """The gradient of `z` in its dtype, from the gradient [T, F] of `activated`."""
    wide, upstream = z.float(), grad.float()
    if not activation.row.is_gated:
        return _backward(upstream, wide, activation).to(z.dtype)
    gate, up = wide.chunk(2, dim=1)
    grad_up, row = upstream * function_of(activation)(gate), activation.row
    if row.up_value is not None and row.up_derivative is not None:
        grad_up = grad_up * row.up_derivative(up, *activation.parameters)
        up = row.up_value(up, *activation.parameters)
    return torch.cat([_backward(upstream * up, gate, activation), grad_up], dim=1).to(z.dtype)
