"""Backward of an FP8 linear layer whose output's gradient has a scale for each row: a language model's head.

The gradient of a token's logits is g · (p − onehot). Most of its power is in the label's element, −g · (1 − p), which
is close to −g in most tokens. With one scale for all tokens E5M2 rounds all of these to −g: an error of one sign, about
1% of each label's element (docs/notebook.md, "The gradient of the LM head").

So each row t is divided by its amax s_t. The label's element is then −1, which is exact. dgrad multiplies the rows of
its output by s_t. wgrad sums over rows, so its other operand is cast from x_t · s_t. `nn.lm_head` does the same inside
the trainer's head, where the loss gives the scales. Here the values give them.

Rounding to nearest makes the other elements 0.28% too small in the mean (`nn.lm_head`). All are cast times
1 / `ops.KEPT`. The label's element stays −1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats.format import Quantized
from ..kernels import ops
from ..quantization.sources import TensorSource
from .gemms import LinearParams, deliver_wgrad
from .operands import as_matrix, as_whole_rows


def backward(
    grad_output: Tensor, x: Tensor | None, linear: LinearParams, *, needs_grad_input: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients as `linear.linear_backward` has them: of the input [T, K], with rows of padding; of the weight; of the
    bias.

    Args:
        grad_output: [..., N].
        linear: ranks do not share it, and its formats have one scale for a tensor.
        x: the input [..., K]; None: nobody needs the weight's gradient.
    """
    dtype, format = grad_output.dtype, linear.quantizers.grad_output.format
    grad = as_matrix(as_whole_rows(grad_output, format.size_multiple))
    amaxes = torch.linalg.vector_norm(grad, float("inf"), dim=1, keepdim=True)  # values of `grad`: dtype holds them
    if linear.quantizers.grad_output.history is not None:  # which says where a step's first bad value was
        linear.quantizers.grad_output.record(amaxes.amax().float().view(1))
    g = _cast(grad / torch.where(amaxes == 0, 1, amaxes), linear, transposed=x is not None)
    grad_input = grad_weight = None
    if needs_grad_input:
        product = g.multiply(linear.weight.gemm_operand(linear.quantizers.weight, transposed=True), dtype)
        grad_input = product.mul_(amaxes)
    if x is not None:
        # Rows without a gradient, as of ignored labels, are zeros: they do not raise the amax.
        rows = as_matrix(as_whole_rows(x, format.size_multiple)) * amaxes.float()
        columns = TensorSource(rows, rowwise=False, transposed=True).quantize(linear.quantizers.input.format, None)
        grad_weight = deliver_wgrad(g.t, columns.t, linear, dtype)
    grad_bias = None if linear.bias is None else grad.sum(dim=0, dtype=torch.float32)
    return grad_input, grad_weight, grad_bias


def _cast(rows: Tensor, linear: LinearParams, *, transposed: bool) -> Quantized:
    """Rows [T, N] with an amax of 1, or of zeros."""
    format = linear.quantizers.grad_output.format
    source = TensorSource(rows, transposed=transposed)
    made = source.quantize(format, rows.new_full((1,), ops.PAYLOAD_SCALE * ops.KEPT, dtype=torch.float32))
    scale = rows.new_full((1,), ops.PAYLOAD_SCALE, dtype=torch.float32)
    return Quantized(made.payload, made.payload_t if transposed else None, scale, format)
