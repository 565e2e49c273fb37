"""The norm in front of attention, the QKV projection and the rotation of query and key as one FP8 function.

Query, key and value are views of one tensor. RoPE rotates query and key in that tensor, or splits it if queries are
grouped (`nn.rope`). Backward reads the three gradients where attention wrote them, rotates those of query and key back
and casts all to FP8 as one gradient of the projection. The rotation keeps nothing for backward but the model's table of
angles. Norms of query and key keep the projection's output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels.ops import QKNorm, Rotation
from ..quantization.scaled_tensor import ScaledTensor
from ..quantization.sources import GradSource, NormStatistics, QKVGradSource
from .first_order import once_differentiable
from .gemms import LinearParams
from .normed import NormParams, norm_fprop, norm_linear_backward
from .operands import delivered
from .rope import normed_parts, qk_norm_backward, rotated_parts
from .rows import LocalRows


def fp8_norm_qkv(
    x: Tensor,
    norm: NormParams,
    qkv: LinearParams,
    widths: tuple[int, int, int],
    rotation: Rotation | None = None,
    qk_norm: QKNorm | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key and value of norm(x) in FP8; the weight gradient goes to ``qkv.weight.main_grad`` (see `wgrad`).

    Args:
        x: BF16 [s, b, h]; with `SequenceColumn` [s/tp, b, h].
        qkv: weight [groups · sum of widths, h], interleaved by group.
        widths: columns of query, key and value in one group.
        rotation: of query and key; None rotates nothing.
        qk_norm: of query and key, before the rotation; needs a `rotation` (which may have no angles).

    Returns:
        Query and key (normalised, rotated) and value, BF16 [s, b, groups, width] each, and x for the residual branch.
        The branch's gradient is added inside the norm's backward.
    """
    params = (None,) * 4 if qk_norm is None else qk_norm[:4]
    needs_backward = torch.is_grad_enabled()
    return _FP8NormQKV.apply(
        x, norm.weight, norm.bias, qkv.weight, qkv.bias, norm, qkv, widths, rotation, qk_norm, needs_backward, *params
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
        norm: NormParams,
        qkv: LinearParams,
        widths: tuple[int, int, int],
        rotation: Rotation | None,
        qk_norm: QKNorm | None,
        needs_backward: bool,
        *qk_norm_params: Tensor | None,
    ) -> tuple[Tensor, ...]:
        y, statistics = norm_fprop(x, norm, qkv)
        if needs_backward:
            ctx.save_for_backward(x, *statistics, None if qk_norm is None else y)
            ctx.norm, ctx.qkv, ctx.rotation, ctx.qk_norm = norm, qkv, rotation, qk_norm
        y = y.view(*qkv.parallelism.output_leading(x.shape[:-1]), -1)
        if qk_norm is not None:
            assert rotation is not None
            return *normed_parts(y, rotation, qk_norm, widths), x
        if rotation is not None:
            return *rotated_parts(y, rotation, widths), x
        grouped = y.view(*y.shape[:-1], -1, sum(widths))
        return *grouped.split(widths, dim=-1), x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *statistics, y = ctx.saved_tensors
        *qkv_grads, residual_grad = grads
        norm, qkv = ctx.norm, ctx.qkv
        of_qk_norm: tuple[Tensor | None, ...] = (None,) * 4
        source: QKVGradSource | GradSource
        if ctx.qk_norm is None:
            source = QKVGradSource(qkv_grads, column_sums=qkv.bias is not None, rotation=ctx.rotation)
        else:
            grad, of_qk_norm = qk_norm_backward(qkv_grads, y, ctx.rotation, ctx.qk_norm)
            source = GradSource(grad, column_sums=qkv.bias is not None)
        operand, grad_bias = qkv.quantizers.grad_output.quantize(source)
        grad_x, grad_norm_weight, grad_norm_bias, grad_weight = norm_linear_backward(
            LocalRows(operand), residual_grad, x, norm, NormStatistics(*statistics), qkv
        )
        of_bias = delivered(grad_bias, qkv.bias)
        return grad_x, grad_norm_weight, grad_norm_bias, grad_weight, of_bias, *[None] * 6, *of_qk_norm
