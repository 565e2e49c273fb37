"""The specification of an MLP's activation fused with its casts to FP8, in plain PyTorch.

`activation_functions` has the formulas. z is [T, F], or gate and up side by side [T, 2F] if the activation is gated.

The rows may be those of experts (`grouped.rows_reference`). A row's activation is multiplied with its probability, in
FP32, where it is made. Rows of padding have the probability 0 and finite z, which makes zeros. Amaxes and records do
not see the rows behind the last group, and the payloads there mean nothing.

Everything up to the cast is FP32; neither the activation nor the gradient of z is written in 16 bits. Only z is kept
for backward. The weight gradient quantises the activation again, with the scale of the forward.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...activation_functions import KINDS, Activation
from ...dtypes import FP8_DTYPES, GROUP_ROWS
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


class ExpertRows(NamedTuple):
    """Which experts rows are of.

    Attributes:
        probs: of each row, FP32 [T]; None: the rows are tokens, of no experts.
        offsets: where experts' groups start, int32 [E + 1] of `routed_rows`; None with `probs`.
    """

    probs: Tensor | None = None
    offsets: Tensor | None = None


NO_EXPERTS = ExpertRows()


def weighted(z: Tensor, activation: Activation, experts: ExpertRows) -> Tensor:
    """`activated`, times each row's probability."""
    values = activated(z, activation)
    return values if experts.probs is None else experts.probs[:, None] * values


def grad_of_weighted(grad: Tensor, z: Tensor, activation: Activation, experts: ExpertRows) -> Tensor:
    """`grad_of_input`, from the gradient of `weighted`."""
    return grad_of_input(grad if experts.probs is None else experts.probs[:, None] * grad.float(), z, activation)


def check_activation(z: Tensor, activation: Activation, experts: ExpertRows) -> None:
    """Raise unless the operands fit each other."""
    assert z.ndim == 2 and activation.kind in KINDS, (z.shape, activation)
    if experts.probs is not None:
        assert len(z) % GROUP_ROWS == 0 and experts.offsets is not None, z.shape
        assert experts.probs.shape == z.shape[:1] and experts.probs.dtype == torch.float32, experts.probs.shape


def check_grad(grad: Tensor, z: Tensor, activation: Activation, experts: ExpertRows) -> None:
    """Raise unless the operands fit each other."""
    check_activation(z, activation, experts)
    assert grad.shape == (len(z), z.shape[1] // activation.row.num_inputs), (grad.shape, z.shape, activation)


def _amax(values: Tensor, experts: ExpertRows) -> Tensor:
    rows = values if experts.offsets is None else values[: int(experts.offsets[-1])]
    return amax(rows) if len(rows) else fp32(values, 1).zero_()


def _cast(
    values: Tensor,
    experts: ExpertRows,
    dtype: torch.dtype,
    scale: Tensor | None,
    power_of_two: bool,
    amax_out: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Payload of FP32 `values` [T, C], and the scale that was taken from their amax (empty if one was given)."""
    if experts.offsets is None:
        return quantize_with_or_without_scale(values, dtype, scale, power_of_two, amax_out)
    rows = values[: int(experts.offsets[-1])]
    payload = torch.zeros_like(values, dtype=dtype)
    if not len(rows):
        return payload, taken_scale(values, scale).fill_(1.0)
    payload[: len(rows)], taken = quantize_with_or_without_scale(rows, dtype, scale, power_of_two, amax_out)
    return payload, taken


@operator(gpu=".triton", fake=lambda z: fp32(z, 1), check=check_activation)
def activation_amax(z: Tensor, activation: Activation, experts: ExpertRows = NO_EXPERTS) -> Tensor:
    """Amax of what `activation_quantize` casts, FP32 [1], without writing it."""
    return _amax(weighted(z, activation, experts), experts)


@operator(gpu=".triton", fake=lambda z: fp32(z, 1), check=check_grad)
def activation_backward_amax(
    grad: Tensor, z: Tensor, activation: Activation, experts: ExpertRows = NO_EXPERTS
) -> Tensor:
    """Amax of the gradient of `z` that `activation_backward_quantize` casts, FP32 [1], without writing it."""
    return _amax(grad_of_weighted(grad, z, activation, experts), experts)


@operator(
    gpu=".triton",
    fake=lambda z, activation, dtype, scale: (
        z.new_empty((len(z), z.shape[1] // activation.row.num_inputs), dtype=dtype),
        taken_scale(z, scale),
    ),
    mutates=["amax_out"],
    check=check_activation,
)
def activation_quantize(
    z: Tensor,
    activation: Activation,
    dtype: torch.dtype,
    experts: ExpertRows = NO_EXPERTS,
    *,
    scale: Tensor | None,
    power_of_two: bool = False,
    amax_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Activate `z`, multiply experts' rows with their probabilities, and quantise the result.

    Args:
        scale: FP32 [1]; None takes one from the amax of the result (current scaling).
        amax_out: FP32 [1], raised to the amax of the result when given.

    Returns:
        payload [T, F]; the scale taken, FP32 [1] (empty if it was given).
    """
    assert dtype in FP8_DTYPES, dtype
    return _cast(weighted(z, activation, experts), experts, dtype, scale, power_of_two, amax_out)


@operator(
    gpu=".triton",
    fake=lambda grad, z, dtype, experts, scale, activation_dtype, column_sums: (
        *layouts(z, dtype),
        layouts(grad, activation_dtype)[1],
        fp32(z, len(z) if experts.probs is not None else z.shape[1] if column_sums else 0),
        taken_scale(z, scale),
    ),
    mutates=["amax_out"],
    check=check_grad,
)
def activation_backward_quantize(
    grad: Tensor,
    z: Tensor,
    activation: Activation,
    dtype: torch.dtype,
    experts: ExpertRows = NO_EXPERTS,
    *,
    scale: Tensor | None,
    power_of_two: bool = False,
    amax_out: Tensor | None = None,
    activation_dtype: torch.dtype,
    activation_scale: Tensor,
    column_sums: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """From one read: the gradient of z in FP8 in both layouts, the transposed activation in FP8, and sums.

    Args:
        grad: gradient of the activation [T, F], of experts times its probability.
        scale, power_of_two, amax_out: for the gradient of z, as in `activation_quantize`.
        activation_scale: the scale that quantised the activation in the forward.
        column_sums: of no experts: also sum the gradient of z over the tokens (a bias's gradient).

    Returns:
        payload [T, Z] and its transpose [Z, T] in `dtype`, Z the columns of z; what `activation_quantize` casts, [F, T]
        in `activation_dtype`; of experts the gradient of the probabilities FP32 [T], else column sums FP32 [Z] (or
        empty); the scale taken, FP32 [1] (empty if it was given).
    """
    assert not (column_sums and experts.probs is not None), "experts' rows have no column sums"
    grad_z = grad_of_weighted(grad, z, activation, experts)
    payload, taken = _cast(grad_z, experts, dtype, scale, power_of_two, amax_out)
    activation_t = encode(weighted(z, activation, experts), activation_scale, activation_dtype).t().contiguous()
    if experts.probs is not None:
        sums = (grad.float() * activated(z, activation)).sum(dim=1)
    else:
        sums = grad_z.sum(dim=0) if column_sums else grad_z.new_empty(0)
    return payload, payload.t().contiguous(), activation_t, sums, taken


def _check_blocks(z: Tensor, activation: Activation, dtype: torch.dtype) -> None:
    check_activation(z, activation, NO_EXPERTS)
    assert dtype in FP8_DTYPES, dtype
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
    check_grad(grad, z, activation, NO_EXPERTS)
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
