"""The FP8 linear layer: three GEMMs (`gemms`), the casts of their operands, and the collectives around them
(`parallelism`).

Forward keeps the input for backward in FP8 only. It keeps the columns that wgrad takes; under sequence parallelism it
keeps this rank's part, in the layout that the format gathers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..quantization.operand import Quantized
from ..quantization.scaled_tensor import ScaledTensor
from ..quantization.sources import TensorSource
from .gemms import LinearParams, fprop, start_dgrad, wgrad
from .operands import delivered


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
    return _FP8Linear.apply(
        x, linear.weight, linear.bias, addend, linear, dtype or x.dtype, keeps_input, torch.is_grad_enabled()
    )


class _FP8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: ScaledTensor,
        bias: Tensor | None,
        addend: Tensor | None,
        linear: LinearParams,
        dtype: torch.dtype,
        keeps_input: bool,
        has_backward: bool,
    ) -> Tensor:
        quantizer, parallelism = linear.quantizers.input, linear.parallelism
        keeps_columns = parallelism.casts_columns(quantizer.format)
        keeps_operand = has_backward and ctx.needs_input_grad[1]
        source = TensorSource(
            x.reshape(-1, x.shape[-1]), transposed=keeps_operand and keeps_columns and not keeps_input
        )
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
            ctx.linear, ctx.input_shape = linear, x.shape
            ctx.keeps_input, ctx.keeps_columns = keeps_input, keeps_columns
        return y.view(-1, *x.shape[1:-1], y.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        saved, scale = ctx.saved_tensors
        linear, keeps_columns = ctx.linear, ctx.keeps_columns
        needs_grad_input, needs_grad_weight = ctx.needs_input_grad[:2]
        format = linear.quantizers.input.format

        def part_of_input() -> Quantized:
            if ctx.keeps_input:
                x2d = saved.reshape(-1, saved.shape[-1])
                return TensorSource(x2d, rowwise=not keeps_columns, transposed=keeps_columns).quantize(format, scale)
            kept = Quantized(saved, None, scale, format)
            return kept.t if keeps_columns else kept

        grad_input = grad_weight = None
        columns = linear.parallelism.gather_columns(part_of_input) if needs_grad_weight else None
        g, grad_bias = linear.cast_grad(grad_output, transposed=needs_grad_weight)
        pending = start_dgrad(g, linear, grad_output.dtype) if needs_grad_input else None
        if columns is not None:
            grad_weight = wgrad(g, columns(), linear, grad_output.dtype)
        grad_bias = delivered(grad_bias, linear.bias)
        grad_addend = grad_output if ctx.needs_input_grad[3] else None
        if pending is not None:
            grad_input = pending.wait().view(ctx.input_shape)
        return grad_input, grad_weight, grad_bias, grad_addend, None, None, None, None
