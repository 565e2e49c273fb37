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
ATTENTION_NORM = LAYERS + "self_attention.linear_qkv.layer_norm_"
MLP_NORM = LAYERS + "mlp.linear_fc1.layer_norm_"

#: Tensors whose rows are the vocabulary, padded for the tensor-parallel size.
VOCABULARY_KEYS = (WORD_EMBEDDING, OUTPUT_LAYER)
POSITION_EMBEDDING = "embedding.position_embeddings.weight"
#: Matrices of which one dimension alone grows with the model's width.
EMBEDDING_KEYS = (*VOCABULARY_KEYS, POSITION_EMBEDDING)
#: What a layer with separate norms calls them, and what its keys do.
NORM_KEYS = {
    "input_layernorm.": ATTENTION_NORM.removeprefix(LAYERS),
    "pre_mlp_layernorm.": MLP_NORM.removeprefix(LAYERS),
}

_LAYER = re.compile(r"(.*\blayers\.)(\d+)\.(.*)")


def standard_key(name: str) -> str:
    """The key of a parameter whose layers are stacked; a norm may have its module's name."""
    for module, key in NORM_KEYS.items():
        if name.startswith(LAYERS + module):
            return LAYERS + key + name.removeprefix(LAYERS + module)
    return name


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
