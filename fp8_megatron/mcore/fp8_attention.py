"""The place of megatron-core's core attention in FP8. Self-attention computes it in one function (`nn.attention`)."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from ..collectives.scale_sync import max_over_group_
from ..device.group import Group
from ..quantization.attention import AttentionQuantizers
from ..quantization.recipe import Recipe


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
