"""The place of megatron-core's core attention in FP8. Self-attention computes it in one function (`nn.attention`)."""

from __future__ import annotations

import math
from typing import Any

from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from ..quantization.attention import AttentionQuantizers
from ..quantization.recipe import Recipe


class FP8CoreAttention(MegatronModule):
    """The casts of softmax(QKᵀ/√d)·V in FP8 with a causal mask; `FP8SelfAttention` computes it.

    Args:
        recipe: formats and delayed scaling. The rest is megatron-core's.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        *,
        recipe: Recipe,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        if attn_mask_type is not AttnMaskType.causal:
            raise ValueError(f"FP8CoreAttention is causal; the layer spec asked for {attn_mask_type}")
        assert config.kv_channels is not None and not config.attention_dropout, config
        self.softmax_scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)
        self.quantizers = AttentionQuantizers.of(recipe)
