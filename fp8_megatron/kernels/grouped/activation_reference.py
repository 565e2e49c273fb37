"""The specification of an expert's activation in 16 bits, and fused with its casts to FP8 in blocks, in plain PyTorch:
that of `activation.reference` with a scale for each block of 128.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...activation_functions import Activation
from ...dtypes import FP8_DTYPES
from ..activation.reference import ExpertRows, activated, check_activation, check_grad, grad_of_weighted, weighted
from ..quantize.blocks import blocks_like, check_block_columns, quantize_blocks
from ..registration import operator
from ..shapes import fp32


def _check_width(activation: Activation, z: Tensor, probs: Tensor, offsets: Tensor, dtype: torch.dtype) -> None:
    check_activation(z, activation, ExpertRows(probs, offsets))
    assert dtype in FP8_DTYPES, dtype
    check_block_columns(z.shape[1] // activation.row.num_inputs, "an expert's activation")


def _check_width_of_grad(
    grad: Tensor, z: Tensor, probs: Tensor, offsets: Tensor, activation: Activation, dtype: torch.dtype
) -> None:
    check_grad(grad, z, activation, ExpertRows(probs, offsets))
    _check_width(activation, z, probs, offsets, dtype)


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
    """`activation_quantize` of experts with a scale for each block of 128 along a row.

    Returns:
        payload [R, F], F a multiple of 128; its scales FP32 [F / 128, R], in the layout of `quantize.blocks`.
    """
    values = _written(weighted(z, activation, ExpertRows(probs, offsets)), offsets)
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
    """`activation_backward_quantize` of experts with scales of blocks, each layout with its own. All blocks of the
    transposes are of one expert's rows.

    Args:
        grad: gradient of the activation times its probability, [R, F], F a multiple of 128.

    Returns:
        The gradient of z [R, Z] in `dtype` and its scales FP32 [Z / 128, R]; its transpose [Z, R] and that one's scales
        [R / 128, Z]; the activation times its probability, [F, R] in `dtype`, and its scales [R / 128, F]; the gradient
        of the probabilities FP32 [R].
    """
    settings, experts = dict(transposed=True, power_of_two=power_of_two), ExpertRows(probs, offsets)
    grad_z = _written(grad_of_weighted(grad, z, activation, experts), offsets)
    *grads, _ = quantize_blocks(grad_z, dtype, **settings)
    values = _written(weighted(z, activation, experts), offsets)
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
    check=check_activation,
)
def expert_activation(z: Tensor, activation: Activation, experts: ExpertRows) -> Tensor:
    """Activate `z` [R, Z] and multiply each row with its probability: [R, F] in z's dtype, rounded once.

    Rows behind the last group mean nothing.
    """
    return weighted(z, activation, experts).to(z.dtype)


@operator(
    gpu=".activation_triton",
    fake=lambda z: (torch.empty_like(z), fp32(z, len(z))),
    check=check_grad,
)
def expert_activation_backward(
    grad: Tensor, z: Tensor, activation: Activation, experts: ExpertRows
) -> tuple[Tensor, Tensor]:
    """Backward of `expert_activation`: the gradient of z [R, Z] in its dtype, and of the probabilities, FP32 [R].

    Args:
        grad: [R, F].
    """
    grad_probs = (grad.float() * activated(z, activation)).sum(dim=1)
    return grad_of_weighted(grad, z, activation, experts).to(z.dtype), grad_probs
