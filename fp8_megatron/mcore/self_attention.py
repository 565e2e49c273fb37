"""megatron-core's self-attention with the norm in front of it inside, and no copy between attention and its linears."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from ..nn.linear import LinearParams
from ..nn.qkv import fp8_norm_qkv
from .norm import Norm
from .tensor_parallel import (
    FP8ColumnParallelLinear,
    FP8RowParallelLinear,
    ResidualBranch,
    as_scaled,
    column_parallelism,
)


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
