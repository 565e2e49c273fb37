"""The FP8 linear layer: three GEMMs, their operands' quantisation and the tensor-parallel collectives between them.

fprop   y = x·Wᵀ            x E4M3, W E4M3, fast accumulation
dgrad   grad_input = g·W    g E5M2, Wᵀ made on demand from the FP8 weight, split accumulation
wgrad   grad_weight = gᵀ·x  both K-major over tokens, split accumulation, straight into `weight.main_grad`

Backward keeps x in FP8 only: transposed, as wgrad wants it, or under sequence parallelism this rank's part of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..collectives.all_gather import AllGatherWork, all_gather_fp8
from ..collectives.scale_sync import max_over_group_
from ..kernels import ops
from ..quantization.recipe import LinearQuantizers
from ..quantization.scaled_tensor import ScaledTensor


class MainGrad(Protocol):
    """Where a weight's gradient goes. Who owns the storage decides its form (FP8, BF16 or FP32 accumulator)."""

    def accumulate_(self, grad: Tensor) -> None:
        """Add one micro-batch's gradient (any float dtype, the weight's shape) and mark it written."""


@dataclass(frozen=True)
class TensorParallelism:
    """What a linear layer does around its GEMMs inside a tensor-parallel group.

    `gathers_input`: the input is this rank's part of the sequence; it is gathered (in FP8) before fprop and wgrad, and
    grad_input is reduce-scattered. `reduces_grad_input`: the input is replicated; grad_input is all-reduced.
    """

    group: torch.distributed.ProcessGroup | None = None
    gathers_input: bool = False
    reduces_grad_input: bool = False


def fp8_linear(
    x: Tensor,
    weight: ScaledTensor,
    bias: Tensor | None,
    quantizers: LinearQuantizers,
    parallelism: TensorParallelism,
) -> Tensor:
    """y = x·Wᵀ + b in FP8, with the weight gradient written to ``weight.main_grad``.

    Args:
        x: BF16 [..., K]; with `gathers_input` [s/tp, b, K].
        weight: [N, K]. bias: [N] or None.

    Returns:
        BF16 [..., N]; with `gathers_input` [s, b, N].
    """
    return _FP8Linear.apply(x, weight, bias, quantizers, parallelism, torch.is_grad_enabled())


class _FP8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: ScaledTensor,
        bias: Tensor | None,
        quantizers: LinearQuantizers,
        parallelism: TensorParallelism,
        needs_backward: bool,
    ) -> Tensor:
        x2d = x.reshape(-1, x.shape[-1])
        leading = x.shape[:-1]
        if parallelism.gathers_input:
            assert parallelism.group is not None
            operand = quantizers.input(x2d, sync=partial(max_over_group_, group=parallelism.group))
            payload = all_gather_fp8(operand.payload, parallelism.group).wait()
            saved = operand.payload
            leading = torch.Size((leading[0] * parallelism.group.size(), *leading[1:]))
        else:
            operand = quantizers.input(x2d, transposed=needs_backward)
            payload, saved = operand.payload, operand.payload_t
        weight_payload, weight_scale = weight.gemm_operand()
        y = ops.scaled_mm(
            payload, weight_payload, operand.scale, weight_scale, bias=bias, out_dtype=x.dtype, use_fast_accum=True
        )
        if needs_backward:
            ctx.save_for_backward(saved, operand.scale)
            ctx.weight, ctx.has_bias = weight, bias is not None
            ctx.quantizers, ctx.parallelism, ctx.input_shape = quantizers, parallelism, x.shape
        return y.view(*leading, y.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        saved, x_scale = ctx.saved_tensors
        weight, parallelism = ctx.weight, ctx.parallelism
        gathering: AllGatherWork | None = None
        if parallelism.gathers_input:
            gathering = all_gather_fp8(saved, parallelism.group)
        g2d = grad_output.reshape(-1, grad_output.shape[-1])
        g = ctx.quantizers.grad_output(g2d, transposed=True)
        weight_payload, weight_scale = weight.gemm_operand()
        grad_input = ops.scaled_mm(
            g.payload, ops.transpose(weight_payload), g.scale, weight_scale, out_dtype=grad_output.dtype
        )
        grad_input, reducing = _start_grad_input_reduction(grad_input, parallelism)
        x_t = ops.transpose(gathering.wait()) if gathering is not None else saved
        weight.main_grad.accumulate_(ops.scaled_mm(g.payload_t, x_t, g.scale, x_scale, out_dtype=grad_output.dtype))
        grad_bias = g2d.sum(dim=0) if ctx.has_bias else None
        if reducing is not None:
            reducing.wait()
        return grad_input.view(ctx.input_shape), None, grad_bias, None, None, None


def _start_grad_input_reduction(
    grad_input: Tensor, parallelism: TensorParallelism
) -> tuple[Tensor, torch.distributed.Work | None]:
    """Sum grad_input [T, K] over the group, asynchronously: reduce-scatter to [T/tp, K] or all-reduce."""
    if parallelism.gathers_input:
        assert parallelism.group is not None
        rows = grad_input.shape[0] // parallelism.group.size()
        part = grad_input.new_empty((rows, grad_input.shape[1]))
        work = torch.distributed.reduce_scatter_tensor(part, grad_input, group=parallelism.group, async_op=True)
        return part, work
    if parallelism.reduces_grad_input:
        return grad_input, torch.distributed.all_reduce(grad_input, group=parallelism.group, async_op=True)
    return grad_input, None
