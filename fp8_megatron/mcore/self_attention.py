"""megatron-core's self-attention with its norm inside, and no copies between attention and its linear layers."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ..device.group import Group, max_over_group_
from ..kernels.ops import QKNorm, Rotation
from ..nn.attention import AttentionParams, fp8_norm_attention
from ..nn.links import LayerLinks
from ..nn.qkv import fp8_norm_qkv
from ..nn.rope import split_rotated
from ..quantization.attention import AttentionQuantizers
from ..quantization.recipe import Recipe
from .norm import HeadNorm, Norm
from .tensor_parallel import FP8ColumnParallelLinear, FP8RowParallelLinear


class FP8CoreAttention(MegatronModule):
    """The casts of softmax(QKᵀ/√d)·V in FP8 with a causal mask; `FP8SelfAttention` computes it.

    Args:
        recipe: formats and delayed scaling.
        cp_comm_type, pg_collection: the ranks of `pg_collection.cp` exchange heads, which is ``a2a``. The rest is
            megatron-core's.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        recipe: Recipe,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        if attn_mask_type is not AttnMaskType.causal:
            raise ValueError(f"FP8CoreAttention is causal; the layer spec asked for {attn_mask_type}")
        assert config.kv_channels is not None and not config.attention_dropout, config
        self.softmax_scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)
        #: The ranks that exchange heads; None if this rank has whole sequences.
        self.context_group: Group | None = None
        if config.context_parallel_size > 1:
            assert cp_comm_type == "a2a" and pg_collection is not None, (cp_comm_type, pg_collection)
            self.context_group = pg_collection.cp
        sync = None if self.context_group is None else partial(max_over_group_, group=self.context_group)
        self.quantizers = AttentionQuantizers.of(recipe, sync)


class RotarySelfAttention(SelfAttention):
    """megatron-core's SelfAttention in 16 bits. Query and key are normalised and rotated as `nn.rope` does.

    Its ``rotary_pos_emb`` is `Rotation.cos_sin` of the sequence; None rotates nothing.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        #: Modules whose parameters the forward reads without calling them.
        self.reads_weights_of: tuple[torch.nn.Module, ...] = self._head_norms()

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **unused: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states [s, b, h] → output [s, b, h], and the bias still to add."""
        query, key, value = self.query_key_value(hidden_states, self._rotation(rotary_pos_emb, hidden_states))
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
        query, key, value = split_rotated(y, rotation, self._widths(), self._qk_norm())
        return query.reshape(*query.shape[:2], -1, rotation.head_dim), key, value

    def _rotation(self, rotary_pos_emb: Tensor | None, hidden_states: Tensor) -> Rotation | None:
        """Norms of query and key without RoPE have a rotation without angles."""
        if rotary_pos_emb is None:
            return self._without_angles(hidden_states) if self.config.qk_layernorm else None
        return Rotation(rotary_pos_emb, self.hidden_size_per_attention_head, self.config.rotary_interleaved)

    def _without_angles(self, hidden_states: Tensor) -> Rotation:
        parts = self.world_size if self.config.sequence_parallel else 1
        table = hidden_states.new_empty((parts * hidden_states.shape[0], 2, 0), dtype=torch.float32)
        return Rotation(table, self.hidden_size_per_attention_head, self.config.rotary_interleaved)

    def _head_norms(self) -> tuple[HeadNorm, ...]:
        return tuple(norm for norm in (self.q_layernorm, self.k_layernorm) if isinstance(norm, HeadNorm))

    def _qk_norm(self) -> QKNorm | None:
        if not self.config.qk_layernorm:
            return None
        query, key = self._head_norms()
        return QKNorm(query.weight, key.weight, query.bias, key.bias, query.eps, query.is_rms)

    def _widths(self) -> tuple[int, int, int]:
        """Columns of query, key and value in one group of the projection's output."""
        width = self.hidden_size_per_attention_head
        return self.num_attention_heads_per_partition // self.num_query_groups_per_partition * width, width, width


class FP8SelfAttention(RotarySelfAttention):
    """megatron-core's SelfAttention with `fp8_norm_qkv` inside, or with FP8 attention `fp8_norm_attention`.

    Call `fuse_norm` before the first forward.

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
        self.reads_weights_of = (norm, self.linear_qkv, *self._head_norms())
        if isinstance(self.core_attention, FP8CoreAttention):
            self.reads_weights_of = (*self.reads_weights_of, self.linear_proj)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **unused: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states [s, b, h] (before the norm) → output [s, b, h], and the bias still to add."""
        if not isinstance(self.core_attention, FP8CoreAttention):
            return super().forward(hidden_states, attention_mask, rotary_pos_emb, packed_seq_params)
        assert attention_mask is None, "FP8 attention has no documents"
        norm, linear, proj = self.reads_weights_of[0], self.linear_qkv, self.linear_proj
        assert isinstance(norm, Norm)
        attention = AttentionParams(
            self.core_attention.quantizers,
            self.core_attention.softmax_scale,
            self._widths(),
            self._rotation(rotary_pos_emb, hidden_states) or self._without_angles(hidden_states),
            self._qk_norm(),
            self.core_attention.context_group,
        )
        output, residual = fp8_norm_attention(
            hidden_states,
            norm.norm_params(),
            linear.linear_params(),
            proj.linear_params(),
            attention,
            adds_input=proj.adds_residual,
        )
        if residual is not None:
            self._residual.put(residual)
        if proj.output_is_whole:
            return output, None
        return reduce_from_tensor_model_parallel_region(output, group=proj.tp_group), proj.bias

    def query_key_value(self, hidden_states: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """hidden_states [s, b, h] (before the norm) → query [s, b, heads, d], key and value [s, b, groups, d]."""
        norm, linear, *_ = self.reads_weights_of
        assert isinstance(norm, Norm) and isinstance(linear, FP8ColumnParallelLinear)
        query, key, value, residual = fp8_norm_qkv(
            hidden_states, norm.norm_params(), linear.linear_params(), self._widths(), rotation, self._qk_norm()
        )
        self._residual.put(residual)
        return query.reshape(*query.shape[:2], -1, key.shape[3]), key, value
