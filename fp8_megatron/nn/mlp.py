"""The MLP of a transformer layer as one FP8 function: norm → fc1 → activation → fc2, cast to FP8 at every arrow.

Forward keeps x, which the residual stream holds anyway, and fc1's output z in 16 bits. With `recomputes` it keeps x
alone, and backward begins with z's GEMM. The norm's output, the activation and z's gradient exist in FP8 only. Between
the GEMMs of backward, one kernel reads z and the activation's gradient. It writes z's gradient in both layouts, the
transposed activation, and the gradient of fc1's bias.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..activation_functions import Activation
from ..quantization.scaled_tensor import ScaledTensor
from ..quantization.sources import ActivationGradSource, ActivationSource, NormStatistics
from .first_order import once_differentiable
from .gemms import LinearParams, fprop, start_dgrad, wgrad
from .normed import NormParams, norm_fprop, norm_fprop_again, norm_linear_backward
from .operands import delivered
from .rows import LocalRows


def fp8_norm_mlp(
    x: Tensor,
    norm: NormParams,
    fc1: LinearParams,
    fc2: LinearParams,
    activation: Activation,
    *,
    adds_input: bool = False,
    recomputes: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """fc2(activation(fc1(norm(x)))) in FP8; the weight gradients go to their ``main_grad`` (see `wgrad`).

    Args:
        x: BF16 [s, b, h]; [s/tp, b, h] if fc1 is `SequenceColumn` (and fc2 `SequenceRow`).
        activation: between both GEMMs.
        adds_input: add x, the residual branch, inside. Not possible if the output is this rank's summand.
        recomputes: compute fc1's output again in backward, bit for bit, instead of keeping it.

    Returns:
        BF16 of x's shape. Unless `adds_input`, also x for the residual branch; the branch's gradient is added inside
        the norm's backward.
    """
    return _FP8NormMLP.apply(
        x,
        norm.weight,
        norm.bias,
        fc1.weight,
        fc1.bias,
        fc2.weight,
        fc2.bias,
        norm,
        fc1,
        fc2,
        activation,
        adds_input,
        recomputes,
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
        norm: NormParams,
        fc1: LinearParams,
        fc2: LinearParams,
        activation: Activation,
        adds_input: bool,
        recomputes: bool,
        needs_backward: bool,
    ) -> tuple[Tensor, Tensor | None]:
        z, statistics = norm_fprop(x, norm, fc1)
        operand = fc2.quantizers.input.quantize(ActivationSource(z, activation))
        y = fprop(LocalRows(operand), fc2, x.dtype, x if adds_input else None)
        if needs_backward:
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(x, None if recomputes else z, operand.shared_scale, *statistics)
            ctx.norm, ctx.fc1, ctx.fc2, ctx.activation, ctx.adds_input = norm, fc1, fc2, activation, adds_input
        return y.view(*x.shape[:-1], y.shape[-1]), None if adds_input else x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor, residual_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        x, z, activation_scale, *statistics = ctx.saved_tensors
        fc1, fc2 = ctx.fc1, ctx.fc2
        if z is None:  # before the gradient is gathered: a gather may reuse the memory of the one before
            z = norm_fprop_again(x, ctx.norm, NormStatistics(*statistics), fc1)
        g2, grad_bias2 = fc2.cast_grad(grad_output)
        source = ActivationGradSource(
            start_dgrad(g2, fc2, grad_output.dtype).wait(),
            z,
            ctx.activation,
            fc2.quantizers.input.format,
            activation_scale,
            column_sums=fc1.bias is not None,
        )
        cast = fc1.quantizers.grad_output.quantize(source)
        del source
        grad_weight2 = wgrad(g2, cast.activation.t, fc2, grad_output.dtype)
        g1, grad_bias1 = LocalRows(cast.operand), cast.column_sums
        del g2, cast
        grad_x, grad_norm_weight, grad_norm_bias, grad_weight1 = norm_linear_backward(
            g1,
            grad_output if ctx.adds_input else residual_grad,
            x,
            ctx.norm,
            NormStatistics(*statistics),
            fc1,
        )
        grad_bias1, grad_bias2 = delivered(grad_bias1, fc1.bias), delivered(grad_bias2, fc2.bias)
        grads = (grad_norm_weight, grad_norm_bias, grad_weight1, grad_bias1, grad_weight2, grad_bias2)
        return grad_x, *grads, *[None] * 7
