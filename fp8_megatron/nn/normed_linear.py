"""A norm and one linear layer as one FP8 function: the norm's output exists in FP8 only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..quantization.scaled_tensor import ScaledTensor
from ..quantization.sources import NormStatistics
from .first_order import once_differentiable
from .gemms import LinearParams
from .normed import NormParams, norm_fprop, norm_linear_backward
from .operands import delivered


def fp8_norm_linear(x: Tensor, norm: NormParams, linear: LinearParams) -> Tensor:
    """y = norm(x)·Wᵀ + b in FP8; the weight gradient goes to ``weight.main_grad`` (see `wgrad`).

    Backward keeps x, and casts its norm again.

    Args:
        x: BF16 or FP16 [..., K]; the rows are a multiple of `Recipe.size_multiple`.
        linear: a layer that no ranks share: weight [N, K], bias [N] or None.

    Returns:
        [..., N] in x's dtype.
    """
    needs_backward = torch.is_grad_enabled()
    return _FP8NormLinear.apply(x, norm.weight, norm.bias, linear.weight, linear.bias, norm, linear, needs_backward)


class _FP8NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor | None,
        weight: ScaledTensor,
        bias: Tensor | None,
        norm: NormParams,
        linear: LinearParams,
        needs_backward: bool,
    ) -> Tensor:
        y, statistics = norm_fprop(x, norm, linear)
        if needs_backward:
            ctx.save_for_backward(x, *statistics)
            ctx.norm, ctx.linear = norm, linear
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x, *statistics = ctx.saved_tensors
        linear = ctx.linear
        g, grad_bias = linear.cast_grad(grad_output)
        grads = norm_linear_backward(g, None, x, ctx.norm, NormStatistics(*statistics), linear)
        return *grads, delivered(grad_bias, linear.bias), *[None] * 3
