"""The MLP of a transformer layer over chunks of tokens, so that the tensors between its GEMMs exist for one chunk.

Forward keeps x alone, with the norm's statistics. Backward computes fc1's output of a chunk again, and frees it. The
gradients of both weights are added in FP32 by their GEMMs and delivered once, as storage may take one a micro-batch.
The gradient of the norm's output is whole, and the norm's backward is one launch.

A delayed scale is the same for all chunks, and a block of 128 tokens lies in one chunk. Such casts have the bits of a
whole MLP (`nn.mlp`). Under current scaling each chunk has scales of its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..activation_functions import Activation
from ..quantization.scaled_tensor import ScaledTensor
from ..quantization.sources import ActivationGradSource, ActivationSource, CastGrad, NormStatistics
from ..quantization.weight_grad import WeightGradSum
from .chunk_grads import chunks
from .first_order import once_differentiable
from .gemms import LinearParams, delivered_wgrad, fprop, start_dgrad
from .links import LinearLinks
from .normed import NormParams, norm_backward, norm_fprop, norm_fprop_again, start_norm_columns
from .operands import delivered
from .rows import LocalRows, OperandRows


class _KeptChunk(NamedTuple):
    """What a chunk keeps for backward: the norm's statistics, and the scale of the activation's cast, FP32 [1]."""

    statistics: NormStatistics
    activation_scale: Tensor | None


def fp8_norm_mlp_in_chunks(
    x: Tensor,
    norm: NormParams,
    fc1: LinearParams,
    fc2: LinearParams,
    activation: Activation,
    *,
    rows: int,
    adds_input: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`nn.mlp.fp8_norm_mlp` over chunks of `rows` positions of each sequence, recomputed in backward.

    Ranks that share the sequence take the same rows of their parts at a time.

    Args:
        rows: of x's first dimension; a multiple of the recipe's `size_multiple`. The last chunk may be shorter.
            Otherwise as `fp8_norm_mlp`.
    """
    return _FP8NormMLPInChunks.apply(
        x,
        norm.weight,
        norm.bias,
        fc1.weight,
        fc1.bias,
        fc2.weight,
        fc2.bias,
        norm,
        fc1,
        fc2,
        activation,
        rows,
        adds_input,
        torch.is_grad_enabled(),
    )


class _FP8NormMLPInChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor | None,
        weight1: ScaledTensor,
        bias1: Tensor | None,
        weight2: ScaledTensor,
        bias2: Tensor | None,
        norm: NormParams,
        fc1: LinearParams,
        fc2: LinearParams,
        activation: Activation,
        rows: int,
        adds_input: bool,
        needs_backward: bool,
    ) -> tuple[Tensor, Tensor | None]:
        whole = torch.empty_like(x)
        saved: list[Tensor | None] = []
        for own in chunks(x.shape[0], rows):
            part = x[own]
            z, statistics = norm_fprop(part, norm, fc1)
            operand = fc2.quantizers.input.quantize(ActivationSource(z, activation))
            y = fprop(LocalRows(operand), fc2, x.dtype, part if adds_input else None)
            saved += [*statistics, operand.shared_scale]
            whole[own] = y.view(part.shape)
            del z, operand, y
        if needs_backward:
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(x, *saved)
            ctx.norm, ctx.fc1, ctx.fc2, ctx.activation = norm, fc1, fc2, activation
            ctx.rows, ctx.adds_input = rows, adds_input
        return whole, None if adds_input else x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor, residual_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *saved = ctx.saved_tensors
        norm, rows, kept = ctx.norm, ctx.rows, _kept(saved)
        fc1, fc2 = _of_chunks(ctx.fc1), _of_chunks(ctx.fc2)
        made = None if ctx.fc2.links is None else ctx.fc2.links.early_cast.take(grad_output)
        sums = _Sums(fc1, fc2, x.dtype)
        grad_normed = torch.empty_like(x)
        for own, chunk in zip(chunks(x.shape[0], rows), kept, strict=True):
            part = x[own]
            z = norm_fprop_again(part, norm, chunk.statistics, fc1)
            g2, grad_bias2 = _cast_grad(made, grad_output, own, fc2)
            source = ActivationGradSource(
                start_dgrad(g2, fc2, grad_output.dtype).wait(),
                z,
                ctx.activation,
                fc2.quantizers.input.format,
                chunk.activation_scale,
                column_sums=fc1.bias is not None,
            )
            cast = fc1.quantizers.grad_output.quantize(source)
            del source, z
            sums.weight2.add(g2.columns(), cast.activation.t)
            g1 = LocalRows(cast.operand)
            sums.add_biases(cast.column_sums, grad_bias2)
            del g2, cast
            columns = start_norm_columns(part, norm, chunk.statistics, fc1.quantizers.input.format, fc1.parallelism)
            grad_input = start_dgrad(g1, fc1, x.dtype)
            sums.weight1.add(g1.columns(), columns())
            grad_normed[own] = grad_input.wait().view_as(part)
            del g1, columns, grad_input
        if made is not None:
            sums.grad_bias2 = made.column_sums
        del made
        grad_weight1, grad_weight2 = sums.deliver()
        mean, rstd = (torch.cat(parts) for parts in zip(*(chunk.statistics[:2] for chunk in kept), strict=True))
        residual = grad_output if ctx.adds_input else residual_grad
        summands = grad_normed.view(1, -1, x.shape[-1])
        grad_x, grad_norm_weight, grad_norm_bias = norm_backward(
            summands, residual, x, norm, NormStatistics(mean, rstd, None)
        )
        grad_bias1, grad_bias2 = delivered(sums.grad_bias1, fc1.bias), delivered(sums.grad_bias2, fc2.bias)
        grads = (grad_norm_weight, grad_norm_bias, grad_weight1, grad_bias1, grad_weight2, grad_bias2)
        return grad_x, *grads, *[None] * 7


class _Sums:
    """The gradients of both layers' weights and biases over chunks."""

    def __init__(self, fc1: LinearParams, fc2: LinearParams, dtype: torch.dtype) -> None:
        self._linears = fc1, fc2
        self._dtype = dtype
        self.weight1, self.weight2 = (WeightGradSum(dtype, linear.quantizers.weight_grad) for linear in (fc1, fc2))
        self.grad_bias1: Tensor | None = None
        self.grad_bias2: Tensor | None = None

    def add_biases(self, grad_bias1: Tensor | None, grad_bias2: Tensor | None) -> None:
        """Add a chunk's column sums, FP32."""
        self.grad_bias1, self.grad_bias2 = _added(self.grad_bias1, grad_bias1), _added(self.grad_bias2, grad_bias2)

    def deliver(self) -> list[Tensor | None]:
        """Give both weights' gradients to their `main_grad`, and free them; those of weights without one are
        returned."""
        totals = (self.weight1.take(), self.weight2.take())
        grads = [delivered_wgrad(total, linear) for total, linear in zip(totals, self._linears, strict=True)]
        return [None if grad is None else grad.to(self._dtype) for grad in grads]


def _added(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    return part if total is None or part is None else total.add_(part)


def _kept(saved: list[Tensor | None]) -> list[_KeptChunk]:
    """The chunks' four tensors each, in order."""

    def of(index: int) -> _KeptChunk:
        mean, rstd, scale, activation_scale = saved[index : index + 4]
        assert mean is not None and rstd is not None
        return _KeptChunk(NormStatistics(mean, rstd, scale), activation_scale)

    return [of(index) for index in range(0, len(saved), 4)]


def _of_chunks(linear: LinearParams) -> LinearParams:
    """The layer for one backward over chunks: it makes its weight's transpose once, and takes the early casts of its
    own chunks."""
    links = LinearLinks(keeps_transpose=True)
    if linear.links is not None and linear.links.kept_transpose is not None:
        links.kept_transpose = linear.links.kept_transpose
    return linear._replace(links=links)


def _cast_grad(
    made: CastGrad | None, grad_output: Tensor, own: slice, fc2: LinearParams
) -> tuple[OperandRows, Tensor | None]:
    """The gradient of fc2's output in FP8 for a chunk, and its column sums if it is cast here.

    Args:
        made: the cast of the whole gradient, if the norm behind the layer made it.
    """
    part = grad_output[own]
    if made is not None:
        assert fc2.links is not None
        sequences = grad_output.shape[1:-1].numel()
        operand = made.operand.rows(slice(own.start * sequences, own.stop * sequences))
        fc2.links.early_cast.put(part, CastGrad(operand, None))
    return fc2.cast_grad(part)
