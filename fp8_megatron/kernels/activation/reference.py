"""The specification of an MLP's activation fused with its casts to FP8, in plain PyTorch.

`activation_functions` has the formulas. z is [T, F], or gate and up side by side [T, 2F] if the activation is gated.

Everything up to the cast is FP32; neither the activation nor the gradient of z is written in 16 bits. Only z is kept
for backward. The weight gradient quantises the activation again, with the scale of the forward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...activation_functions import KINDS, Activation
from ...dtypes import FP8_DTYPES
from ..quantize.blocks import blocks_like, check_block_columns, quantize_blocks
from ..quantize.reference import quantize_with_or_without_scale
from ..reference import amax, encode
from ..registration import operator
from ..shapes import fp32, layouts, taken_scale


def activated(z: Tensor, activation: Activation) -> Tensor:
    """FP32 [T, F] of `z`."""
    row, values = activation.row, z.float()
    if not row.is_gated:
        return row.value(values, *activation.parameters)
    gate, up = values.chunk(2, dim=1)
    if row.up_value is not None:
        up = row.up_value(up, *activation.parameters)
    return row.value(gate, *activation.parameters) * up


def grad_of_input(grad: Tensor, z: Tensor, activation: Activation) -> Tensor:
    """FP32, of z's shape, from the gradient [T, F] of the activation."""
    row, upstream, values = activation.row, grad.float(), z.float()
    if not row.is_gated:
        return upstream * row.derivative(values, *activation.parameters)
    gate, up = values.chunk(2, dim=1)
    grad_up = upstream * row.value(gate, *activation.parameters)
    if row.up_value is not None and row.up_derivative is not None:
        grad_up = grad_up * row.up_derivative(up, *activation.parameters)
        up = row.up_value(up, *activation.parameters)
    return torch.cat([upstream * (up * row.derivative(gate, *activation.parameters)), grad_up], dim=1)


@operator(gpu=".triton", fake=lambda z: fp32(z, 1))
def activation_amax(z: Tensor, activation: Activation) -> Tensor:
    """Amax of the activation of `z`, FP32 [1], without writing it."""
    return amax(activated(z, activation))


@operator(gpu=".triton", fake=lambda z: fp32(z, 1))
def activation_backward_amax(grad: Tensor, z: Tensor, activation: Activation) -> Tensor:
    """Amax of the gradient of `z`, FP32 [1], without writing it; `grad` [T, F] is the activation's."""
    return amax(grad_of_input(grad, z, activation))


def _check_activation(z: Tensor, activation: Activation, dtype: torch.dtype) -> None:
    assert z.ndim == 2 and activation.kind in KINDS and dtype in FP8_DTYPES, (z.shape, activation, dtype)


@operator(
    gpu=".triton",
    fake=lambda z, activation, dtype, scale: (
        z.new_empty((len(z), z.shape[1] // activation.row.num_inputs), dtype=dtype),
        taken_scale(z, scale),
    ),
    mutates=["amax_out"],
    check=_check_activation,
)
def activation_quantize(
    z: Tensor,
    activation: Activation,
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
    return quantize_with_or_without_scale(activated(z, activation), dtype, scale, power_of_two, amax_out)


def _check_grad(grad: Tensor, z: Tensor, activation: Activation) -> None:
    assert z.shape[1] == activation.row.num_inputs * grad.shape[1], (z.shape, grad.shape, activation)


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
    activation: Activation,
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
    grad_z = grad_of_input(grad, z, activation)
    payload, taken = quantize_with_or_without_scale(grad_z, dtype, scale, power_of_two, amax_out)
    activation_t = encode(activated(z, activation), activation_scale, activation_dtype).t().contiguous()
    sums = grad_z.sum(dim=0) if column_sums else grad_z.new_empty(0)
    return payload, payload.t().contiguous(), activation_t, sums, taken


def _check_blocks(z: Tensor, activation: Activation, dtype: torch.dtype) -> None:
    _check_activation(z, activation, dtype)
    check_block_columns(z.shape[1] // activation.row.num_inputs, "an activation")


@operator(
    gpu=".blocks_triton",
    fake=lambda z, activation, dtype: blocks_like(z, (len(z), z.shape[1] // activation.row.num_inputs), dtype),
    check=_check_blocks,
)
def activation_quantize_blocks(
    z: Tensor, activation: Activation, dtype: torch.dtype, *, power_of_two: bool = False
) -> tuple[Tensor, Tensor]:
    """`activation_quantize` with a scale for each block of 128 along a row.

    Returns:
        payload [T, F], T a multiple of 16 and F of 128; its scales FP32 [F / 128, T], as `quantize.blocks` lays them
        out.
    """
    payload, scales, *_ = quantize_blocks(activated(z, activation), dtype, power_of_two=power_of_two)
    return payload, scales


def _check_grad_blocks(grad: Tensor, z: Tensor, activation: Activation, dtype: torch.dtype) -> None:
    _check_grad(grad, z, activation)
    _check_blocks(z, activation, dtype)


@operator(
    gpu=".blocks_triton",
    fake=lambda grad, z, dtype, column_sums: (
        *blocks_like(z, z.shape, dtype),
        *blocks_like(z, z.shape[::-1], dtype),
        *blocks_like(z, grad.shape[::-1], dtype),
        fp32(z, z.shape[1] if column_sums else 0),
    ),
    check=_check_grad_blocks,
)
def activation_backward_quantize_blocks(
    grad: Tensor,
    z: Tensor,
    activation: Activation,
    dtype: torch.dtype,
    *,
    column_sums: bool,
    power_of_two: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`activation_backward_quantize` with scales of blocks, each layout with its own.

    Args:
        grad: gradient of the activation, [T, F], T a multiple of 16 and F of 128.

    Returns:
        The gradient of z [T, Z] and its scales FP32 [Z / 128, T]; its transpose [Z, T] and that one's scales
        [⌈T / 128⌉, Z]; the activation [F, T] and its scales [⌈T / 128⌉, F]; column sums FP32 [Z] (or empty).
    """
    settings = dict(transposed=True, power_of_two=power_of_two)
    *grads, sums = quantize_blocks(grad_of_input(grad, z, activation), dtype, column_sums=column_sums, **settings)
    _, _, activation_t, its_scales, _ = quantize_blocks(activated(z, activation), dtype, rowwise=False, **settings)
    payload, scales, payload_t, scales_t = grads
    return payload, scales, payload_t, scales_t, activation_t, its_scales, sums
