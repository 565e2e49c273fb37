"""The norm in front of attention and the QKV projection as one FP8 function.

Query, key and value are views of one tensor. Backward casts their three gradients to FP8 where attention left them, as
the one gradient of the projection.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..collectives.row_exchange import Rows
from ..quantization.recipe import LinearQuantizers
from ..quantization.scaled_tensor import ScaledTensor
from ..quantization.sources import QKVGradSource
from .linear import (
    LinearParams,
    NormParams,
    NormSettings,
    NormStatistics,
    Operand,
    TensorParallelism,
    delivered,
    gathered_shape,
    norm_fprop,
    norm_linear_backward,
)


def fp8_norm_qkv(
    x: Tensor, norm: NormParams, qkv: LinearParams, widths: tuple[int, int, int], parallelism: TensorParallelism
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key and value of norm(x) in FP8; the weight gradient goes to ``qkv.weight.main_grad``.

    Args:
        x: BF16 [s, b, h]; with `gathers_input` [s/tp, b, h].
        qkv: weight [groups · sum of widths, h], interleaved by group.
        widths: columns of query, key and value in one group.

    Returns:
        BF16 [s, b, groups, width] each, and x again for the residual branch: what comes back along it is added inside
        the norm's backward.
    """
    return _FP8NormQKV.apply(
        x,
        norm.weight,
        norm.bias,
        qkv.weight,
        qkv.bias,
        norm.settings,
        qkv.quantizers,
        widths,
        parallelism,
        torch.is_grad_enabled(),
    )


class _FP8NormQKV(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor | None,
        weight: ScaledTensor,
        bias: Tensor | None,
        norm_settings: NormSettings,
        quantizers: LinearQuantizers,
        widths: tuple[int, int, int],
        parallelism: TensorParallelism,
        needs_backward: bool,
    ) -> tuple[Tensor, ...]:
        norm = NormParams(norm_weight, norm_bias, *norm_settings)
        y, kept = norm_fprop(x, norm, weight, bias, quantizers, parallelism)
        if needs_backward:
            ctx.save_for_backward(x, norm_weight, norm_bias, *kept)
            ctx.norm_settings, ctx.weight, ctx.bias = norm_settings, weight, bias
            ctx.quantizers, ctx.parallelism = quantizers, parallelism
        grouped = y.view(*gathered_shape(x, parallelism), -1, sum(widths))
        return *grouped.split(widths, dim=-1), x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, norm_weight, norm_bias, *kept = ctx.saved_tensors
        *qkv_grads, residual_grad = grads
        source = QKVGradSource(qkv_grads, column_sums=ctx.bias is not None)
        (payload, payload_t, grad_bias), scale = ctx.quantizers.grad_output.quantize(source)
        grad_x, grad_norm_weight, grad_norm_bias = norm_linear_backward(
            Operand(Rows.local(payload), scale, payload_t),
            residual_grad,
            x,
            NormParams(norm_weight, norm_bias, *ctx.norm_settings),
            NormStatistics(*kept),
            ctx.weight,
            ctx.quantizers,
            ctx.parallelism,
        )
        return grad_x, grad_norm_weight, grad_norm_bias, None, delivered(grad_bias, ctx.bias), *[None] * 5
