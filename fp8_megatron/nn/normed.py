"""A norm in front of a linear layer, fused with the cast of its output to FP8; or in front of readers in 16 bits.

Forward keeps the norm's input, which the residual stream holds anyway. Backward recomputes the norm's output in FP8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..formats.format import Format, Quantized
from ..kernels import ops
from ..quantization.early_cast import EarlyCast
from ..quantization.recipe import Quantizer
from ..quantization.sources import CastGrad, NormSource, NormStatistics
from .first_order import once_differentiable
from .gemms import LinearParams, fprop, start_dgrad, wgrad
from .operands import as_matrix, delivered, with_leading
from .parallelism import Local
from .rows import OperandRows


class NormParams(NamedTuple):
    """The norm in front of a linear layer: weight [K], bias [K] or None, epsilon, whether it is RMSNorm, and the
    receiver of its input gradient's cast: the linear layer whose output only this norm reads, or None."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    rms: bool
    receiver: EarlyCast | None = None

    def source(self, x: Tensor) -> NormSource:
        """The norm of `x` [..., K], to be cast."""
        return NormSource(x.reshape(-1, x.shape[-1]), self.weight, self.bias, self.eps, self.rms)


def norm_fprop(x: Tensor, norm: NormParams, linear: LinearParams) -> tuple[Tensor, NormStatistics]:
    """y [T, N] = norm(x)·Wᵀ + b, with T over the gathered sequence, and the statistics that backward needs."""
    rows, statistics = quantized_norm(x, norm, linear.quantizers.input, linear.parallelism)
    return fprop(rows, linear, x.dtype), statistics


def norm_fprop_again(x: Tensor, norm: NormParams, statistics: NormStatistics, linear: LinearParams) -> Tensor:
    """`norm_fprop`'s y, bit for bit. Under sequence parallelism all ranks of the layer call it together."""
    part = norm.source(x).again(statistics, linear.quantizers.input.format, transposed=False)
    return fprop(linear.parallelism.gather(part), linear, x.dtype, recomputes=True)


def quantized_norm(
    x: Tensor, norm: NormParams, quantizer: Quantizer, parallelism: Local
) -> tuple[OperandRows, NormStatistics]:
    """norm(x) in FP8 over the gathered sequence [T, K], and the statistics that backward needs."""
    operand, statistics = quantizer.quantize(norm.source(x), sync=parallelism.sync)
    return parallelism.gather(operand), statistics


def norm_linear_backward(
    g: OperandRows,
    residual_grad: Tensor | None,
    x: Tensor,
    norm: NormParams,
    statistics: NormStatistics,
    linear: LinearParams,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x (including the residual branch's), of the norm's weight and bias (see `delivered`), and of the
    layer's weight (see `wgrad`)."""
    columns = start_norm_columns(x, norm, statistics, linear.quantizers.input.format, linear.parallelism)
    grad_input = start_dgrad(g, linear, x.dtype)
    grad_weight = wgrad(g, columns(), linear, x.dtype)
    return *norm_backward(grad_input.summands(), residual_grad, x, norm, statistics), grad_weight


def start_norm_columns(
    x: Tensor, norm: NormParams, statistics: NormStatistics, format: Format, parallelism: Local
) -> Callable[[], Quantized]:
    """Cast norm(x) again and start to gather it for wgrad. Call the result to get its columns [K, T]."""
    transposed = parallelism.casts_columns(format)
    return parallelism.gather_columns(lambda: norm.source(x).again(statistics, format, transposed=transposed))


def norm_backward(
    summands: Tensor, residual_grad: Tensor | None, x: Tensor, norm: NormParams, statistics: NormStatistics
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of x (including the residual branch's) and of the norm's weight and bias (see `delivered`).

    Args:
        summands: [d, T, K]; their sum over d is the gradient of the norm's output.
    """
    x2d = x.reshape(-1, x.shape[-1])
    residual = None if residual_grad is None else residual_grad.reshape(x2d.shape)
    arguments = (summands, residual, x2d, norm.weight, statistics.mean, statistics.rstd)
    has_bias, receiver = norm.bias is not None, norm.receiver
    known = None if receiver is None else receiver.known_scale()
    if receiver is None or receiver.quantizer is None or known is None:
        grad_x, grad_weight, grad_bias = ops.norm_backward(*arguments, has_bias=has_bias)
    else:
        (scale, amax_out), format = known, receiver.quantizer.format
        grad_x, grad_weight, grad_bias, payload, payload_t, sums = ops.norm_backward_quantize(
            *arguments,
            format.dtype,
            has_bias=has_bias,
            scale=scale,
            amax_out=amax_out,
            transposed=receiver.transposed,
        )
        operand = Quantized(payload, payload_t if receiver.transposed else None, scale, format)
        receiver.put(grad_x, CastGrad(operand, sums))
    return grad_x.view(x.shape), delivered(grad_weight, norm.weight), delivered(grad_bias, norm.bias)


def norm_branch(x: Tensor, norm: NormParams) -> tuple[Tensor, Tensor]:
    """norm(x) [..., K] in x's dtype, for several readers, and x for the residual branch, whose gradient is added inside
    the norm's backward. Backward keeps x, and makes the cast that `norm.receiver` expects."""
    return _NormBranch.apply(x, norm.weight, norm.bias, norm, torch.is_grad_enabled())


class _NormBranch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, norm: NormParams, needs_backward: bool
    ) -> tuple[Tensor, Tensor]:
        y, mean, rstd = ops.norm(as_matrix(x), weight, bias, eps=norm.eps, rms=norm.rms)
        if needs_backward:
            ctx.save_for_backward(x, mean, rstd)
            ctx.norm = norm
        return with_leading(y, x.shape[:-1]), x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, residual_grad: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, rstd = ctx.saved_tensors
        statistics = NormStatistics(mean, rstd, None)
        return *norm_backward(as_matrix(grad)[None], residual_grad, x, ctx.norm, statistics), None, None
