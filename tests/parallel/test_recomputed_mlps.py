"""Recomputation: what backward computes again has the bits that forward had."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fp8_megatron.config.schema import Config, ParallelConfig, PrecisionConfig
from fp8_megatron.mcore.transformer_config import transformer_config
from tests.harness.ranks import RankPool
from tests.harness.tiny_gpt import GPT3_STYLE, LLAMA_STYLE, TinyRun, random_batches, tiny_config, train_tiny_gpt

#: Sizes that blockwise casts take, on each of two ranks too.
MODELS = {
    "gpt3": replace(GPT3_STYLE, hidden_size=256, ffn_hidden_size=512, seq_length=128),
    "llama": replace(LLAMA_STYLE, hidden_size=256, ffn_hidden_size=256, num_query_groups=4, seq_length=128),
}
PRECISIONS = {
    "O3": PrecisionConfig(),
    "O1": PrecisionConfig(opt_level="O1"),
    "delayed": PrecisionConfig(fp8_recipe="delayed"),
    "blockwise": PrecisionConfig(fp8_recipe="blockwise"),
    "first_bf16": PrecisionConfig(first_last_layers_bf16=True, num_layers_at_end_in_bf16=0),
    "bf16": PrecisionConfig(precision="bf16"),
}
SHORT_MODELS = {
    "llama": LLAMA_STYLE,
    "gpt3": GPT3_STYLE,
    "dropout": replace(GPT3_STYLE, hidden_dropout=0.1, attention_dropout=0.1),
}
RECOMPUTATIONS = {
    "mlp": {"recompute_granularity": "selective", "recompute_modules": ("mlp",)},
    "core_attn": {"recompute_granularity": "selective", "recompute_modules": ("core_attn",)},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
TP2 = ParallelConfig(tensor_model_parallel_size=2)
STEPS = MICRO_BATCHES = 2
LAYOUTS = {
    "one": (1, ParallelConfig()),
    "tp2": (2, TP2),
    "tp2_sp": (2, replace(TP2, sequence_parallel=True)),
    "pp2": (2, ParallelConfig(pipeline_model_parallel_size=2)),
}


def saved_bytes_of_run(config: Config, tokens: Tensor) -> tuple[TinyRun, int]:
    """A run, and the bytes that its functions save for backward."""
    nbytes = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal nbytes
        nbytes += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return train_tiny_gpt(config, tokens), nbytes


def run(ranks: RankPool, model: str, precision: str, layout: str, *modules: str) -> tuple[TinyRun, int]:
    num_ranks, parallel = LAYOUTS[layout]
    config = tiny_config(MODELS[model], precision=PRECISIONS[precision], parallel=parallel)
    if modules:
        training = replace(config.training, recompute_granularity="selective", recompute_modules=modules)
        config = replace(config, training=training)
    return ranks.run(
        saved_bytes_of_run, config, random_batches(STEPS, MICRO_BATCHES, seq_length=128), num_ranks=num_ranks
    )[0]


@pytest.mark.parametrize(
    ("model", "precision", "layout"),
    [
        ("llama", "O3", "one"),
        ("gpt3", "delayed", "tp2_sp"),
        ("llama", "blockwise", "tp2_sp"),
        ("gpt3", "O1", "tp2"),
        pytest.param("llama", "delayed", "pp2", marks=pytest.mark.slow),
    ],
)
def test_the_bits_are_those_without(ranks: RankPool, model: str, precision: str, layout: str) -> None:
    plain, kept = run(ranks, model, precision, layout)
    again, kept_again = run(ranks, model, precision, layout, "mlp", "layernorm")
    assert again.losses == plain.losses and again.grad_norms == plain.grad_norms
    assert all(torch.equal(again.weights[name], weight) for name, weight in plain.weights.items())
    # 512 columns of 16 bits of 256 tokens, in every layer of a stage, micro-batch and step.
    layers, share = (1, 1) if layout == "pp2" else (2, LAYOUTS[layout][0])
    assert kept - kept_again == 2 * 512 * 256 * layers * STEPS * MICRO_BATCHES / share


@pytest.mark.parametrize("recomputation", RECOMPUTATIONS)
@pytest.mark.parametrize(("model", "precision"), [("llama", "bf16"), ("gpt3", "first_bf16"), ("dropout", "bf16")])
def test_16_bit_layers_recompute_the_same_bits(ranks: RankPool, model: str, precision: str, recomputation: str) -> None:
    """megatron-core's checkpoints: of an MLP with or without biases, of attention, and of whole layers."""
    config = tiny_config(SHORT_MODELS[model], precision=PRECISIONS[precision])
    training = replace(config.training, **RECOMPUTATIONS[recomputation])
    plain, again = (
        ranks.run(train_tiny_gpt, run, random_batches(STEPS, MICRO_BATCHES), num_ranks=1, timeout_seconds=30.0)[0]
        for run in (config, replace(config, training=training))
    )
    assert again.losses == plain.losses and again.grad_norms == plain.grad_norms
    assert all(torch.equal(again.weights[name], weight) for name, weight in plain.weights.items())


@pytest.mark.parametrize(
    ("precision", "modules", "theirs"),
    [
        ("bf16", ("mlp",), ["mlp"]),
        ("bf16", (), ["core_attn"]),
        ("O3", ("mlp", "layernorm"), ["mlp"]),
    ],
)
def test_what_megatron_core_recomputes(precision: str, modules: tuple[str, ...], theirs: list[str]) -> None:
    config = tiny_config(precision=PRECISIONS[precision])
    training = replace(config.training, recompute_granularity="selective", recompute_modules=modules)
    mcore = transformer_config(replace(config, training=training), torch.device("cpu"))
    assert mcore.recompute_granularity == "selective" and mcore.recompute_modules == theirs
