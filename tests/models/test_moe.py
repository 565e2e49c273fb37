"""A decoder with experts: its table of parameters, and what follows from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from fp8_megatron.checkpoint.placement import placement_of
from fp8_megatron.config.schema import Config, ModelConfig, ParallelConfig, TrainingConfig
from fp8_megatron.models.registry import (
    architecture_of,
    has_unlike_layers,
    holds_matrices,
    is_linear_weight,
    key_of_stored,
    layers_of_key,
    num_matrices,
    stored_names,
    weight_shapes,
)
from fp8_megatron.planning.memory import parameters_by_class
from fp8_megatron.reporting.flops import linear_params_per_layer
from fp8_megatron.sharding.partition import StorageClass
from fp8_megatron.sharding.region import Region
from tests.harness.tiny_gpt import LLAMA_STYLE

LAYERS = "decoder.layers.mlp."
DENSE = replace(LLAMA_STYLE, num_layers=4)
MODEL = replace(DENSE, num_experts=8, moe_ffn_hidden_size=32, moe_router_topk=3)
MIXED = replace(MODEL, moe_layer_freq="[0,1,1,0]")
HIDDEN = DENSE.hidden_size
EXPERT = 3 * 32 * HIDDEN


def test_the_keys_of_experts_are_megatrons() -> None:
    shared = replace(
        MODEL,
        moe_shared_expert_intermediate_size=64,
        moe_shared_expert_gate=True,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
    )
    shapes = weight_shapes(shared, 256)
    assert {key.removeprefix(LAYERS): shape for key, shape in shapes.items() if key.startswith(LAYERS)} == {
        "linear_fc1.layer_norm_weight": (4, HIDDEN),
        "router.weight": (4, 8, HIDDEN),
        "router.expert_bias": (4, 8),
        "experts.linear_fc1.weight": (4, 8, 64, HIDDEN),
        "experts.linear_fc2.weight": (4, 8, HIDDEN, 32),
        "shared_experts.linear_fc1.weight": (4, 128, HIDDEN),
        "shared_experts.linear_fc2.weight": (4, HIDDEN, 64),
        "shared_experts.gate_weight": (4, 1, HIDDEN),
    }
    around = [key for key in weight_shapes(DENSE, 256) if not key.startswith(LAYERS)]
    assert [key for key in shapes if not key.startswith(LAYERS)] == around
    assert is_linear_weight(LAYERS + "experts.linear_fc1.weight") and not is_linear_weight(LAYERS + "router.weight")


def test_biases_of_experts_are_vectors_that_ranks_share() -> None:
    model = replace(MODEL, disable_bias_linear=False)
    shapes = weight_shapes(model, 256)
    assert shapes[LAYERS + "router.bias"] == (4, 8) and shapes[LAYERS + "experts.linear_fc1.bias"] == (4, 8, 64)
    assert shapes[LAYERS + "experts.linear_fc2.bias"] == (4, 8, HIDDEN)
    parallel = ParallelConfig(expert_model_parallel_size=4)
    of_rank = parameters_by_class(Config(model=model, parallel=parallel), 256, stage=0, has_matrices=True)
    assert of_rank == {StorageClass.LINEAR: 4 * 2 * EXPERT, StorageClass.MATRIX: 0, StorageClass.VECTOR: 4 * 2 * 192}
    assert linear_params_per_layer(model) == linear_params_per_layer(MODEL)


def test_a_key_is_stacked_over_the_layers_that_have_it() -> None:
    shapes = weight_shapes(MIXED, 256)
    assert shapes[LAYERS + "experts.linear_fc2.weight"] == (2, 8, HIDDEN, 32)
    assert shapes[LAYERS + "linear_fc2.weight"] == (2, HIDDEN, DENSE.padded_ffn_hidden_size)
    assert shapes["decoder.layers.self_attention.linear_proj.weight"][0] == 4
    assert layers_of_key(MIXED, LAYERS + "linear_fc2.weight") == (0, 3)
    experts = placement_of("decoder.layers.2.mlp.experts.linear_fc2.weight", Region((8, HIDDEN, 32)), MIXED)
    assert experts.key == LAYERS + "experts.linear_fc2.weight"
    assert experts.region.global_shape == (2, 8, HIDDEN, 32) and experts.region.stacked[0] == (1, 2)
    dense = placement_of("decoder.layers.3.mlp.linear_fc2.weight", Region((HIDDEN, 96)), MIXED)
    assert dense.region.stacked[0] == (1, 2)
    norm = placement_of("decoder.layers.3.pre_mlp_layernorm.weight", Region((HIDDEN,)), MIXED)
    assert norm.region.stacked[0] == (3, 4)


@pytest.mark.parametrize("model", [DENSE, MODEL, MIXED, replace(MODEL, disable_bias_linear=False)])
def test_what_names_say_is_what_the_table_says(model: ModelConfig) -> None:
    rows = architecture_of(model).parameters(model, 256)
    assert num_matrices(model) == (model.num_experts or 0) and has_unlike_layers(model) == (model is MIXED)
    for row in rows:
        assert holds_matrices(row.key) == (row.matrices is not None), row.key
        for index, layer in enumerate(row.layers_of(range(model.num_layers))):
            names = stored_names(model, row.key, index)
            stacked = [name.replace(f"layers.{layer}.", "layers.") for name in names] if model is MIXED else names
            assert {key_of_stored(name) for name in stacked} == {row.key}
            is_norm_of_experts = layer in model.expert_layers and "linear_fc1.layer_norm" in row.key
            assert len(names) == (2 if is_norm_of_experts else 1)


def test_a_layer_alone_has_the_parameters_of_that_layer() -> None:
    training = {"moe_input_jitter_eps": 0.1, "moe_expert_capacity_factor": 1.0}
    model = replace(MIXED, **training, window_size="8,0", window_attn_skip_freq="[1,1,0,0]")  # type: ignore[arg-type]
    for layer in range(model.num_layers):
        alone = architecture_of(model).single_layer(model, layer)
        rows = [row for row in architecture_of(model).parameters(model, 256) if row.layers_of([layer])]
        own = [row for row in architecture_of(alone).parameters(alone, 256) if row.layers_of([0])]
        assert [(row.key, row.shape) for row in own] == [(row.key, row.shape) for row in rows]
        assert alone.num_layers == 1 and alone.windows == [model.windows[layer]]
        assert alone.moe_input_jitter_eps is None and alone.moe_expert_capacity_factor is None


@pytest.mark.parametrize(("model", "num_expert_layers"), [(MODEL, 4), (MIXED, 2)])
def test_a_token_is_multiplied_with_its_own_experts(model: ModelConfig, num_expert_layers: int) -> None:
    mlp = 3 * DENSE.padded_ffn_hidden_size * HIDDEN
    attention = linear_params_per_layer(DENSE) - mlp
    of_layers = num_expert_layers * 3 * EXPERT + (4 - num_expert_layers) * mlp
    assert linear_params_per_layer(model) == attention + of_layers / 4
    shared = replace(model, moe_shared_expert_intermediate_size=64)
    added = 3 * 64 * HIDDEN * num_expert_layers / 4
    assert linear_params_per_layer(shared) == linear_params_per_layer(model) + added


def test_all_experts_are_stored_and_expert_parallel_ranks_share_them() -> None:
    config = Config(model=MIXED)
    whole, others = (parameters_by_class(config, 256, has_matrices=kind)[StorageClass.LINEAR] for kind in (None, False))
    assert whole - others == 2 * 8 * EXPERT
    sharing = replace(config, parallel=replace(config.parallel, expert_model_parallel_size=4))
    of_rank = parameters_by_class(sharing, 256, stage=0, has_matrices=True)
    assert of_rank == {StorageClass.LINEAR: 2 * 2 * EXPERT, StorageClass.MATRIX: 0, StorageClass.VECTOR: 0}


def test_layers_without_experts_cost_what_a_decoder_s_do() -> None:
    training = TrainingConfig(micro_batch_size=8, recompute_granularity="selective", recompute_modules=("mlp", "moe"))
    mixed, dense = (Config(model=model, training=training) for model in (MIXED, DENSE))
    own, decoder = architecture_of(MIXED), architecture_of(DENSE)
    for cost in ("kept_bytes", "forward_bytes", "backward_bytes", "recomputed_bytes"):
        assert getattr(own, cost)(mixed, 0) == getattr(decoder, cost)(dense, 0)
        assert getattr(own, cost)(mixed, 1) != getattr(decoder, cost)(dense, 1)


@pytest.mark.parametrize("cost", ["kept_bytes", "forward_bytes", "backward_bytes"])
def test_with_tokens_sent_to_their_experts_alone_memory_does_not_grow_with_ranks(cost: str) -> None:
    """Rows that fill up a rank's experts go down, and the transposes of its weights."""
    model = replace(MODEL, num_experts=64, moe_router_topk=2)

    def bytes_of(ranks: int, dispatcher: Literal["allgather", "alltoall"]) -> float:
        parallel = ParallelConfig(expert_model_parallel_size=ranks, moe_token_dispatcher_type=dispatcher)
        config = Config(model=model, parallel=parallel, training=TrainingConfig(micro_batch_size=512))
        return float(getattr(architecture_of(model), cost)(config, 0))

    sent = [bytes_of(ranks, "alltoall") for ranks in (2, 4, 8)]
    gathered = [bytes_of(ranks, "allgather") for ranks in (2, 4, 8)]
    assert sent == sorted(sent, reverse=True) and gathered == sorted(gathered)
    assert sent[2] < 0.6 * gathered[2] and bytes_of(1, "alltoall") == bytes_of(1, "allgather")


@pytest.mark.parametrize(
    ("saved", "name"),
    [
        ({"moe_router_topk": 2}, "moe_router_topk"),
        ({"moe_layer_freq": "1"}, "moe_layer_freq"),
        ({"moe_layer_freq": "[0]*1+[1]*2+[0]"}, None),
        ({"moe_router_score_function": "sigmoid"}, "moe_router_score_function"),
        ({"moe_router_topk_scaling_factor": 1.0}, None),
        ({"moe_router_topk_scaling_factor": 2.5}, "moe_router_topk_scaling_factor"),
        ({"moe_router_load_balancing_type": ("none",)}, None),
        ({"moe_router_load_balancing_type": ("sinkhorn",)}, "moe_router_load_balancing_type"),
        ({"norm_epsilon": 0.1}, "norm_epsilon"),
    ],
)
def test_settings_that_change_what_weights_compute(saved: dict[str, object], name: str | None) -> None:
    assert architecture_of(MIXED).changed_setting(saved, MIXED) == name
