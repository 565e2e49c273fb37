"""The modules of a transformer layer, and the layer itself, whose norms are fused into the layers behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from ..models.keys import NORM_KEYS
from ..nn.links import LayerLinks
from ..quantization.early_cast import EarlyCast
from ..quantization.recipe import Recipe
from .attention import AttentionBackend, CoreAttention
from .mlp import FP8MLP
from .norm import BranchingNorm, DeferredNorm, HeadNorm, Norm
from .parts import MLPPart
from .self_attention import FP8CoreAttention, FP8SelfAttention, RotarySelfAttention
from .tensor_parallel import column_spec, row_spec


class Attention(NamedTuple):
    """The form of a layer's attention.

    Attributes:
        backend: of 16-bit attention.
        has_norms: the heads of query and key have norms.
        is_fp8: it is in FP8 where the linear layers are.
        exchanges_heads: ranks that share sequences exchange them for heads around it.
        context_wire: the FP8 format in which they send keys and values instead; None: 16 bits.
    """

    backend: AttentionBackend
    has_norms: bool = False
    is_fp8: bool = False
    exchanges_heads: bool = False
    context_wire: torch.dtype | None = None


def layer_spec(recipe: Recipe | None, links: LayerLinks | None, attention: Attention, mlp: MLPPart) -> ModuleSpec:
    """One transformer layer. Linear layers are FP8 with `recipe`, or megatron-core's own in BF16 if it is None.

    Args:
        links: the layer's links; None in BF16.
        mlp: what it has behind attention.
    """
    if recipe is None or links is None:
        assert recipe is None and links is None, (recipe, links)
        return _half_layer(attention, mlp)
    return _fp8_layer(recipe, links, attention, mlp)


def _half_layer(attention: Attention, mlp: MLPPart) -> ModuleSpec:
    """A 16-bit layer."""
    links = LayerLinks()
    return ModuleSpec(
        module=HalfTransformerLayer,
        submodules=_submodules(
            ModuleSpec(
                module=RotarySelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=_attention(
                    column_spec(None, links.qkv),
                    _core_attention(attention),
                    row_spec(None, links.proj),
                    _head_norm(attention),
                ),
            ),
            mlp(None, links),
            (Norm, Norm),
        ),
    )


def _fp8_layer(recipe: Recipe, links: LayerLinks, attention: Attention, mlp: MLPPart) -> ModuleSpec:
    """A layer with FP8 linear layers."""
    core_attention = _core_attention(attention)
    if attention.is_fp8:
        core_attention = ModuleSpec(module=FP8CoreAttention, params={"recipe": recipe})
    front = None if links.front is None else links.front.early_cast
    part = mlp(recipe, links)
    norm = Norm if part.module is FP8MLP else BranchingNorm  # the MLP computes its norm itself
    return ModuleSpec(
        module=FP8TransformerLayer,
        params={"links": links},
        submodules=_submodules(
            ModuleSpec(
                module=FP8SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal, "links": links},
                # Core attention keeps its output for backward anyway, unless the projection's input is another.
                submodules=_attention(
                    column_spec(recipe, links.qkv),
                    core_attention,
                    row_spec(recipe, links.proj, keeps_input=not attention.exchanges_heads),
                    _head_norm(attention),
                ),
            ),
            part,
            (_norm_before(front), _norm_before(links.proj.early_cast, norm)),
        ),
    )


def _core_attention(attention: Attention) -> ModuleSpec:
    """Attention in 16 bits."""
    params = {"backend": attention.backend, "context_wire": attention.context_wire}
    return ModuleSpec(module=CoreAttention, params=params)


def _head_norm(attention: Attention) -> type:
    """The norm of query and key."""
    return HeadNorm if attention.has_norms else IdentityOp


def _norm_before(receiver: EarlyCast | None, norm: type[Norm] = Norm) -> ModuleSpec:
    return ModuleSpec(module=norm, params={"receiver": receiver})


def _attention(
    column: ModuleSpec, core_attention: ModuleSpec, row: ModuleSpec, head_norm: type
) -> SelfAttentionSubmodules:
    return SelfAttentionSubmodules(
        linear_qkv=column,
        core_attention=core_attention,
        linear_proj=row,
        q_layernorm=head_norm,
        k_layernorm=head_norm,
    )


def _submodules(
    attention: ModuleSpec, mlp: ModuleSpec, norms: tuple[ModuleSpec | type, ModuleSpec | type]
) -> TransformerLayerSubmodules:
    return TransformerLayerSubmodules(
        input_layernorm=norms[0],
        self_attention=attention,
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=norms[1],
        mlp=mlp,
        mlp_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map=NORM_KEYS,
    )


def te_block_submodules(num_layers: int, *, qk_layernorm: bool = False) -> TransformerBlockSubmodules:
    """Transformer Engine's layers: the norm fused into the linear layer, its FP8 recipes, its attention."""
    # Imported here: importing Transformer Engine loads CUDA libraries that other precisions do not need.
    from megatron.core.extensions.transformer_engine import TENorm
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    return TransformerBlockSubmodules(
        layer_specs=[get_gpt_layer_with_transformer_engine_spec(qk_layernorm=qk_layernorm) for _ in range(num_layers)],
        layer_norm=TENorm,
    )


def block_submodules(
    layer_recipes: Sequence[Recipe | None],
    links: Sequence[LayerLinks | None],
    attention: Attention,
    mlps: Sequence[MLPPart],
    *,
    defers_final_norm: bool = False,
) -> TransformerBlockSubmodules:
    """The layers of one model chunk, each with its own recipe and links, and the final norm.

    Args:
        attention: see `layer_spec`.
        mlps: of each layer, `layer_spec`'s ``mlp``.
        defers_final_norm: the LM head computes it (see `nn.lm_head`).
    """
    final_norm: ModuleSpec | type = Norm
    if defers_final_norm:
        last = links[-1] if links else None
        receiver = None if last is None else last.fc2.early_cast
        final_norm = ModuleSpec(module=DeferredNorm, params={"receiver": receiver})
    return TransformerBlockSubmodules(
        layer_specs=[
            layer_spec(recipe, own, attention, mlp) for recipe, own, mlp in zip(layer_recipes, links, mlps, strict=True)
        ],
        layer_norm=final_norm,
    )


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
        # megatron-core passes the right arguments only to its own MLP classes, and which these are differs by version.
        own = replace(submodules, mlp=IdentityOp)
        super().__init__(config, own, *args, pg_collection=pg_collection, **kwargs)
        self.mlp = _built_mlp(submodules.mlp, config, pg_collection, self.layer_number)
        assert isinstance(self.input_layernorm, Norm) and isinstance(self.pre_mlp_layernorm, Norm)
        assert isinstance(self.self_attention, FP8SelfAttention)
        self.self_attention.fuse_norm(self.input_layernorm)
        if isinstance(self.mlp, FP8MLP):
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
        if isinstance(self.mlp, FP8MLP):
            output, bias, residual = self.mlp(hidden_states)
        else:
            normed, residual = self.pre_mlp_layernorm(hidden_states)
            output, bias = self.mlp(normed)
        return self._add(output, bias, residual, self.mlp_bda)

    def _add(self, output: Tensor, bias: Tensor | None, residual: Tensor | None, bias_dropout_add: Any) -> Tensor:
        """residual + dropout(output + bias); only the output if it already includes both."""
        if residual is None:
            return output
        if bias is None and (self.hidden_dropout == 0.0 or not self.training):
            return residual + output
        fused = self.config.bias_dropout_fusion
        return bias_dropout_add(self.training, fused)((output, bias), residual, self.hidden_dropout)


class HalfTransformerLayer(TransformerLayer):
    """megatron-core's layer with our 16-bit MLP, or what stands in its place. Its arguments are megatron-core's."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        *args: Any,
        pg_collection: ProcessGroupCollection,
        **kwargs: Any,
    ) -> None:
        own = replace(submodules, mlp=IdentityOp)
        super().__init__(config, own, *args, pg_collection=pg_collection, **kwargs)
        self.mlp = _built_mlp(submodules.mlp, config, pg_collection, self.layer_number)
        # --recompute-modules mlp leaves what is no MLP alone.
        if not isinstance(self.mlp, MLP):
            self.recompute_mlp = False


def _built_mlp(
    spec: ModuleSpec | type, config: TransformerConfig, groups: ProcessGroupCollection, layer_number: int
) -> torch.nn.Module:
    """What follows attention in a layer."""
    mlp: torch.nn.Module = build_module(spec, config=config, pg_collection=groups, layer_number=layer_number)
    return mlp
