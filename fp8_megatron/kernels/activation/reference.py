"""The specification of an MLP's activation fused with its casts to FP8, in plain PyTorch.

``gelu``: z · σ(2u), u = √(2/π) · (z + 0.044715 z³), the tanh form of GELU (arXiv 1606.08415), as in GPT-2.
``gelu_erf``: z · Φ(z), Φ(z) = (1 + erf(z / √2)) / 2, GELU itself; by erfc, which keeps its tail.
``squared_relu``: max(z, 0)² (arXiv 2109.08668), as in Nemotron.
``swiglu``: z holds gate and up side by side; SiLU(gate) · up (arXiv 2002.05202).
``quick_geglu``: the same with gate · σ(1.702 gate), the sigmoid form of GELU (arXiv 1606.08415), for SiLU.

Everything up to the cast is FP32; neither the activation nor the gradient of z is written in 16 bits. Only z is kept
for backward. The weight gradient quantises the activation again, with the scale of the forward.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...dtypes import FP8_DTYPES
from ..quantize.reference import quantize_with_or_without_scale
from ..reference import amax, encode
from ..registration import operator
from ..shapes import fp32, layouts, taken_scale

_TWO_SQRT_2_OVER_PI = 2.0 * math.sqrt(2.0 / math.pi)
_CUBIC = 0.044715

_SQRT_HALF, _ROOT_OF_2_PI = math.sqrt(0.5), math.sqrt(2.0 * math.pi)

_QUICK = 1.702

#: Columns of z for one column of the activation.
INPUTS = {"gelu": 1, "gelu_erf": 1, "squared_relu": 1, "swiglu": 2, "quick_geglu": 2}


def activation(z: Tensor, kind: str) -> Tensor:
    """FP32 [T, F] of `z` [T, F], or [T, 2F] if it is gated."""
    value, _ = _value_and_derivatives(z, kind)
    return value


def _value_and_derivatives(z: Tensor, kind: str) -> tuple[Tensor, tuple[Tensor, ...]]:
    values = z.float()
    if kind == "gelu":
        squared = values * values
        gate = torch.sigmoid(_TWO_SQRT_2_OVER_PI * values * (1.0 + _CUBIC * squared))
        slope = values * gate * (1.0 - gate) * (_TWO_SQRT_2_OVER_PI * (1.0 + 3.0 * _CUBIC * squared))
        return values * gate, (gate + slope,)
    if kind == "gelu_erf":
        gate = 0.5 * torch.erfc(-_SQRT_HALF * values)
        return values * gate, (gate + values * torch.exp(-0.5 * values * values) / _ROOT_OF_2_PI,)
    if kind == "squared_relu":
        positive = torch.where(values <= 0.0, 0.0, values)  # a NaN stays one
        return positive * positive, (2.0 * positive,)
    if kind not in INPUTS:
        raise ValueError(f"activation {kind!r} is not one of {', '.join(INPUTS)}")
    gate, up = values.chunk(2, dim=1)
    if kind == "quick_geglu":
        sigmoid = torch.sigmoid(_QUICK * gate)
        gated = gate * sigmoid
        return gated * up, (up * (sigmoid * (1.0 + _QUICK * gate * (1.0 - sigmoid))), gated)
    assert kind == "swiglu", f"the specification has no {kind}"
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    return silu * up, (up * (sigmoid * (1.0 + gate * (1.0 - sigmoid))), silu)


@operator(gpu=".triton", fake=lambda z: fp32(z, 1))
def activation_amax(z: Tensor, kind: str) -> Tensor:
    """Amax of the activation of `z`, FP32 [1], without writing it."""
    return amax(activation(z, kind))


@operator(gpu=".triton", fake=lambda z: fp32(z, 1))
def activation_backward_amax(grad: Tensor, z: Tensor, kind: str) -> Tensor:
    """Amax of the gradient of `z`, FP32 [1], without writing it; `grad` [T, F] is the activation's."""
    return amax(grad_of_input(grad, z, kind))


def grad_of_input(grad: Tensor, z: Tensor, kind: str) -> Tensor:
    _, derivatives = _value_and_derivatives(z, kind)
    return torch.cat([grad.float() * derivative for derivative in derivatives], dim=1)


def _check_activation(z: Tensor, kind: str, dtype: torch.dtype) -> None:
    assert z.ndim == 2 and kind in INPUTS and dtype in FP8_DTYPES, (z.shape, kind, dtype)


@operator(
    gpu=".triton",
    fake=lambda z, kind, dtype, scale: (
        z.new_empty((len(z), z.shape[1] // INPUTS[kind]), dtype=dtype),
        taken_scale(z, scale),
    ),
    mutates=["amax_out"],
    check=_check_activation,
)
def activation_quantize(
    z: Tensor,
    kind: str,
    dtype: torch.dtype,
    *,
    scale: Tensor | None,
    power_of_two: bool = False,
    amax_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Activate `z` and quantise the result.

    Args:
        scale: FP32 [1]; None takes one from the amax of the result (current scaling).
        amax_out: FP32 [1], raised to the amax of the result when given.

    Returns:
        payload [T, F]; the scale taken, FP32 [1] (empty if it was given).
    """
    return quantize_with_or_without_scale(activation(z, kind), dtype, scale, power_of_two, amax_out)


def _check_grad(grad: Tensor, z: Tensor, kind: str) -> None:
    assert z.shape[1] == INPUTS[kind] * grad.shape[1], (z.shape, grad.shape, kind)


@operator(
    gpu=".triton",
    fake=lambda grad, z, dtype, scale, activation_dtype, column_sums: (
        *layouts(z, dtype),
        layouts(grad, activation_dtype)[1],
        fp32(z, z.shape[1] if column_sums else 0),
        taken_scale(z, scale),
    ),
    mutates=["amax_out"],
    check=_check_grad,
)
def activation_backward_quantize(
    grad: Tensor,
    z: Tensor,
    kind: str,
    dtype: torch.dtype,
    *,
    scale: Tensor | None,
    power_of_two: bool = False,
    amax_out: Tensor | None = None,
    activation_dtype: torch.dtype,
    activation_scale: Tensor,
    column_sums: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """From one read: the gradient of z in FP8 in both layouts, and the transposed activation in FP8.

    Args:
        grad: gradient of the activation, [T, F].
        scale, power_of_two, amax_out: for the gradient of z, as in `activation_quantize`.
        activation_scale: the scale that quantised the activation in the forward.
        column_sums: also sum the gradient of z over the tokens (a bias's gradient).

    Returns:
        payload [T, Z] and its transpose [Z, T] in `dtype`, Z the columns of z; the activation [F, T] in
        `activation_dtype`; column sums FP32 [Z] (or empty); the scale taken, FP32 [1] (empty if it was given).
    """
    grad_z = grad_of_input(grad, z, kind)
    payload, taken = quantize_with_or_without_scale(grad_z, dtype, scale, power_of_two, amax_out)
    activation_t = encode(activation(z, kind), activation_scale, activation_dtype).t().contiguous()
    sums = grad_z.sum(dim=0) if column_sums else grad_z.new_empty(0)
    return payload, payload.t().contiguous(), activation_t, sums, taken
