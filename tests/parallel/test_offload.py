"""--cpu-offloading-num-layers: training has the bits that it has without, in every layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fp8_megatron.config.schema import Config, ParallelConfig, PrecisionConfig
from fp8_megatron.nn import offload
from tests.harness.ranks import RankPool
from tests.harness.tiny_gpt import GPT3_STYLE, LLAMA_STYLE, TinyRun, random_batches, tiny_config, train_tiny_gpt

MODELS = {
    "gpt3": replace(GPT3_STYLE, num_layers=4),
    "llama": replace(LLAMA_STYLE, num_layers=4),
    "wide_heads": replace(LLAMA_STYLE, num_layers=4, kv_channels=128),
}
PRECISIONS = {
    "O3": PrecisionConfig(),
    "delayed": PrecisionConfig(fp8_recipe="delayed"),
    "fp8_attention": PrecisionConfig(fp8_recipe="delayed", fp8_dot_product_attention=True),
    "bf16": PrecisionConfig(precision="bf16"),
}
TP2 = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)
PP2 = ParallelConfig(pipeline_model_parallel_size=2)
LAYOUTS = {
    "one": (1, ParallelConfig()),
    "tp2_sp": (2, TP2),
    "cp2": (2, ParallelConfig(context_parallel_size=2)),
    "pp2": (2, PP2),
    "interleaved": (2, replace(PP2, num_layers_per_virtual_pipeline_stage=1)),
}
RECOMPUTATIONS = {
    "none": {},
    "mlp": {"recompute_granularity": "selective", "recompute_modules": ("mlp",)},
    "core_attn": {"recompute_granularity": "selective", "recompute_modules": ("core_attn",)},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
}
STEPS = MICRO_BATCHES = 2


def run_and_count(config: Config, tokens: Tensor) -> tuple[TinyRun, int]:
    """A run, and the bytes that it copied to the host."""
    nbytes = 0
    copies = offload._Layer.copies_to_host

    def counting(layer: offload._Layer) -> Callable[[], None]:
        nonlocal nbytes
        nbytes += sum(stored.num_bytes for stored in layer.alive())
        return copies(layer)

    smallest = offload.MIN_BYTES
    offload._Layer.copies_to_host, offload.MIN_BYTES = counting, 2**12  # type: ignore[method-assign]
    try:
        return train_tiny_gpt(config, tokens), nbytes
    finally:
        offload._Layer.copies_to_host, offload.MIN_BYTES = copies, smallest  # type: ignore[method-assign]


def run(
    ranks: RankPool, model: str, precision: str, layout: str, recomputation: str, num_layers: int
) -> tuple[TinyRun, int]:
    num_ranks, parallel = LAYOUTS[layout]
    config = tiny_config(MODELS[model], precision=PRECISIONS[precision], parallel=parallel)
    training = replace(config.training, cpu_offloading_num_layers=num_layers, **RECOMPUTATIONS[recomputation])
    config = replace(config, training=training)
    return ranks.run(run_and_count, config, random_batches(STEPS, MICRO_BATCHES), num_ranks=num_ranks)[0]


@pytest.mark.parametrize(
    ("model", "precision", "layout", "recomputation", "num_layers"),
    [
        ("llama", "O3", "one", "none", 3),
        ("gpt3", "delayed", "one", "full", 3),
        ("llama", "O3", "one", "mlp", 4),
        ("wide_heads", "fp8_attention", "one", "none", 3),
        ("gpt3", "bf16", "one", "none", 2),
        ("gpt3", "delayed", "tp2_sp", "none", 3),
        pytest.param("llama", "O3", "cp2", "none", 3, marks=pytest.mark.slow),
        pytest.param("llama", "bf16", "one", "core_attn", 3, marks=pytest.mark.slow),
        pytest.param("llama", "O3", "one", "block", 3, marks=pytest.mark.slow),
        pytest.param("llama", "O3", "pp2", "none", 1, marks=pytest.mark.slow),
        pytest.param("gpt3", "O3", "pp2", "full", 2, marks=pytest.mark.slow),
        ("gpt3", "delayed", "interleaved", "none", 1),
    ],
)
def test_the_bits_are_those_without(
    ranks: RankPool, model: str, precision: str, layout: str, recomputation: str, num_layers: int
) -> None:
    plain, nothing = run(ranks, model, precision, layout, recomputation, 0)
    moved, nbytes = run(ranks, model, precision, layout, recomputation, num_layers)
    assert moved.losses == plain.losses and moved.grad_norms == plain.grad_norms
    assert all(torch.equal(moved.weights[name], weight) for name, weight in plain.weights.items())
    # At least the input of each layer, of 2 sequences of 32 tokens in BF16.
    chunks = 2 if layout == "interleaved" else 1
    ranks_a_token = LAYOUTS[layout][0] if layout in ("tp2_sp", "cp2") else 1
    inputs = 2 * 128 * 2 * 32 * chunks * num_layers * STEPS * MICRO_BATCHES / ranks_a_token
    assert nothing == 0 and nbytes >= inputs
    if recomputation == "full" and num_layers < 4 and layout == "one":
        assert nbytes == inputs
