"""The FP8 linear layer: three GEMMs (`gemms`), the casts of their operands, and the collectives around them
(`parallelism`).

Forward keeps the input for backward in FP8 only. It keeps the columns that wgrad takes; under sequence parallelism it
keeps this rank's part, in the layout that the format gathers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..quantization.operand import Quantized
from ..quantization.scaled_tensor import ScaledTensor
from ..quantization.sources import TensorSource
from . import local
from .first_order import once_differentiable
from .gemms import LinearParams, fprop, start_dgrad, wgrad
from .operands import as_matrix, delivered


def fp8_linear(
    x: Tensor,
    linear: LinearParams,
    *,
    keeps_input: bool = False,
    addend: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """y = x·Wᵀ + b (+ addend) in FP8; the weight gradient goes to ``weight.main_grad`` (see `wgrad`).

    A GEMM whose result nobody needs is left out: that of a frozen weight's gradient, and that of the gradient of an
    input without one. A frozen weight keeps nothing for backward.

    Args:
        x: any float dtype [..., K]; with `SequenceColumn` [s/tp, b, K].
        linear: weight [N, K], bias [N] or None; with its quantisers and how ranks share it.
        keeps_input: keep `x` itself and cast it again in backward. Use it if something else keeps x anyway.
        addend: the residual branch, of y's shape and dtype; the GEMM, or the sum over ranks, adds it.
        dtype: of the output and of the GEMMs in backward, BF16 or FP16; None: x's.

    Returns:
        [..., N] in `dtype`; with `SequenceColumn` [s, b, N]; with `SequenceRow` [s/tp, b, N], and the bias's gradient
        then covers this rank's part of the sequence.
    """
    call = _Call(linear, dtype or x.dtype, keeps_input, torch.is_grad_enabled())
    if addend is None and not keeps_input and local.is_local(linear):
        return _LocalFP8Linear.apply(x, linear.weight, linear.bias, call)
    return _FP8Linear.apply(x, linear.weight, linear.bias, addend, call)


class _Call(NamedTuple):
    """What is no tensor of a call. In one argument: autograd looks at every argument in forward and in backward."""

    linear: LinearParams
    dtype: torch.dtype
    keeps_input: bool
    has_backward: bool


class _LocalFP8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: ScaledTensor, bias: Tensor | None, call: _Call) -> Tensor:
        keeps_columns = call.has_backward and ctx.needs_input_grad[1]
        y, operand = local.forward(as_matrix(x), call.linear, call.dtype, keeps_columns=keeps_columns)
        if call.has_backward:
            columns = operand.t if keeps_columns else None
            ctx.save_for_backward(*((None, None) if columns is None else (columns.payload, columns.scale)))
            ctx.linear, ctx.input_shape = call.linear, x.shape
        return y if x.ndim == 2 else y.view(*x.shape[:-1], y.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        (columns, scale), linear, shape = ctx.saved_tensors, ctx.linear, ctx.input_shape
        needs_grad_input, needs_grad_weight = ctx.needs_input_grad[:2]
        x_t = Quantized(columns, None, scale, linear.quantizers.input.format) if needs_grad_weight else None
        grad_input, grad_weight, grad_bias = local.backward(
            as_matrix(grad_output), x_t, linear, needs_grad_input=needs_grad_input
        )
        if grad_input is not None and len(shape) != 2:
            grad_input = grad_input.view(*shape)
        return grad_input, grad_weight, delivered(grad_bias, linear.bias), None


class _FP8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: ScaledTensor,
        bias: Tensor | None,
        addend: Tensor | None,
        call: _Call,
    ) -> Tensor:
        linear, dtype, keeps_input, has_backward = call
        quantizer, parallelism = linear.quantizers.input, linear.parallelism
        keeps_columns = parallelism.casts_columns(quantizer.format)
        keeps_operand = has_backward and ctx.needs_input_grad[1]
        source = TensorSource(as_matrix(x), True, keeps_operand and keeps_columns and not keeps_input)
        operand = quantizer.quantize(source, sync=parallelism.sync)
        y = fprop(parallelism.gather(operand), linear, dtype, addend)
        if has_backward:
            if not keeps_operand:
                ctx.save_for_backward(None, None)
            elif keeps_input:
                ctx.save_for_backward(x, operand.shared_scale)
            else:
                kept = operand.t if keeps_columns else operand
                ctx.save_for_backward(kept.payload, kept.scale)
            ctx.call, ctx.input_shape, ctx.keeps_columns = call, x.shape, keeps_columns
        return y if x.ndim == 2 else y.view(-1, *x.shape[1:-1], y.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        saved, scale = ctx.saved_tensors
        call, keeps_columns = ctx.call, ctx.keeps_columns
        linear = call.linear
        needs_grad_input, needs_grad_weight, _, needs_grad_addend, _ = ctx.needs_input_grad
        format = linear.quantizers.input.format

        def part_of_input() -> Quantized:
            if call.keeps_input:
                source = TensorSource(as_matrix(saved), rowwise=not keeps_columns, transposed=keeps_columns)
                return source.quantize(format, scale)
            return Quantized(None, saved, scale, format) if keeps_columns else Quantized(saved, None, scale, format)

        grad_input = grad_weight = None
        columns = linear.parallelism.gather_columns(part_of_input) if needs_grad_weight else None
        g, grad_bias = linear.cast_grad(grad_output, transposed=needs_grad_weight)
        pending = start_dgrad(g, linear, grad_output.dtype) if needs_grad_input else None
        if columns is not None:
            grad_weight = wgrad(g, columns(), linear, grad_output.dtype)
        grad_bias = delivered(grad_bias, linear.bias)
        grad_addend = grad_output if needs_grad_addend else None
        if pending is not None:
            grad_input = pending.wait().view(*ctx.input_shape)
        return grad_input, grad_weight, grad_bias, grad_addend, None
