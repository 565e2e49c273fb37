"""megatron-core's self-attention with its norm inside, and no copies between attention and its linear layers."""

from __future__ import annotations

from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from ..kernels.ops import Rotation
from ..nn.links import LayerLinks
from ..nn.qkv import fp8_norm_qkv
from ..nn.rope import split_rotated
from .norm import Norm
from .tensor_parallel import FP8ColumnParallelLinear, FP8RowParallelLinear


class RotarySelfAttention(SelfAttention):
    """megatron-core's SelfAttention in 16 bits. It rotates query and key where the QKV projection wrote them.

    Its ``rotary_pos_emb`` is `Rotation.cos_sin` of the sequence; None rotates nothing.
    """

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **unused: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states [s, b, h] → output [s, b, h], and the bias still to add."""
        query, key, value = self.query_key_value(hidden_states, self._rotation(rotary_pos_emb))
        attend = self.core_attention
        if self.checkpoint_core_attention and self.training:
            attend = self._checkpointed_attention_forward
        context = attend(
            query,
            key,
            value,
            attention_mask,
            attn_mask_type=self.attn_mask_type,
            packed_seq_params=packed_seq_params,
        )
        output, bias = self.linear_proj(context)
        return output, bias

    def query_key_value(self, hidden_states: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """hidden_states [s, b, h] → query [s, b, heads, d], key and value [s, b, groups, d]."""
        if rotation is None:
            query, key, value = self.get_query_key_value_tensors(hidden_states)
            return query, key, value
        y, _ = self.linear_qkv(hidden_states)
        query, key, value = split_rotated(y, rotation, self._widths())
        return query.reshape(*query.shape[:2], -1, rotation.head_dim), key, value

    def _rotation(self, rotary_pos_emb: Tensor | None) -> Rotation | None:
        if rotary_pos_emb is None:
            return None
        return Rotation(rotary_pos_emb, self.hidden_size_per_attention_head, self.config.rotary_interleaved)

    def _widths(self) -> tuple[int, int, int]:
        """Columns of query, key and value in one group of the projection's output."""
        width = self.hidden_size_per_attention_head
        return self.num_attention_heads_per_partition // self.num_query_groups_per_partition * width, width, width


class FP8SelfAttention(RotarySelfAttention):
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

    def query_key_value(self, hidden_states: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """hidden_states [s, b, h] (before the norm) → query [s, b, heads, d], key and value [s, b, groups, d]."""
        norm, linear = self.reads_weights_of
        query, key, value, residual = fp8_norm_qkv(
            hidden_states, norm.norm_params(), linear.linear_params(), self._widths(), rotation
        )
        self._residual.put(residual)
        return query.reshape(*query.shape[:2], -1, key.shape[3]), key, value
