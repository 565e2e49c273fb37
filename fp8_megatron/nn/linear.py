"""The FP8 linear layer: three GEMMs, their operands' quantisation and the tensor-parallel collectives between them.

fprop   y = x·Wᵀ            x E4M3, W E4M3, fast accumulation
dgrad   grad_input = g·W    g E5M2, Wᵀ made on demand from the FP8 weight, split accumulation
wgrad   grad_weight = gᵀ·x  both K-major over tokens, split accumulation, straight into `weight.main_grad`

`fp8_linear` keeps x for backward in FP8 only: transposed, as wgrad wants it, or under sequence parallelism this rank's
part of it. Where the norm in front of a layer is fused with it (`norm_fprop`, used by the QKV projection and the MLP),
backward keeps the norm's input, which the residual stream holds anyway, and makes the rest again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..collectives.row_exchange import Rows, RowSum, gather_rows, sum_rows
from ..collectives.scale_sync import max_over_group_
from ..kernels import ops
from ..quantization.recipe import INPUT_DTYPE, AmaxSync, LinearQuantizers, Quantizer
from ..quantization.scaled_tensor import ScaledTensor
from ..quantization.sources import Grads, GradSource, NormSource, TensorSource
from ..quantization.weight_grad import WeightGrad


class MainGrad(Protocol):
    """Where a weight's gradient goes. Who owns the storage decides its form (FP8, BF16 or FP32 accumulator)."""

    def accumulate_(self, grad: Tensor | WeightGrad) -> None:
        """Add one micro-batch's gradient (any float dtype, the weight's shape) and mark it written.

        Under a delayed scale of weight gradients it is a `WeightGrad`, which can write itself in FP8.
        """


@dataclass(frozen=True)
class TensorParallelism:
    """What a linear layer does around its GEMMs inside a tensor-parallel group.

    `gathers_input`: the input is this rank's part of the sequence; it is gathered (in FP8) before fprop and wgrad, and
    grad_input is reduce-scattered. `reduces_grad_input`: the input is replicated; grad_input is all-reduced.
    `scatters_output`: each rank's output is a part of the sum; it is reduce-scattered along the sequence, and its
    gradient is gathered (in FP8) before dgrad and wgrad.
    """

    group: torch.distributed.ProcessGroup | None = None
    gathers_input: bool = False
    reduces_grad_input: bool = False
    scatters_output: bool = False


class GradReceiver(NamedTuple):
    """The linear layer whose output a norm reads, and nothing else does: the gradient that leaves the norm is that
    layer's output gradient, cast for it where it is made; `transposed` if it wants both layouts."""

    quantizers: LinearQuantizers
    transposed: bool


class NormParams(NamedTuple):
    """The norm in front of a linear layer: weight [K], bias [K] or None, epsilon, whether it is RMSNorm, and who
    receives its gradient in FP8."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    rms: bool
    receiver: GradReceiver | None = None

    @property
    def settings(self) -> NormSettings:
        """All but the parameters."""
        return self.eps, self.rms, self.receiver


#: The end of `NormParams`.
NormSettings = tuple[float, bool, GradReceiver | None]


class LinearParams(NamedTuple):
    """One linear layer: weight [N, K], bias [N] or None, quantisers."""

    weight: ScaledTensor
    bias: Tensor | None
    quantizers: LinearQuantizers


class Operand:
    """A gradient g as the GEMMs take it: rows [T, N], which may be on their way, scale FP32 [1], transpose [N, T]."""

    def __init__(self, rows: Rows, scale: Tensor, payload_t: Tensor | None = None) -> None:
        self.rows, self.scale = rows, scale
        self._payload_t = payload_t

    def payload_t(self) -> Tensor:
        """The transpose, from the cast or made of the rows once."""
        if self._payload_t is None:
            self._payload_t = ops.transpose(self.rows.wait())
        return self._payload_t


class KeptTranspose:
    """The transpose of one weight from the first backward of a step to its last; `forget` when the weight changes."""

    def __init__(self) -> None:
        self._payload_t: Tensor | None = None

    def of(self, payload: Tensor) -> Tensor:
        """FP8 [K, N] of the weight's payload [N, K]."""
        if self._payload_t is None:
            self._payload_t = ops.transpose(payload)
        return self._payload_t

    def forget(self) -> None:
        """The next backward makes it anew."""
        self._payload_t = None


def fp8_linear(
    x: Tensor,
    weight: ScaledTensor,
    bias: Tensor | None,
    quantizers: LinearQuantizers,
    parallelism: TensorParallelism,
    *,
    keeps_input: bool = False,
    addend: Tensor | None = None,
) -> Tensor:
    """y = x·Wᵀ + b (+ addend) in FP8, with the weight gradient written to ``weight.main_grad``.

    Args:
        x: BF16 [..., K]; with `gathers_input` [s/tp, b, K].
        weight: [N, K]. bias: [N] or None.
        keeps_input: backward keeps `x` itself and casts it again, for an x that something else keeps anyway.
        addend: the residual branch, of y's shape and dtype; the GEMM adds it before it rounds.

    Returns:
        BF16 [..., N]; with `gathers_input` [s, b, N]; with `scatters_output` [s/tp, b, N], and then the bias's gradient
        is of this rank's part of the sequence.
    """
    keeps_input = keeps_input and not parallelism.gathers_input
    return _FP8Linear.apply(x, weight, bias, addend, quantizers, parallelism, keeps_input, torch.is_grad_enabled())


class _FP8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: ScaledTensor,
        bias: Tensor | None,
        addend: Tensor | None,
        quantizers: LinearQuantizers,
        parallelism: TensorParallelism,
        keeps_input: bool,
        needs_backward: bool,
    ) -> Tensor:
        x2d = x.reshape(-1, x.shape[-1])
        gathers = parallelism.gathers_input
        source = TensorSource(x2d, transposed=needs_backward and not gathers and not keeps_input)
        (payload, payload_t), scale = quantizers.input.quantize(source, sync=amax_sync(parallelism))
        rows = gathered(payload, parallelism)
        if parallelism.scatters_output:
            y = summed_fprop(rows, scale, weight, bias, parallelism, x.dtype, addend)
        else:
            y = fprop(rows, scale, weight, bias, x.dtype, addend)
        if needs_backward:
            ctx.save_for_backward(x if keeps_input else payload if gathers else payload_t, scale)
            ctx.weight, ctx.bias, ctx.keeps_input = weight, bias, keeps_input
            ctx.quantizers, ctx.parallelism, ctx.input_shape = quantizers, parallelism, x.shape
        return y.view(-1, *x.shape[1:-1], y.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        saved, x_scale = ctx.saved_tensors
        weight, parallelism = ctx.weight, ctx.parallelism
        gathering = gathered(saved, parallelism) if parallelism.gathers_input else None
        if parallelism.scatters_output:
            g, grad_bias = gathered_grad(grad_output, ctx.quantizers, parallelism, has_bias=ctx.bias is not None)
        else:
            g, grad_bias = quantized_grad(grad_output, ctx.quantizers, has_bias=ctx.bias is not None)
        grad_input = start_dgrad(g, weight, grad_output.dtype, parallelism)
        if gathering is not None:
            x_t = ops.transpose(gathering.wait())
        elif ctx.keeps_input:
            x2d = saved.reshape(-1, saved.shape[-1])
            _, x_t = ops.quantize_with_scale(x2d, x_scale, INPUT_DTYPE, rowwise=False, transposed=True)
        else:
            x_t = saved
        wgrad(g, x_t, x_scale, weight, ctx.quantizers, grad_output.dtype)
        grad_bias = delivered(grad_bias, ctx.bias)
        grad_addend = grad_output if ctx.needs_input_grad[3] else None
        return grad_input.wait().view(ctx.input_shape), None, grad_bias, grad_addend, None, None, None, None


class NormStatistics(NamedTuple):
    """What `norm_fprop` keeps beside x: mean (empty under RMSNorm), rstd FP32 [T], the operand's scale FP32 [1]."""

    mean: Tensor
    rstd: Tensor
    scale: Tensor


def norm_fprop(
    x: Tensor,
    norm: NormParams,
    weight: ScaledTensor,
    bias: Tensor | None,
    quantizers: LinearQuantizers,
    parallelism: TensorParallelism,
) -> tuple[Tensor, NormStatistics]:
    """y [T, N] = norm(x)·Wᵀ + b, T over the gathered sequence, and what backward needs beside x."""
    rows, kept = quantized_norm(x, norm, quantizers.input, parallelism)
    return fprop(rows, kept.scale, weight, bias, x.dtype), kept


def quantized_norm(
    x: Tensor, norm: NormParams, quantizer: Quantizer, parallelism: TensorParallelism
) -> tuple[Rows, NormStatistics]:
    """norm(x) in FP8 over the gathered sequence [T, K], and what backward needs beside x."""
    source = NormSource(x.reshape(-1, x.shape[-1]), norm.weight, norm.bias, norm.eps, norm.rms)
    (payload, mean, rstd), scale = quantizer.quantize(source, sync=amax_sync(parallelism))
    return gathered(payload, parallelism), NormStatistics(mean, rstd, scale)


def norm_linear_backward(
    g: Operand,
    residual_grad: Tensor | None,
    x: Tensor,
    norm: NormParams,
    kept: NormStatistics,
    weight: ScaledTensor,
    quantizers: LinearQuantizers,
    parallelism: TensorParallelism,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of x (the residual branch's added), of the norm's weight and of its bias (see `delivered`); that of the
    layer's weight is written."""
    gathering = start_norm_again(x, norm, kept, parallelism)
    grad_input = start_dgrad(g, weight, x.dtype, parallelism)
    wgrad(g, transposed_norm(gathering, x, norm, kept), kept.scale, weight, quantizers, x.dtype)
    return norm_backward(grad_input.summands(), residual_grad, x, norm, kept)


def start_norm_again(x: Tensor, norm: NormParams, kept: NormStatistics, parallelism: TensorParallelism) -> Rows | None:
    """Start to gather norm(x) in FP8 again where a rank keeps its part of the sequence; see `transposed_norm`."""
    if not parallelism.gathers_input:
        return None
    assert parallelism.group is not None
    x2d = x.reshape(-1, x.shape[-1])
    payload = ops.norm_requantize(x2d, norm.weight, norm.bias, *kept, INPUT_DTYPE, transposed=False)
    return gather_rows(payload, parallelism.group)


def transposed_norm(gathering: Rows | None, x: Tensor, norm: NormParams, kept: NormStatistics) -> Tensor:
    """norm(x) [K, T] as wgrad wants it, from what `start_norm_again` gave."""
    if gathering is not None:
        return ops.transpose(gathering.wait())
    x2d = x.reshape(-1, x.shape[-1])
    return ops.norm_requantize(x2d, norm.weight, norm.bias, *kept, INPUT_DTYPE, transposed=True)


def norm_backward(
    summands: Tensor, residual_grad: Tensor | None, x: Tensor, norm: NormParams, kept: NormStatistics
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of x (the residual branch's added), of the norm's weight and of its bias (see `delivered`).

    Args:
        summands: [d, T, K], whose sum is the gradient of the norm's output.
    """
    x2d = x.reshape(-1, x.shape[-1])
    residual = None if residual_grad is None else residual_grad.reshape(x2d.shape)
    arguments = (summands, residual, x2d, norm.weight, kept.mean, kept.rstd)
    has_bias = norm.bias is not None
    known = None if norm.receiver is None else norm.receiver.quantizers.grad_output.known_scale()
    if norm.receiver is None or known is None:
        grad_x, grad_weight, grad_bias = ops.norm_backward(*arguments, has_bias=has_bias)
    else:
        (scale, amax_out), (quantizers, transposed) = known, norm.receiver
        dtype = quantizers.grad_output.dtype
        grad_x, grad_weight, grad_bias, *cast = ops.norm_backward_quantize(
            *arguments, dtype, has_bias=has_bias, scale=scale, amax_out=amax_out, transposed=transposed
        )
        quantizers.early_cast.put(grad_x, Grads(*cast), scale)
    return grad_x.view(x.shape), delivered(grad_weight, norm.weight), delivered(grad_bias, norm.bias)


def delivered(grad: Tensor | None, param: Tensor | None) -> Tensor | None:
    """Give a vector's gradient, FP32, to `param.main_grad` where there is one: None is then left for autograd, which
    would round it to the parameter's dtype and take three launches to bring it there."""
    main_grad: MainGrad | None = getattr(param, "main_grad", None)
    if param is None or grad is None or main_grad is None:
        return grad if param is not None else None
    main_grad.accumulate_(grad)
    return None


def fprop(
    rows: Rows,
    scale: Tensor,
    weight: ScaledTensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    addend: Tensor | None = None,
) -> Tensor:
    """y [T, N] from the input's payload [T, K]; plus `addend` [..., N], rounded once."""
    weight_payload, weight_scale = weight.gemm_operand()
    y = rows.whole.new_empty((rows.whole.shape[0], weight_payload.shape[0]), dtype=dtype)
    if addend is not None:
        addend = addend.contiguous().view(y.shape)
    for part, payload in rows.parts():
        added = None if addend is None else addend[part]
        ops.scaled_mm_into_(
            y[part], payload, weight_payload, scale, weight_scale, bias=bias, use_fast_accum=True, addend=added
        )
    return y


def summed_fprop(
    rows: Rows,
    scale: Tensor,
    weight: ScaledTensor,
    bias: Tensor | None,
    parallelism: TensorParallelism,
    dtype: torch.dtype,
    addend: Tensor | None = None,
) -> Tensor:
    """This rank's part [T/tp, N] of the sum of all ranks' y [T, N], and of the bias, which one of them adds; plus
    this rank's `addend` [..., N]."""
    assert parallelism.group is not None
    payload = rows.wait()
    weight_payload, weight_scale = weight.gemm_operand()

    def write(part: slice, out: Tensor, adds_bias: bool) -> None:
        added = bias if adds_bias else None
        ops.scaled_mm_into_(out, payload[part], weight_payload, scale, weight_scale, bias=added, use_fast_accum=True)

    shape = (payload.shape[0], weight_payload.shape[0])
    if addend is not None:
        addend = addend.contiguous().view(-1, shape[1])
    return sum_rows(write, shape, dtype, payload.device, parallelism.group).wait(addend)


def dgrad(g: Operand, weight: ScaledTensor, dtype: torch.dtype) -> Tensor:
    """grad_input [T, K]."""
    payload_t, weight_scale = _transposed_weight(weight)
    grad_input = payload_t.new_empty((g.rows.whole.shape[0], payload_t.shape[0]), dtype=dtype)
    for part, payload in g.rows.parts():
        ops.scaled_mm_into_(grad_input[part], payload, payload_t, g.scale, weight_scale)
    return grad_input


class PendingSum(NamedTuple):
    """A gradient [T, K] that is being summed over the group, perhaps in place; `wait` or `summands` once."""

    value: Tensor
    work: torch.distributed.Work | None = None

    def wait(self) -> Tensor:
        """The sum."""
        if self.work is not None:
            self.work.wait()
        return self.value

    def summands(self) -> Tensor:
        """As `RowSum.summands`: the sum, alone."""
        return self.wait().unsqueeze(0)


def start_dgrad(
    g: Operand, weight: ScaledTensor, dtype: torch.dtype, parallelism: TensorParallelism
) -> RowSum | PendingSum:
    """Start grad_input, summed over the group: [T/tp, K] of a gathered input, else [T, K]."""
    if not parallelism.gathers_input:
        return start_grad_sum(dgrad(g, weight, dtype), parallelism)
    assert parallelism.group is not None
    payload, (payload_t, weight_scale) = g.rows.wait(), _transposed_weight(weight)

    def write(part: slice, out: Tensor, _: bool) -> None:
        ops.scaled_mm_into_(out, payload[part], payload_t, g.scale, weight_scale)

    return sum_rows(write, (payload.shape[0], payload_t.shape[0]), dtype, payload.device, parallelism.group)


def start_grad_sum(grad_input: Tensor, parallelism: TensorParallelism) -> RowSum | PendingSum:
    """Start to sum grad_input [T, K] over the group: to [T/tp, K] of a gathered input, else in place where needed."""
    if parallelism.gathers_input:
        assert parallelism.group is not None

        def write(part: slice, out: Tensor, _: bool) -> None:
            out.copy_(grad_input[part])

        shape = (grad_input.shape[0], grad_input.shape[1])
        return sum_rows(write, shape, grad_input.dtype, grad_input.device, parallelism.group)
    if parallelism.reduces_grad_input:
        work = torch.distributed.all_reduce(grad_input, group=parallelism.group, async_op=True)
        return PendingSum(grad_input, work)
    return PendingSum(grad_input)


def _transposed_weight(weight: ScaledTensor) -> tuple[Tensor, Tensor]:
    """The weight's payload [K, N] as dgrad wants it, and its scale."""
    payload, scale = weight.gemm_operand()
    kept: KeptTranspose | None = getattr(weight, "kept_transpose", None)
    return ops.transpose(payload) if kept is None else kept.of(payload), scale


def wgrad(
    g: Operand, x_t: Tensor, x_scale: Tensor, weight: ScaledTensor, quantizers: LinearQuantizers, dtype: torch.dtype
) -> None:
    """Write grad_weight [N, K] where it belongs."""
    main_grad: MainGrad = weight.main_grad  # type: ignore[attr-defined]
    grad = WeightGrad(g.payload_t(), x_t, g.scale, x_scale, dtype, quantizers.weight_grad)
    main_grad.accumulate_(grad.wide() if grad.scale is None else grad)


def quantized_grad(
    grad_output: Tensor, quantizers: LinearQuantizers, *, has_bias: bool
) -> tuple[Operand, Tensor | None]:
    """The output gradient [..., N] for both GEMMs, and the bias's gradient FP32 [N]."""
    cast, scale = _cast_grad(grad_output, quantizers, has_bias=has_bias)
    return Operand(Rows.local(cast.payload), scale, cast.payload_t), cast.column_sums


def gathered_grad(
    grad_output: Tensor, quantizers: LinearQuantizers, parallelism: TensorParallelism, *, has_bias: bool
) -> tuple[Operand, Tensor | None]:
    """The gradient of this rank's part of the sequence [s/tp, ..., N], cast with one scale, over the whole
    sequence; and the bias's gradient FP32 [N], of this rank's part.

    The cast is bit for bit that of the gathered gradient, for half of BF16's bytes.
    """
    assert parallelism.group is not None
    sync = partial(max_over_group_, group=parallelism.group)
    cast, scale = _cast_grad(grad_output, quantizers, has_bias=has_bias, transposed=False, sync=sync)
    return Operand(gather_rows(cast.payload, parallelism.group), scale), cast.column_sums


def _cast_grad(
    grad_output: Tensor,
    quantizers: LinearQuantizers,
    *,
    has_bias: bool,
    transposed: bool = True,
    sync: AmaxSync | None = None,
) -> tuple[Grads, Tensor]:
    """The cast that the gradient came with, which has column sums in any case, or else one made now; and its scale."""
    made = quantizers.early_cast.take(grad_output)
    if made is not None:
        return made
    flat = grad_output.reshape(-1, grad_output.shape[-1])
    source = GradSource(flat, column_sums=has_bias, transposed=transposed)
    return quantizers.grad_output.quantize(source, sync=sync)


def amax_sync(parallelism: TensorParallelism) -> AmaxSync | None:
    """How the ranks whose parts are gathered share one scale."""
    if not parallelism.gathers_input:
        return None
    assert parallelism.group is not None
    return partial(max_over_group_, group=parallelism.group)


def gathered(payload: Tensor, parallelism: TensorParallelism) -> Rows:
    """The whole sequence's payload [T, K], which may be on its way."""
    if not parallelism.gathers_input:
        return Rows.local(payload)
    assert parallelism.group is not None
    return gather_rows(payload, parallelism.group)


def gathered_shape(x: Tensor, parallelism: TensorParallelism) -> torch.Size:
    """The leading dimensions of y."""
    leading = x.shape[:-1]
    if not parallelism.gathers_input:
        return leading
    assert parallelism.group is not None
    return torch.Size((leading[0] * parallelism.group.size(), *leading[1:]))
