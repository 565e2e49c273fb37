"""Experts' activations fused with their casts to FP8, and their backward: launches of the kernels of `activation`.

Bytes per element of a 16-bit activation as there, and 4 for each row and 64 columns in backward (the probabilities'
gradients, written and added up). Programs whose rows belong to nobody return at once.

`expert_activation` and its backward stay in 16 bits. Of one input / gated they move 4 / 6 and 6 / 10 bytes an element.
"""

# The parameters of a Triton kernel have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...activation_functions import Activation
from ..activation.blocks_triton import backward_quantize_rows_in_blocks, quantize_rows_in_blocks
from ..activation.reference import ExpertRows
from ..activation.triton import constant, load_inputs, value_and_derivatives, value_of
from ..shapes import cdiv

# Rows and columns of a tile in 16 bits, and its warps; groups end at a multiple of 128 rows.
_ROWS, _COLUMNS, _NUM_WARPS = 8, 256, 4


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


@triton.jit
def _activate(
    z, probs, group_offsets, out, F, E, KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    if tl.program_id(1) * ROWS >= tl.load(group_offsets + E):
        return
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    mask = columns < F
    first, second = load_inputs(z, rows, columns, mask, F, KIND)
    value = value_of(first, second, KIND) * tl.load(probs + rows)
    tl.store(out + rows.to(tl.int64) * F + columns, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _activate_backward(
    grad, z, probs, group_offsets, grad_z, grad_probs, F, E,
    KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Whole rows, so that a probability's gradient is the sum of one program."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    if tl.program_id(0) * ROWS >= tl.load(group_offsets + E):
        return
    prob = tl.load(probs + rows)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, F, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)[None, :]
        mask = columns < F
        first, second = load_inputs(z, rows, columns, mask, F, KIND)
        g = tl.load(grad + rows.to(tl.int64) * F + columns, mask=mask, other=0.0).to(tl.float32)
        value, d_first, d_second = value_and_derivatives(first, second, KIND)
        total += tl.where(mask, g * value, 0.0)
        g *= prob
        if KIND[1]:
            offsets = rows.to(tl.int64) * (2 * F) + columns
            tl.store(grad_z + offsets + F, (g * d_second).to(grad_z.dtype.element_ty), mask=mask)
        else:
            offsets = rows.to(tl.int64) * F + columns
        tl.store(grad_z + offsets, (g * d_first).to(grad_z.dtype.element_ty), mask=mask)
    tl.store(grad_probs + rows, tl.sum(total, axis=1, keep_dims=True))


def expert_activation(z: Tensor, activation: Activation, experts: ExpertRows) -> Tensor:
    """`activation_reference.expert_activation` in one launch. Rows behind the last group are not written."""
    assert experts.probs is not None and experts.offsets is not None
    z = z.contiguous()
    R, F = len(z), z.shape[1] // activation.row.num_inputs
    out = torch.empty((R, F), dtype=z.dtype, device=z.device)
    _activate[(cdiv(F, _COLUMNS), cdiv(R, _ROWS))](
        z, experts.probs, experts.offsets, out, F, len(experts.offsets) - 1, constant(activation), _ROWS, _COLUMNS,
        num_warps=_NUM_WARPS, enable_fp_fusion=True,
    )  # fmt: skip
    return out


def expert_activation_backward(
    grad: Tensor, z: Tensor, activation: Activation, experts: ExpertRows
) -> tuple[Tensor, Tensor]:
    """`activation_reference.expert_activation_backward` in one launch. Rows behind the last group are not written."""
    assert experts.probs is not None and experts.offsets is not None
    grad, z = grad.contiguous(), z.contiguous()
    grad_z, grad_probs = torch.empty_like(z), torch.empty(len(z), dtype=torch.float32, device=z.device)
    _activate_backward[(cdiv(len(z), _ROWS),)](
        grad, z, experts.probs, experts.offsets, grad_z, grad_probs, grad.shape[1], len(experts.offsets) - 1,
        constant(activation), _ROWS, _COLUMNS, num_warps=_NUM_WARPS, enable_fp_fusion=True,
    )  # fmt: skip
    return grad_z, grad_probs
