"""megatron-core's self-attention with the norm in front of it inside, and no copy between attention and its linears.

The QKV projection gives query, key and value as views of one tensor; backward casts their three gradients to FP8 where
attention left them, as the one gradient of the projection.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..collectives.row_exchange import Rows
from ..nn.linear import (
    LinearParams,
    NormParams,
    NormSettings,
    NormStatistics,
    Operand,
    TensorParallelism,
    delivered,
    gathered_shape,
    norm_fprop,
    norm_linear_backward,
)
from ..quantization.recipe import LinearQuantizers
from ..quantization.scaled_tensor import ScaledTensor
from ..quantization.sources import QKVGradSource
from .norm import Norm
from .tensor_parallel import (
    FP8ColumnParallelLinear,
    FP8RowParallelLinear,
    ResidualBranch,
    as_scaled,
    column_parallelism,
)


def fp8_norm_qkv(
    x: Tensor, norm: NormParams, qkv: LinearParams, widths: tuple[int, int, int], parallelism: TensorParallelism
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key and value of norm(x) in FP8; the weight gradient goes to ``qkv.weight.main_grad``.

    Args:
        x: BF16 [s, b, h]; with `gathers_input` [s/tp, b, h].
        qkv: weight [groups · sum of widths, h], interleaved by group.
        widths: columns of query, key and value in one group.

    Returns:
        BF16 [s, b, groups, width] each, and x again for the residual branch: what comes back along it is added inside
        the norm's backward.
    """
    return _FP8NormQKV.apply(
        x,
        norm.weight,
        norm.bias,
        qkv.weight,
        qkv.bias,
        norm.settings,
        qkv.quantizers,
        widths,
        parallelism,
        torch.is_grad_enabled(),
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
        norm_settings: NormSettings,
        quantizers: LinearQuantizers,
        widths: tuple[int, int, int],
        parallelism: TensorParallelism,
        needs_backward: bool,
    ) -> tuple[Tensor, ...]:
        norm = NormParams(norm_weight, norm_bias, *norm_settings)
        y, kept = norm_fprop(x, norm, weight, bias, quantizers, parallelism)
        if needs_backward:
            ctx.save_for_backward(x, norm_weight, norm_bias, *kept)
            ctx.norm_settings, ctx.weight, ctx.bias = norm_settings, weight, bias
            ctx.quantizers, ctx.parallelism = quantizers, parallelism
        grouped = y.view(*gathered_shape(x, parallelism), -1, sum(widths))
        return *grouped.split(widths, dim=-1), x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, norm_weight, norm_bias, *kept = ctx.saved_tensors
        *qkv_grads, residual_grad = grads
        source = QKVGradSource(qkv_grads, column_sums=ctx.bias is not None)
        (payload, payload_t, grad_bias), scale = ctx.quantizers.grad_output.quantize(source)
        grad_x, grad_norm_weight, grad_norm_bias = norm_linear_backward(
            Operand(Rows.local(payload), scale, payload_t),
            residual_grad,
            x,
            NormParams(norm_weight, norm_bias, *ctx.norm_settings),
            NormStatistics(*kept),
            ctx.weight,
            ctx.quantizers,
            ctx.parallelism,
        )
        return grad_x, grad_norm_weight, grad_norm_bias, None, delivered(grad_bias, ctx.bias), *[None] * 5


class FP8SelfAttention(SelfAttention):
    """megatron-core's SelfAttention over `fp8_norm_qkv`; `fuse_norm` comes before the first forward."""

    linear_qkv: FP8ColumnParallelLinear
    linear_proj: FP8RowParallelLinear

    def fuse_norm(self, norm: Norm) -> None:
        """Take over the norm in front of this layer (not registered here: its parameters stay where they are)."""
        #: Modules whose parameters the forward reads without calling them.
        self.reads_weights_of = (norm, self.linear_qkv)
        self._residual = ResidualBranch()
        self.linear_proj.keeps_input = True  # core attention keeps its output

    def take_residual(self) -> Tensor | None:
        """The input of the last forward, for the residual branch; None where it was added."""
        residual = self._residual.take()
        assert (residual is None) == self.linear_proj.adds_residual, "no forward since the last call"
        return residual

    def _keep_residual(self, residual: Tensor) -> None:
        (self.linear_proj.addend if self.linear_proj.adds_residual else self._residual).put(residual)

    def get_query_key_value_tensors(  # type: ignore[no-untyped-def]
        self, hidden_states: Tensor, *args: Any, **kwargs: Any
    ):
        """hidden_states [s, b, h] (before the norm) → query [s, b, heads, d], key and value [s, b, groups, d]."""
        norm, linear = self.reads_weights_of
        if self.config.num_query_groups < self.world_size:  # a rank holds part of a group: megatron-core gathers it
            self._keep_residual(hidden_states)
            return super().get_query_key_value_tensors(norm(hidden_states), *args, **kwargs)
        width = self.hidden_size_per_attention_head
        heads = self.num_attention_heads_per_partition // self.num_query_groups_per_partition
        query, key, value, residual = fp8_norm_qkv(
            hidden_states,
            norm.norm_params(),
            LinearParams(as_scaled(linear.weight), linear.bias, linear.quantizers),
            (heads * width, width, width),
            column_parallelism(self.config, linear.tp_group),
        )
        self._keep_residual(residual)
        return query.reshape(*query.shape[:2], -1, width), key, value
