"""Experts' activations fused with their casts to FP8, and their backward: launches of the kernels of `activation`.

Bytes per element of a 16-bit activation as there, and 4 for each row and 64 columns in backward (the probabilities'
gradients, written and added up). Programs whose rows belong to nobody return at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...activation_functions import Activation
from ..activation.blocks_triton import backward_quantize_rows_in_blocks, quantize_rows_in_blocks
from ..activation.triton import ExpertRows, amax_of_rows, backward_quantize_rows, quantize_rows


def expert_activation_amax(z: Tensor, probs: Tensor, offsets: Tensor, activation: Activation) -> Tensor:
    """`activation_reference.expert_activation_amax`: FP32 [1]."""
    return amax_of_rows(z, None, activation, ExpertRows(probs, offsets))


def expert_activation_backward_amax(
    grad: Tensor, z: Tensor, probs: Tensor, offsets: Tensor, activation: Activation
) -> Tensor:
    """`activation_reference.expert_activation_backward_amax`: FP32 [1]."""
    return amax_of_rows(z, grad, activation, ExpertRows(probs, offsets))


def expert_activation_quantize(
    z: Tensor,
    probs: Tensor,
    offsets: Tensor,
    activation: Activation,
    dtype: torch.dtype,
    scale: Tensor | None,
    power_of_two: bool,
    amax_out: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`activation_reference.expert_activation_quantize`: one launch with a given scale, two under current scaling."""
    return quantize_rows(z, activation, dtype, scale, power_of_two, amax_out, ExpertRows(probs, offsets))


def expert_activation_backward_quantize(
    grad: Tensor,
    z: Tensor,
    probs: Tensor,
    offsets: Tensor,
    activation: Activation,
    dtype: torch.dtype,
    scale: Tensor | None,
    power_of_two: bool,
    amax_out: Tensor | None,
    activation_dtype: torch.dtype,
    activation_scale: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`activation_reference.expert_activation_backward_quantize`: one launch (two under current scaling), and one that
    adds up the tiles' gradients of probabilities.
    """
    cast = (dtype, scale, power_of_two, amax_out, activation_dtype, activation_scale)
    return backward_quantize_rows(grad, z, activation, *cast, False, ExpertRows(probs, offsets))


def expert_activation_quantize_blocks(
    z: Tensor, probs: Tensor, offsets: Tensor, activation: Activation, dtype: torch.dtype, power_of_two: bool
) -> tuple[Tensor, Tensor]:
    """`activation_reference.expert_activation_quantize_blocks` in one launch."""
    return quantize_rows_in_blocks(z, activation, dtype, power_of_two, ExpertRows(probs, offsets))


def expert_activation_backward_quantize_blocks(
    grad: Tensor,
    z: Tensor,
    probs: Tensor,
    offsets: Tensor,
    activation: Activation,
    dtype: torch.dtype,
    power_of_two: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`activation_reference.expert_activation_backward_quantize_blocks`: one launch, and one that adds up the blocks'
    gradients of probabilities."""
    experts = ExpertRows(probs, offsets)
    return backward_quantize_rows_in_blocks(grad, z, activation, dtype, False, power_of_two, experts)
