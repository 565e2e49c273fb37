"""The MLP of a transformer layer as one FP8 function: norm → fc1 → activation → fc2, cast to FP8 at every arrow.

Backward keeps x (the residual stream holds it anyway) and fc1's output z in 16 bits; the norm's output, the activation
and z's gradient exist in FP8 only. Between the GEMMs of backward one kernel reads z and the activation's gradient and
writes z's gradient in both layouts, the activation again, transposed, and the gradient of fc1's bias.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..collectives.row_exchange import Rows
from ..quantization.recipe import INPUT_DTYPE, LinearQuantizers
from ..quantization.scaled_tensor import ScaledTensor
from ..quantization.sources import ActivationGradSource, ActivationSource
from .linear import (
    LinearParams,
    NormParams,
    NormSettings,
    NormStatistics,
    Operand,
    TensorParallelism,
    delivered,
    dgrad,
    fprop,
    gathered_grad,
    norm_fprop,
    norm_linear_backward,
    quantized_grad,
    summed_fprop,
    wgrad,
)


def fp8_norm_mlp(
    x: Tensor,
    norm: NormParams,
    fc1: LinearParams,
    fc2: LinearParams,
    activation: str,
    parallelism: TensorParallelism,
    *,
    adds_input: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """fc2(activation(fc1(norm(x)))) in FP8; the weight gradients go to their ``main_grad``.

    Args:
        x: BF16 [s, b, h]; with `gathers_input` [s/tp, b, h].
        activation: ``gelu`` or ``swiglu`` (see `kernels.activation`).
        parallelism: of fc1; with `gathers_input` fc2's output is reduce-scattered, else it is this rank's part of a
            sum.
        adds_input: x, the residual branch, is added inside; not to this rank's part of a sum.

    Returns:
        BF16, the shape of x, and, unless it was added, x again for the residual branch: what comes back along it is
        added inside the norm's backward.
    """
    return _FP8NormMLP.apply(
        x,
        norm.weight,
        norm.bias,
        fc1.weight,
        fc1.bias,
        fc2.weight,
        fc2.bias,
        norm.settings,
        (fc1.quantizers, fc2.quantizers),
        activation,
        parallelism,
        adds_input,
        torch.is_grad_enabled(),
    )


class _FP8NormMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor | None,
        weight1: ScaledTensor,
        bias1: Tensor | None,
        weight2: ScaledTensor,
        bias2: Tensor | None,
        norm_settings: NormSettings,
        quantizers: tuple[LinearQuantizers, LinearQuantizers],
        activation: str,
        parallelism: TensorParallelism,
        adds_input: bool,
        needs_backward: bool,
    ) -> tuple[Tensor, Tensor | None]:
        norm = NormParams(norm_weight, norm_bias, *norm_settings)
        z, kept = norm_fprop(x, norm, weight1, bias1, quantizers[0], parallelism)
        payload, scale = quantizers[1].input.quantize(ActivationSource(z, activation))
        addend = x if adds_input else None
        if parallelism.gathers_input:
            y = summed_fprop(Rows.local(payload), scale, weight2, bias2, parallelism, x.dtype, addend)
        else:
            y = fprop(Rows.local(payload), scale, weight2, bias2, x.dtype, addend)
        if needs_backward:
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(x, norm_weight, norm_bias, z, scale, *kept)
            ctx.weights, ctx.biases = (weight1, weight2), (bias1, bias2)
            ctx.norm_settings, ctx.quantizers = norm_settings, quantizers
            ctx.activation, ctx.parallelism, ctx.adds_input = activation, parallelism, adds_input
        return y.view(*x.shape[:-1], y.shape[-1]), None if adds_input else x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor, residual_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        x, norm_weight, norm_bias, z, activation_scale, *kept = ctx.saved_tensors
        has_bias1, has_bias2 = (bias is not None for bias in ctx.biases)
        if ctx.parallelism.gathers_input:
            g2, grad_bias2 = gathered_grad(grad_output, ctx.quantizers[1], ctx.parallelism, has_bias=has_bias2)
        else:
            g2, grad_bias2 = quantized_grad(grad_output, ctx.quantizers[1], has_bias=has_bias2)
        grad_activation = dgrad(g2, ctx.weights[1], grad_output.dtype)
        source = ActivationGradSource(
            grad_activation, z, ctx.activation, INPUT_DTYPE, activation_scale, column_sums=has_bias1
        )
        grads, scale = ctx.quantizers[0].grad_output.quantize(source)
        del grad_activation, source
        wgrad(g2, grads.activation_t, activation_scale, ctx.weights[1], ctx.quantizers[1], grad_output.dtype)
        g1, grad_bias1 = Operand(Rows.local(grads.payload), scale, grads.payload_t), grads.column_sums
        del g2, grads
        grad_x, grad_norm_weight, grad_norm_bias = norm_linear_backward(
            g1,
            grad_output if ctx.adds_input else residual_grad,
            x,
            NormParams(norm_weight, norm_bias, *ctx.norm_settings),
            NormStatistics(*kept),
            ctx.weights[0],
            ctx.quantizers[0],
            ctx.parallelism,
        )
        grad_bias1, grad_bias2 = delivered(grad_bias1, ctx.biases[0]), delivered(grad_bias2, ctx.biases[1])
        return grad_x, grad_norm_weight, grad_norm_bias, None, grad_bias1, None, grad_bias2, *[None] * 6
