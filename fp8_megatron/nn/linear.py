"""The FP8 linear layer: three GEMMs (`gemms`), the casts of their operands, and the collectives around them
(`parallelism`).

Forward keeps the input for backward in FP8 only. It keeps the columns that wgrad takes; under sequence parallelism it
keeps this rank's part, in the layout that the format gathers. `linear_forward` and `linear_backward` know nothing of
autograd, so that other functions are made of them (`compiled`, `split_linear`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..formats.format import Format, Quantized
from ..quantization.scaled_tensor import ScaledTensor
from ..quantization.sources import TensorSource
from . import row_scaled, shared_cast
from .first_order import once_differentiable
from .gemms import LinearParams, fprop, note_forward, start_dgrad, wgrad
from .operands import as_matrix, as_whole_rows, delivered, with_leading
from .recomputed import Recomputation


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
    has_backward = torch.is_grad_enabled()
    if has_backward:
        note_forward(linear)
    if linear.sharing is not None and (linear.scales_grad_rows or not has_backward):
        linear = linear._replace(sharing=None)  # nobody keeps columns
    call = _Call(linear, dtype or x.dtype, keeps_input or linear.scales_grad_rows, has_backward)
    return _FP8Linear.apply(x, linear.weight, linear.bias, addend, call)


def linear_forward(
    x: Tensor, linear: LinearParams, dtype: torch.dtype, *, keeps_columns: bool, addend: Tensor | None = None
) -> tuple[Tensor, Quantized]:
    """y [..., N] in `dtype` from x [..., K], and this rank's part of the input in FP8, with rows of padding.

    Args:
        keeps_columns: the part has what wgrad takes: its columns if the layer's ranks do not gather rows.
    """
    parallelism, quantizer = linear.parallelism, linear.quantizers.input
    transposed = keeps_columns and parallelism.casts_columns(quantizer.format)

    def cast() -> Quantized:
        source = TensorSource(_rows(x, linear, quantizer.format), True, transposed)
        return quantizer.quantize(source, sync=parallelism.sync)

    operand = cast() if linear.sharing is None else shared_cast.taken_or_made(x, linear, cast, needs_columns=transposed)
    y = fprop(parallelism.gather(operand), linear, dtype, addend)
    return with_leading(y, parallelism.output_leading(x.shape[:-1])), operand


def linear_backward(
    grad_output: Tensor, part: Callable[[], Quantized] | None, linear: LinearParams, *, needs_grad_input: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of this rank's part of the input [T, K], with rows of padding; of the weight [N, K] if it has no
    `main_grad`; of the bias, FP32 [N].

    Args:
        grad_output: [..., N].
        part: returns this rank's part of the input: its columns if `Local.casts_columns`, else its rows; None: nobody
            needs the weight's gradient.
    """
    columns = None if part is None else linear.parallelism.gather_columns(part)
    if linear.parallelism.group is None:
        grad_output = as_whole_rows(grad_output, linear.quantizers.grad_output.format.size_multiple)
    g, grad_bias = linear.cast_grad(grad_output, transposed=columns is not None)
    grad_input = start_dgrad(g, linear, grad_output.dtype) if needs_grad_input else None
    grad_weight = None if columns is None else wgrad(g, columns(), linear, grad_output.dtype)
    return None if grad_input is None else grad_input.wait(), grad_weight, grad_bias


class _Call(NamedTuple):
    """What is no tensor of a call. In one argument: autograd looks at every argument in forward and in backward."""

    linear: LinearParams
    dtype: torch.dtype
    keeps_input: bool
    has_backward: bool


class _FP8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: ScaledTensor, bias: Tensor | None, addend: Tensor | None, call: _Call
    ) -> Tensor:
        linear, keeps_part = call.linear, call.has_backward and ctx.needs_input_grad[1]
        again = _recomputation(x, call) if keeps_part else None
        keeps_columns = keeps_part and again is None
        y, operand = linear_forward(x, linear, call.dtype, keeps_columns=keeps_columns, addend=addend)
        if call.has_backward:
            ctx.call, ctx.input_shape, ctx.function = call, x.shape, None if again is None else again.function
            if again is not None:
                ctx.save_for_backward(operand.shared_scale, *again.inputs)
            elif keeps_part:
                part = operand.t if linear.parallelism.casts_columns(operand.format) else operand
                ctx.save_for_backward(part.scale, part.payload)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        linear: LinearParams = ctx.call.linear
        needs_grad_input, needs_grad_weight, _, needs_grad_addend, _ = ctx.needs_input_grad
        if linear.sharing is not None:
            shared_cast.withdraw()
        scale, *kept = ctx.saved_tensors if needs_grad_weight else (None,)
        if linear.scales_grad_rows:
            x = kept[0] if kept else None
            grads = row_scaled.backward(grad_output, x, linear, needs_grad_input=needs_grad_input)
        else:
            part = partial(_part_of_input, kept, scale, ctx.function, linear) if needs_grad_weight else None
            grads = linear_backward(grad_output, part, linear, needs_grad_input=needs_grad_input)
        grad_input, grad_weight, grad_bias = grads
        if grad_input is not None:
            grad_input = with_leading(grad_input, ctx.input_shape[:-1])
        grad_addend = grad_output if needs_grad_addend else None
        return grad_input, grad_weight, delivered(grad_bias, linear.bias), grad_addend, None


def _rows(x: Tensor, linear: LinearParams, format: Format) -> Tensor:
    """`x` [..., K] as a matrix; with rows of padding up to what GEMMs take if its rows are not parts of ranks'."""
    return as_matrix(x if linear.parallelism.group is not None else as_whole_rows(x, format.size_multiple))


def _recomputation(x: Tensor, call: _Call) -> Recomputation | None:
    """How backward makes the input again; None: the columns are kept. A layer with followers keeps them for all."""
    linear = call.linear
    if call.keeps_input:
        return Recomputation(_same, (x,))
    if linear.recomputations is None or shared_cast.has_followers(linear):
        return None
    return linear.recomputations.of(x)


def _part_of_input(
    kept: Sequence[Tensor], scale: Tensor | None, function: Callable[..., Tensor] | None, linear: LinearParams
) -> Quantized:
    """What `linear_backward` takes: what forward has kept, or the cast of ``function(*kept)``, of the same bits."""
    format = linear.quantizers.input.format
    is_columns = linear.parallelism.casts_columns(format)
    if function is not None:
        rows = _rows(function(*kept), linear, format)
        return TensorSource(rows, rowwise=not is_columns, transposed=is_columns).quantize(format, scale)
    assert scale is not None
    return Quantized(None, kept[0], scale, format) if is_columns else Quantized(kept[0], None, scale, format)


def _same(x: Tensor) -> Tensor:
    return x
