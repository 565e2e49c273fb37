"""Attention in FP8 and the output projection behind it as one function.

The kernel writes attention's output in E4M3, and the projection's GEMM takes it as it is. Backward keeps query, key,
value and output in FP8: half the bytes of 16-bit attention.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..kernels import ops
from ..quantization.attention import AttentionQuantizers
from ..quantization.operand import Quantized
from ..quantization.scaled_tensor import ScaledTensor
from .gemms import LinearParams, fprop, start_dgrad, wgrad
from .operands import delivered


class AttentionOperands(NamedTuple):
    """Causal attention in FP8 before it is computed.

    Attributes:
        query: BF16 [s, b, heads, d]. key, value: BF16 [s, b, groups, d]. Any strides.
        softmax_scale: the factor of the scores.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    quantizers: AttentionQuantizers
    softmax_scale: float


def fp8_attention_linear(attention: AttentionOperands, linear: LinearParams, *, addend: Tensor | None = None) -> Tensor:
    """y = attention(query, key, value)·Wᵀ + b (+ addend); the weight gradient goes to ``weight.main_grad``.

    Args:
        linear: weight [N, heads · d], bias [N] or None.
        addend: the residual branch, of y's shape and dtype; the GEMM, or the sum over ranks, adds it.

    Returns:
        BF16 [s, b, N]; with `SequenceRow` [s/tp, b, N].
    """
    *qkv, quantizers, softmax_scale = attention
    return _FP8AttentionLinear.apply(
        *qkv, linear.weight, linear.bias, addend, quantizers, softmax_scale, linear, torch.is_grad_enabled()
    )


class _FP8AttentionLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        weight: ScaledTensor,
        bias: Tensor | None,
        addend: Tensor | None,
        quantizers: AttentionQuantizers,
        softmax_scale: float,
        linear: LinearParams,
        needs_backward: bool,
    ) -> Tensor:
        inputs = quantizers.cast_inputs(query, key, value)
        out, log_sum_exp = ops.fp8_attention(inputs, inputs.scale_value.reciprocal(), softmax_scale=softmax_scale)
        operand = _operand(out, inputs, linear)
        y = fprop(linear.parallelism.gather(operand), linear, query.dtype, addend)
        if needs_backward:
            ctx.save_for_backward(*inputs, out, log_sum_exp)
            ctx.quantizers, ctx.softmax_scale, ctx.linear = quantizers, softmax_scale, linear
        return y.view(-1, query.shape[1], y.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        *saved, out, log_sum_exp = ctx.saved_tensors
        inputs, linear = ops.AttentionInputs(*saved), ctx.linear
        g, grad_bias = linear.cast_grad(grad_output)
        grad_out = start_dgrad(g, linear, grad_output.dtype)
        grad_weight = wgrad(g, _operand(out, inputs, linear).transposed(), linear, grad_output.dtype)
        grads = ctx.quantizers.backward(grad_out.wait().view(out.shape), inputs, out, log_sum_exp, ctx.softmax_scale)
        grad_addend = grad_output if ctx.needs_input_grad[5] else None
        return *grads, grad_weight, delivered(grad_bias, linear.bias), grad_addend, *[None] * 4


def _operand(out: Tensor, inputs: ops.AttentionInputs, linear: LinearParams) -> Quantized:
    """Attention's output as the projection's input [s · b, heads · d]."""
    matrix = out.view(out.shape[0] * out.shape[1], -1)
    return Quantized(matrix, None, inputs.scale_value, linear.quantizers.input.format)
