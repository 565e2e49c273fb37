"""A linear layer that ranks do not share and that has no links, as straight calls: what the layers of other models are.

The bits are those of `linear`'s function with `Local`. Rows that may be on their way and sums over ranks would cost the
host 10 µs a layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..quantization.operand import Quantized, multiply
from ..quantization.sources import GradSource, TensorSource
from .gemms import LinearParams, deliver_wgrad, weight_and_bias
from .parallelism import LOCAL


def is_local(linear: LinearParams) -> bool:
    """Whether these functions compute the layer."""
    return linear.parallelism is LOCAL and linear.links is None


def forward(x: Tensor, linear: LinearParams, dtype: torch.dtype, *, keeps_columns: bool) -> tuple[Tensor, Quantized]:
    """y [T, N] in `dtype` from x [T, K], and the input in FP8; with its columns, for `backward`, if `keeps_columns`."""
    operand = linear.quantizers.input.quantize(TensorSource(x, True, keeps_columns))
    weight, bias = weight_and_bias(linear, dtype)
    return multiply(operand, weight, dtype, bias=bias, use_fast_accum=True), operand


def backward(
    grad_output: Tensor, x_t: Quantized | None, linear: LinearParams, *, needs_grad_input: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of the input [T, K]; of the weight [N, K] if it has no `main_grad`; of the bias, FP32 [N].

    Args:
        grad_output: [T, N].
        x_t: the input's columns [K, T]; None: nobody needs the weight's gradient.
    """
    source = GradSource(grad_output, linear.bias is not None, x_t is not None)
    g, grad_bias = linear.quantizers.grad_output.quantize(source)
    dtype, grad_input, grad_weight = grad_output.dtype, None, None
    if needs_grad_input:
        grad_input = multiply(g, linear.weight.transposed_gemm_operand(linear.quantizers.weight), dtype)
    if x_t is not None:
        grad_weight = deliver_wgrad(g.t, x_t, linear, dtype)
    return grad_input, grad_weight, grad_bias
