"""Keys of checkpoints that all architectures share: megatron-core's names with Transformer Engine's fused layers.

Layers are stacked along a new first axis: ``decoder.layers.mlp.linear_fc2.weight`` is one tensor [layers, hidden, ffn].
A norm in front of a linear layer carries that layer's name, whichever module holds it. One checkpoint thus serves specs
with fused and with separate norms.
"""

from __future__ import annotations

import re

LAYERS = "decoder.layers."
WORD_EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"
EXPERTS = LAYERS + "mlp.experts."
ATTENTION_NORM = LAYERS + "self_attention.linear_qkv.layer_norm_"
MLP_NORM = LAYERS + "mlp.linear_fc1.layer_norm_"

#: Tensors whose rows are the vocabulary, padded for the tensor-parallel size.
VOCABULARY_KEYS = (WORD_EMBEDDING, OUTPUT_LAYER)
POSITION_EMBEDDING = "embedding.position_embeddings.weight"
#: Matrices of which one dimension alone grows with the model's width.
EMBEDDING_KEYS = (*VOCABULARY_KEYS, POSITION_EMBEDDING)
#: What every kind of megatron-core's experts saves them under: all of a layer in one tensor [experts, outputs, inputs].
_MEGATRONS_EXPERTS = EXPERTS + "experts."
#: What a layer with separate norms calls them, and what its keys do.
NORM_KEYS = {
    "input_layernorm.": ATTENTION_NORM.removeprefix(LAYERS),
    "pre_mlp_layernorm.": MLP_NORM.removeprefix(LAYERS),
}

_LAYER = re.compile(r"(.*\blayers\.)(\d+)\.(.*)")


def holds_experts(key: str) -> bool:
    """Whether the key's tensor in one layer has an axis of experts, its first."""
    return key.startswith(EXPERTS)


def standard_key(name: str) -> str:
    """The key of a parameter whose layers are stacked; a norm may have its module's name, experts megatron-core's."""
    if name.startswith(_MEGATRONS_EXPERTS):
        return EXPERTS + name.removeprefix(_MEGATRONS_EXPERTS)
    for module, key in NORM_KEYS.items():
        if name.startswith(LAYERS + module):
            return LAYERS + key + name.removeprefix(LAYERS + module)
    return name


def megatrons_keys(key: str, layer: int | None, *, has_experts: bool) -> list[str]:
    """What megatron-core's own layers save a weight of theirs under, beside experts or not (`has_experts`).

    The norm in front of experts has two names: of specs with Transformer Engine, where no other layer holds it, and of
    those without.

    Args:
        layer: if layers are saved one by one, as megatron-core does if they differ; None: they are stacked.
    """
    keys = [_MEGATRONS_EXPERTS + key.removeprefix(EXPERTS) if holds_experts(key) else key]
    if has_experts and key.startswith(MLP_NORM):
        keys.append(name_in_model(key, None))
    return keys if layer is None else [each.replace(LAYERS, f"{LAYERS}{layer}.", 1) for each in keys]


def key_and_layer(name: str) -> tuple[str, int | None]:
    """(key, layer) of a parameter of a model; the layer is None outside of layers."""
    match = _LAYER.fullmatch(name)
    return (standard_key(match[1] + match[3]), int(match[2])) if match else (name, None)


def name_in_model(key: str, layer: int | None) -> str:
    """The name of a parameter in a model of this project: separate norms, numbered layers."""
    for module, norm in NORM_KEYS.items():
        if key.startswith(LAYERS + norm):
            key = LAYERS + module + key.removeprefix(LAYERS + norm)
    return key if layer is None else key.replace(LAYERS, f"{LAYERS}{layer}.", 1)
