"""megatron-core's self-attention with its norm inside, and no copies between attention and its linear layers."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.attention import SelfAttention

from ..nn.links import LayerLinks
from ..nn.qkv import fp8_norm_qkv
from .norm import Norm
from .tensor_parallel import FP8ColumnParallelLinear, FP8RowParallelLinear


class FP8SelfAttention(SelfAttention):
    """megatron-core's SelfAttention with `fp8_norm_qkv` inside. Call `fuse_norm` before the first forward.

    Args:
        links: the layer's links; forward puts its input there, for the residual branch. The rest is megatron-core's.
    """

    linear_qkv: FP8ColumnParallelLinear
    linear_proj: FP8RowParallelLinear

    def __init__(self, *args: Any, links: LayerLinks, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._residual = links.residual

    def fuse_norm(self, norm: Norm) -> None:
        """Compute the norm in front of this layer here. It is not registered: its parameters stay where they are."""
        #: Modules whose parameters the forward reads without calling them.
        self.reads_weights_of = (norm, self.linear_qkv)

    def get_query_key_value_tensors(  # type: ignore[no-untyped-def]
        self, hidden_states, *args: Any, **kwargs: Any
    ):
        """hidden_states [s, b, h] (before the norm) → query [s, b, heads, d], key and value [s, b, groups, d]."""
        norm, linear = self.reads_weights_of
        if self.config.num_query_groups < self.world_size:  # a rank holds part of a group, which megatron-core gathers
            self._residual.put(hidden_states)
            return super().get_query_key_value_tensors(norm(hidden_states), *args, **kwargs)
        width = self.hidden_size_per_attention_head
        heads = self.num_attention_heads_per_partition // self.num_query_groups_per_partition
        query, key, value, residual = fp8_norm_qkv(
            hidden_states, norm.norm_params(), linear.linear_params(), (heads * width, width, width)
        )
        self._residual.put(residual)
        return query.reshape(*query.shape[:2], -1, width), key, value
