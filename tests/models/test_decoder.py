"""The table of parameters of a decoder, also with experts, is what the built model has."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fp8_megatron.config.schema import ModelConfig
from fp8_megatron.mcore.initialization import named_parameters_of_model
from fp8_megatron.mcore.runtime import runtime
from fp8_megatron.mcore.topology import initialized
from fp8_megatron.models.architecture import Parameter
from fp8_megatron.models.keys import key_and_layer
from fp8_megatron.models.registry import architecture_of
from fp8_megatron.training.build import build_training_state
from tests.harness.tiny_gpt import GPT3_STYLE, LLAMA_STYLE, VOCAB_SIZE, tiny_config

CPU = torch.device("cpu")
MODELS = {
    "gpt3": GPT3_STYLE,
    "llama": LLAMA_STYLE,
    "qkv biases, norms of heads, tied": replace(
        LLAMA_STYLE, add_qkv_bias=True, qk_layernorm=True, untie_embeddings_and_output_weights=False
    ),
    "experts in one of two layers, one of them shared": replace(
        LLAMA_STYLE,
        num_layers=2,
        num_experts=4,
        moe_layer_freq="[0,1]",
        moe_ffn_hidden_size=64,
        moe_shared_expert_intermediate_size=64,
        moe_shared_expert_gate=True,
    ),
    "biases of experts": replace(
        GPT3_STYLE, num_experts=4, moe_ffn_hidden_size=64, moe_layer_freq="[0,1]", quick_geglu=True
    ),
    "sinks": replace(LLAMA_STYLE, softmax_type="learnable"),
    "wide heads, untied": replace(GPT3_STYLE, kv_channels=64, untie_embeddings_and_output_weights=True),
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_the_table_is_the_built_model(model: ModelConfig) -> None:
    """Every parameter of the first layer and outside the layers: shape, and axis and pieces of the cut."""
    config = tiny_config(model)
    with runtime(CPU), initialized(config.parallel, model.num_layers, CPU) as topology:
        built: dict[str, tuple[object, ...]] = {}
        (chunk,) = build_training_state(config, VOCAB_SIZE, topology, CPU).model
        for name, param in named_parameters_of_model(chunk.module).items():
            key, layer = key_and_layer(name)
            is_cut = getattr(param, "tensor_model_parallel", False)
            cut = (param.partition_dim, param.partition_stride) if is_cut else (None, 1)
            assert built.setdefault(key, (tuple(param.shape), *cut, layer is not None))[:1] == (tuple(param.shape),)
    rows = architecture_of(model).parameters(model, VOCAB_SIZE)
    assert {row.key: _of_built(row) for row in rows} == built


def _of_built(row: Parameter) -> tuple[object, ...]:
    pieces = 1 if row.axis is None else row.pieces
    return row.shape, row.axis, pieces, row.whole_shape(3) != row.shape
