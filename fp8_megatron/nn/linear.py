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
from . import local, siblings
from .first_order import once_differentiable
from .gemms import LinearParams, fprop, note_forward, start_dgrad, wgrad
from .operands import as_matrix, delivered
from .recomputed import Recomputation, cast_again


def fp8_linear(
    x: Tensor,
    linear: LinearParams,
    *,
    keeps_input: bool = False,
    addend: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """y = x·Wᵀ + b (+ addend) in FP8; the weight gradient goes to ``weight.main_grad`` (see `wgrad`).

    A layer that ranks do not share takes any number of rows: zeros are added up to the next multiple that GEMMs take.

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
    if call.has_backward:
        note_forward(linear)
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
        keeps_input = call.has_backward and ctx.needs_input_grad[1]
        made = _recomputation_of(x, call.linear) if keeps_input else None
        y, operand = _local_forward(x, call, keeps_input and made is None)
        if call.has_backward:
            if not keeps_input:
                ctx.save_for_backward(None)
            elif made is None:
                ctx.save_for_backward(operand.t.scale, operand.payload_t)
            else:
                ctx.save_for_backward(operand.shared_scale, *made.inputs)
            ctx.linear, ctx.function = call.linear, None if made is None else made.function
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        siblings.withdraw()
        (scale, *kept), linear = ctx.saved_tensors, ctx.linear
        needs_grad_input, needs_grad_weight = ctx.needs_input_grad[:2]
        format = linear.quantizers.input.format
        x_t = None
        if needs_grad_weight and ctx.function is None:
            x_t = Quantized(kept[0], None, scale, format)
        elif needs_grad_weight:
            x_t = cast_again(Recomputation(ctx.function, tuple(kept)), scale, format)
        grad_input, grad_weight, grad_bias = local.backward(grad_output, x_t, linear, needs_grad_input=needs_grad_input)
        return grad_input, grad_weight, delivered(grad_bias, linear.bias), None


def _recomputation_of(x: Tensor, linear: LinearParams) -> Recomputation | None:
    """How backward makes the input of `linear` again; None: the columns are kept. A layer with followers keeps them for
    all.
    """
    if linear.recomputations is None or siblings.has_followers(linear):
        return None
    return linear.recomputations.of(x)


def _local_forward(x: Tensor, call: _Call, keeps_columns: bool) -> tuple[Tensor, Quantized]:
    """The output [..., N], and the input in FP8, with its columns if `keeps_columns`, and with rows of padding.

    A cast that a sibling has made of `x` is taken (`siblings`).
    """
    linear, dtype = call.linear, call.dtype
    if not call.has_backward:
        return local.forward(x, linear, dtype, keeps_columns=False)
    offer = siblings.found(x, linear)
    operand = None if offer is None else offer.take(linear, needs_columns=keeps_columns)
    if operand is not None:
        return local.forward_of_cast(operand, linear, dtype, x.shape), operand
    offers = offer is None and siblings.can_offer(x, linear)
    keeps_rows = offers and siblings.has_followers(linear)
    y, operand = local.forward(x, linear, dtype, keeps_columns=keeps_columns, keeps_rows=keeps_rows)
    siblings.has_cast(linear)
    if offers:
        siblings.offer(x, linear, operand if keeps_rows else None)
    return y, operand


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
