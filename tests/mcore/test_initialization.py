"""One seed gives one model, however it is laid over ranks."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from fp8_megatron.config.schema import ModelConfig, ParallelConfig, PrecisionConfig
from fp8_megatron.mcore.initialization import initial_values
from fp8_megatron.mcore.topology import region_of
from tests.harness.ranks import RankPool
from tests.harness.tiny_gpt import GPT3_STYLE, LLAMA_STYLE, TinyRun, tiny_config, train_tiny_gpt

LAYOUTS = {
    "tp2": (2, ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)),
    "pp2": (2, ParallelConfig(pipeline_model_parallel_size=2)),
    "pp2_two_virtual_stages": (
        2,
        ParallelConfig(pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=1),
    ),
    "dp2": (2, ParallelConfig()),
    "tp2_pp2": (
        4,
        ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, sequence_parallel=True),
    ),
}
STYLES = {"gpt3": GPT3_STYLE, "llama": LLAMA_STYLE}
NO_STEPS = torch.empty(0, 4, 2, 33, dtype=torch.long)


def four_layers(style: str) -> ModelConfig:
    return ModelConfig(**{**vars(STYLES[style]), "num_layers": 4})


def initial(
    ranks: RankPool, world: int, parallel: ParallelConfig, style: str, precision: str, seed: int = 1
) -> TinyRun:
    config = tiny_config(
        four_layers(style),
        parallel=parallel,
        precision=PrecisionConfig(precision=precision),  # type: ignore[arg-type]
        seed=seed,
    )
    return ranks.run(train_tiny_gpt, config, NO_STEPS, num_ranks=world)[0]


@pytest.fixture(scope="module")
def single(ranks: RankPool) -> dict[tuple[str, str], TinyRun]:
    """One rank's run of each style and precision."""
    return {
        (style, precision): initial(ranks, 1, ParallelConfig(), style, precision)
        for style in STYLES
        for precision in ("bf16", "fp8")
    }


@pytest.mark.parametrize(("style", "precision"), [("gpt3", "bf16"), ("llama", "fp8")])
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_weights_do_not_depend_on_the_layout(
    ranks: RankPool, single: dict[tuple[str, str], TinyRun], layout: str, style: str, precision: str
) -> None:
    """Bitwise: in FP32 masters, and in FP16 masters, whose power-of-two scales may differ but round alike."""
    world, parallel = LAYOUTS[layout]
    other = initial(ranks, world, parallel, style, precision).weights
    expected = single[style, precision].weights
    assert list(other) == list(expected)
    for name, value in expected.items():
        assert torch.equal(other[name], value), name


def test_masters_hold_the_same_values_at_every_precision(single: dict[tuple[str, str], TinyRun]) -> None:
    for style in STYLES:
        for name, value in single[style, "bf16"].weights.items():
            # FP16 with a scale per block: half of 2⁻¹⁰, for numbers not 2⁻²⁸ below the block's largest.
            torch.testing.assert_close(single[style, "fp8"].weights[name], value, rtol=2**-11, atol=1e-9)


def test_names_sizes_and_spreads(single: dict[tuple[str, str], TinyRun]) -> None:
    model = four_layers("llama")
    weights = single["llama", "bf16"].weights
    heads, groups, dim = model.num_attention_heads, model.query_groups, model.head_dim
    assert groups == 2 and heads == 4
    expected = {
        "embedding.word_embeddings.weight": (256, 128),
        "decoder.final_layernorm.weight": (128,),
        "output_layer.weight": (256, 128),
    }
    for layer in range(4):
        expected |= {
            f"decoder.layers.{layer}.input_layernorm.weight": (128,),
            f"decoder.layers.{layer}.self_attention.linear_qkv.weight": ((heads + 2 * groups) * dim, 128),
            f"decoder.layers.{layer}.self_attention.linear_proj.weight": (128, heads * dim),
            f"decoder.layers.{layer}.pre_mlp_layernorm.weight": (128,),
            f"decoder.layers.{layer}.mlp.linear_fc1.weight": (2 * 256, 128),
            f"decoder.layers.{layer}.mlp.linear_fc2.weight": (128, 256),
        }
    assert {name: tuple(value.shape) for name, value in weights.items()} == expected
    for name, value in weights.items():
        if value.ndim == 1:
            assert torch.equal(value, torch.ones_like(value))
            continue
        std = 0.02 / math.sqrt(2 * 4) if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else 0.02
        # The standard deviation of n normal values spreads by 1/√(2n): four of these.
        assert value.std().item() == pytest.approx(std, rel=4 / math.sqrt(2 * value.numel()))
    matrices = [value.flatten()[:4096] for value in weights.values() if value.ndim == 2]
    correlations = torch.corrcoef(torch.stack(matrices)).fill_diagonal_(0.0)
    assert correlations.abs().max() < 6 / math.sqrt(4096)  # no two parameters share their numbers


def test_the_seed_matters(ranks: RankPool, single: dict[tuple[str, str], TinyRun]) -> None:
    other = initial(ranks, 1, ParallelConfig(), "gpt3", "bf16", seed=2).weights
    for name, value in single["gpt3", "bf16"].weights.items():
        assert value.ndim == 1 or not torch.equal(value, other[name])


def test_an_expert_has_the_same_weights_on_any_rank() -> None:
    name = "decoder.layers.1.mlp.experts.linear_fc1.weight"

    def drawn(expert_rank: int, expert_ranks: int, rank: int = 0, size: int = 1) -> Tensor:
        param = torch.nn.Parameter(torch.empty(8 // expert_ranks, 32 // size, 48))
        param.tensor_model_parallel, param.partition_dim, param.partition_stride = True, 1, 2  # type: ignore[attr-defined]
        where = partial(region_of, rank=rank, size=size, matrices=(expert_rank, expert_ranks))
        ((_, value),) = initial_values({name: param}, std=0.02, num_layers=2, seed=1, region_of=where)
        return value

    whole = drawn(0, 1)
    assert whole.std().item() == pytest.approx(0.02, rel=4 / math.sqrt(2 * whole.numel()))
    assert len(whole.unique()) > 0.9 * whole.numel()
    assert torch.equal(torch.cat([drawn(rank, 4) for rank in range(4)]), whole)
    halves = [torch.cat([drawn(rank, 2, half, 2) for rank in range(2)]).chunk(2, dim=1) for half in range(2)]
    assert torch.equal(torch.cat([halves[half][piece] for piece in range(2) for half in range(2)], dim=1), whole)
