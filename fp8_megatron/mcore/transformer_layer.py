"""megatron-core's transformer layer with each norm fused into the FP8 linear layers behind it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from ..nn.links import LayerLinks
from .mlp import FP8MLP
from .norm import Norm
from .self_attention import FP8SelfAttention


class FP8TransformerLayer(TransformerLayer):
    """x ← x + attention(norm(x)); x ← x + MLP(norm(x)), the norms computed where their FP8 output is needed.

    Parameters and their names are megatron-core's (`input_layernorm`, `pre_mlp_layernorm`). The residual branch passes
    through the fused functions. Without dropout, the GEMM before a residual addition also does the addition. The
    branch's gradient is added inside the norm's backward.

    Args:
        links: the layer's links, the same that `submodules` got. The rest is megatron-core's.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        *args: Any,
        pg_collection: ProcessGroupCollection,
        links: LayerLinks,
        **kwargs: Any,
    ) -> None:
        # megatron-core passes the right arguments only to its own MLP classes.
        own = replace(submodules, mlp=IdentityOp)
        super().__init__(config, own, *args, pg_collection=pg_collection, **kwargs)
        self.mlp = build_module(submodules.mlp, config=config, tp_group=pg_collection.tp)
        assert isinstance(self.input_layernorm, Norm) and isinstance(self.pre_mlp_layernorm, Norm)
        assert isinstance(self.self_attention, FP8SelfAttention) and isinstance(self.mlp, FP8MLP)
        self.self_attention.fuse_norm(self.input_layernorm)
        self.mlp.fuse_norm(self.pre_mlp_layernorm)
        self._residual = links.residual

    def _forward_attention(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        context: Tensor | None = None,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **unused: Any,
    ) -> tuple[Tensor, Tensor | None]:
        output, bias = self.self_attention(
            hidden_states, attention_mask, rotary_pos_emb=rotary_pos_emb, packed_seq_params=packed_seq_params
        )
        return self._add(output, bias, self._residual.take(), self.self_attn_bda), context

    def _forward_mlp(self, hidden_states: Tensor, *unused: Any, **unused_kwargs: Any) -> Tensor:
        output, bias, residual = self.mlp(hidden_states)
        return self._add(output, bias, residual, self.mlp_bda)

    def _add(self, output: Tensor, bias: Tensor | None, residual: Tensor | None, bias_dropout_add: Any) -> Tensor:
        """residual + dropout(output + bias); only the output if it already includes both."""
        if residual is None:
            return output
        if bias is None and (self.hidden_dropout == 0.0 or not self.training):
            return residual + output
        fused = self.config.bias_dropout_fusion
        return bias_dropout_add(self.training, fused)((output, bias), residual, self.hidden_dropout)
