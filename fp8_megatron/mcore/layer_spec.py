"""Which module computes what in a transformer layer."""

from __future__ import annotations

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from ..quantization.recipe import Recipe
from .attention import AttentionBackend, CoreAttention
from .mlp import FP8MLP
from .norm import DeferredNorm, Norm
from .self_attention import FP8SelfAttention
from .tensor_parallel import FP8ColumnParallelLinear, FP8RowParallelLinear
from .transformer_layer import FP8TransformerLayer

#: What checkpoints call a layer's norms: as megatron-core's own specs do, by Transformer Engine's fused layers.
CHECKPOINT_KEYS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


def layer_spec(recipe: Recipe | None, attention_backend: AttentionBackend) -> ModuleSpec:
    """One transformer layer; linear layers in FP8 under `recipe`, or megatron-core's own in BF16 when it is None."""
    if recipe is None:
        layer, attention, mlp = TransformerLayer, SelfAttention, MLP
        column = ModuleSpec(module=ColumnParallelLinear)
        row = ModuleSpec(module=RowParallelLinear)
    else:
        layer, attention, mlp = FP8TransformerLayer, FP8SelfAttention, FP8MLP
        params = {"recipe": recipe}
        column = ModuleSpec(module=FP8ColumnParallelLinear, params=params)
        row = ModuleSpec(module=FP8RowParallelLinear, params=params)
    return ModuleSpec(
        module=layer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=Norm,
            self_attention=ModuleSpec(
                module=attention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=column,
                    core_attention=ModuleSpec(module=CoreAttention, params={"backend": attention_backend}),
                    linear_proj=row,
                    q_layernorm=IdentityOp,
                    k_layernorm=IdentityOp,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=Norm,
            mlp=ModuleSpec(module=mlp, submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row)),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=CHECKPOINT_KEYS,
        ),
    )


def te_block_submodules(num_layers: int) -> TransformerBlockSubmodules:
    """Transformer Engine's layers (norm fused into the linear layer, its FP8 recipes, its attention)."""
    # Imported here: importing Transformer Engine loads CUDA libraries that other precisions do not need.
    from megatron.core.extensions.transformer_engine import TENorm
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    return TransformerBlockSubmodules(
        layer_specs=[get_gpt_layer_with_transformer_engine_spec() for _ in range(num_layers)], layer_norm=TENorm
    )


def block_submodules(
    layer_recipes: list[Recipe | None], attention_backend: AttentionBackend, *, defers_final_norm: bool = False
) -> TransformerBlockSubmodules:
    """The layers of one model chunk, each with its own recipe, and the final norm.

    Args:
        defers_final_norm: the LM head computes it (see `layers.lm_head`).
    """
    return TransformerBlockSubmodules(
        layer_specs=[layer_spec(recipe, attention_backend) for recipe in layer_recipes],
        layer_norm=DeferredNorm if defers_final_norm else Norm,
    )
