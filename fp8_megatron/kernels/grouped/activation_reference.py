"""The specification of an expert's activation fused with its casts to FP8, in plain PyTorch.

The rows are those of `rows_reference`. A row's activation is multiplied with its probability, in FP32, where it is
made. The formulas are those of `activation`. Rows of padding have the probability 0 and finite z, which makes zeros.
Amaxes and records do not see the rows from ``offsets[E]`` on, and the payloads there mean nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...activation_functions import KINDS, Activation
from ...dtypes import FP8_DTYPES, GROUP_ROWS
from ..activation.reference import activated, grad_of_input
from ..quantize.blocks import blocks_like, check_block_columns, quantize_blocks
from ..quantize.reference import quantize_with_or_without_scale
from ..reference import amax, encode
from ..registration import operator
from ..shapes import fp32, layouts, taken_scale


def _check_activation(z: Tensor, probs: Tensor, activation: Activation) -> None:
    assert z.ndim == 2 and activation.kind in KINDS and len(z) % GROUP_ROWS == 0, (z.shape, activation)
    assert probs.shape == z.shape[:1] and probs.dtype == torch.float32, (probs.shape, probs.dtype)


def _check_grad(grad: Tensor, z: Tensor, probs: Tensor, activation: Activation) -> None:
    _check_activation(z, probs, activation)
    assert grad.shape == (len(z), z.shape[1] // activation.row.num_inputs), (grad.shape, z.shape, activation)


def _values(z: Tensor, probs: Tensor, activation: Activation) -> Tensor:
    return probs[:, None] * activated(z, activation)


def _grads(grad: Tensor, z: Tensor, probs: Tensor, activation: Activation) -> Tensor:
    return grad_of_input(probs[:, None] * grad.float(), z, activation)


def _amax(values: Tensor, offsets: Tensor) -> Tensor:
    rows = values[: int(offsets[-1])]
    return amax(rows) if len(rows) else fp32(values, 1).zero_()


def _cast(
    values: Tensor,
    offsets: Tensor,
    dtype: torch.dtype,
    scale: Tensor | None,
    power_of_two: bool,
    amax_out: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Payload of FP32 `values` [R, C], and the scale that was taken from the groups' amax (empty if one was given)."""
    rows = values[: int(offsets[-1])]
    payload = torch.zeros_like(values, dtype=dtype)
    if not len(rows):
        return payload, taken_scale(values, scale).fill_(1.0)
    payload[: len(rows)], taken = quantize_with_or_without_scale(rows, dtype, scale, power_of_two, amax_out)
    return payload, taken


@operator(gpu=".activation_triton", fake=lambda z: fp32(z, 1), check=_check_activation)
def expert_activation_amax(z: Tensor, probs: Tensor, offsets: Tensor, activation: Activation) -> Tensor:
    """Amax of what `expert_activation_quantize` casts, FP32 [1], without writing it."""
    return _amax(_values(z, probs, activation), offsets)


@operator(gpu=".activation_triton", fake=lambda z: fp32(z, 1), check=_check_grad)
def expert_activation_backward_amax(
    grad: Tensor, z: Tensor, probs: Tensor, offsets: Tensor, activation: Activation
) -> Tensor:
    """Amax of the gradient of z that `expert_activation_backward_quantize` casts, FP32 [1], without writing it."""
    return _amax(_grads(grad, z, probs, activation), offsets)


@operator(
    gpu=".activation_triton",
    fake=lambda z, activation, dtype, scale: (
        z.new_empty((len(z), z.shape[1] // activation.row.num_inputs), dtype=dtype),
        taken_scale(z, scale),
    ),
    mutates=["amax_out"],
    check=_check_activation,
)
def expert_activation_quantize(
    z: Tensor,
    probs: Tensor,
    offsets: Tensor,
    activation: Activation,
    dtype: torch.dtype,
    *,
    scale: Tensor | None,
    power_of_two: bool = False,
    amax_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Activate `z` [R, Z], multiply each row with its probability, and quantise the result.

    Args:
        probs: FP32 [R].
        offsets: int32 [E + 1] of `routed_rows`.
        scale, power_of_two, amax_out: as in `activation_quantize`.

    Returns:
        payload [R, F]; the scale taken, FP32 [1] (empty if it was given).
    """
    assert dtype in FP8_DTYPES, dtype
    return _cast(_values(z, probs, activation), offsets, dtype, scale, power_of_two, amax_out)


@operator(
    gpu=".activation_triton",
    fake=lambda grad, z, dtype, scale, activation_dtype: (
        *layouts(z, dtype),
        layouts(grad, activation_dtype)[1],
        fp32(z, len(z)),
        taken_scale(z, scale),
    ),
    mutates=["amax_out"],
    check=_check_grad,
)
def expert_activation_backward_quantize(
    grad: Tensor,
    z: Tensor,
    probs: Tensor,
    offsets: Tensor,
    activation: Activation,
    dtype: torch.dtype,
    *,
    scale: Tensor | None,
    power_of_two: bool = False,
    amax_out: Tensor | None = None,
    activation_dtype: torch.dtype,
    activation_scale: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """From one read: the gradient of z in FP8 in both layouts, the transposed activation in FP8, and the gradient of
    the probabilities.

    Args:
        grad: gradient of the activation times its probability, [R, F].
        scale, power_of_two, amax_out: for the gradient of z, as in `activation_quantize`.
        activation_scale: the scale that quantised the activation in the forward.

    Returns:
        payload [R, Z] and its transpose [Z, R] in `dtype`; the activation times its probability [F, R] in
        `activation_dtype`; the gradient of the probabilities FP32 [R]; the scale taken, FP32 [1] (empty if it was
        given).
    """
    payload, taken = _cast(_grads(grad, z, probs, activation), offsets, dtype, scale, power_of_two, amax_out)
    activation_t = encode(_values(z, probs, activation), activation_scale, activation_dtype).t().contiguous()
    grad_probs = (grad.float() * activated(z, activation)).sum(dim=1)
    return payload, payload.t().contiguous(), activation_t, grad_probs, taken


def _check_width(activation: Activation, z: Tensor, probs: Tensor, dtype: torch.dtype) -> None:
    _check_activation(z, probs, activation)
    assert dtype in FP8_DTYPES, dtype
    check_block_columns(z.shape[1] // activation.row.num_inputs, "an expert's activation")


def _check_width_of_grad(grad: Tensor, z: Tensor, probs: Tensor, activation: Activation, dtype: torch.dtype) -> None:
    _check_grad(grad, z, probs, activation)
    _check_width(activation, z, probs, dtype)


@operator(
    gpu=".activation_triton",
    fake=lambda z, activation, dtype: blocks_like(z, (len(z), z.shape[1] // activation.row.num_inputs), dtype),
    check=_check_width,
)
def expert_activation_quantize_blocks(
    z: Tensor,
    probs: Tensor,
    offsets: Tensor,
    activation: Activation,
    dtype: torch.dtype,
    *,
    power_of_two: bool = False,
) -> tuple[Tensor, Tensor]:
    """`expert_activation_quantize` with a scale for each block of 128 along a row.

    Returns:
        payload [R, F], F a multiple of 128; its scales FP32 [F / 128, R], in the layout of `quantize.blocks`.
    """
    values = _written(_values(z, probs, activation), offsets)
    payload, scales, *_ = quantize_blocks(values, dtype, power_of_two=power_of_two)
    return payload, scales


@operator(
    gpu=".activation_triton",
    fake=lambda grad, z, dtype: (
        *blocks_like(z, z.shape, dtype),
        *blocks_like(z, z.shape[::-1], dtype),
        *blocks_like(z, grad.shape[::-1], dtype),
        fp32(z, len(z)),
    ),
    check=_check_width_of_grad,
)
def expert_activation_backward_quantize_blocks(
    grad: Tensor,
    z: Tensor,
    probs: Tensor,
    offsets: Tensor,
    activation: Activation,
    dtype: torch.dtype,
    *,
    power_of_two: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`expert_activation_backward_quantize` with scales of blocks, each layout with its own. All blocks of the
    transposes are of one expert's rows.

    Args:
        grad: gradient of the activation times its probability, [R, F], F a multiple of 128.

    Returns:
        The gradient of z [R, Z] in `dtype` and its scales FP32 [Z / 128, R]; its transpose [Z, R] and that one's scales
        [R / 128, Z]; the activation times its probability, [F, R] in `dtype`, and its scales [R / 128, F]; the gradient
        of the probabilities FP32 [R].
    """
    settings = dict(transposed=True, power_of_two=power_of_two)
    *grads, _ = quantize_blocks(_written(_grads(grad, z, probs, activation), offsets), dtype, **settings)
    values = _written(_values(z, probs, activation), offsets)
    _, _, activation_t, scales_t, _ = quantize_blocks(values, dtype, rowwise=False, **settings)
    grad_probs = (grad.float() * activated(z, activation)).sum(dim=1)
    payload, scales, payload_t, grad_scales_t = grads
    return payload, scales, payload_t, grad_scales_t, activation_t, scales_t, grad_probs


def _written(values: Tensor, offsets: Tensor) -> Tensor:
    """FP32 `values` [R, C], and zeros behind the last group."""
    return torch.where((torch.arange(len(values)) < offsets[-1])[:, None], values, 0.0)


@operator(
    gpu=".activation_triton",
    fake=lambda z, activation: z.new_empty((len(z), z.shape[1] // activation.row.num_inputs)),
    check=_check_activation,
)
def expert_activation(z: Tensor, probs: Tensor, offsets: Tensor, activation: Activation) -> Tensor:
    """Activate `z` [R, Z] and multiply each row with its probability: [R, F] in z's dtype, rounded once."""
    return _written(_values(z, probs, activation), offsets).to(z.dtype)


@operator(
    gpu=".activation_triton",
    fake=lambda z: (torch.empty_like(z), fp32(z, len(z))),
    check=_check_grad,
)
def expert_activation_backward(
    grad: Tensor, z: Tensor, probs: Tensor, offsets: Tensor, activation: Activation
) -> tuple[Tensor, Tensor]:
    """Backward of `expert_activation`: the gradient of z [R, Z] in its dtype, and of the probabilities, FP32 [R].

    Args:
        grad: [R, F].
    """
    grad_z = _written(_grads(grad, z, probs, activation), offsets).to(z.dtype)
    grad_probs = _written((grad.float() * activated(z, activation)).sum(dim=1, keepdim=True), offsets)
    return grad_z, grad_probs[:, 0]
