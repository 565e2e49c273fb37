"""Layouts, precisions and recomputations that the tests of this folder combine, and a run of a tiny GPT with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fp8_megatron.config.schema import Config, ModelConfig, OptimizerConfig, ParallelConfig, PrecisionConfig
from tests.harness.ranks import RankPool
from tests.harness.tiny_gpt import TinyRun, tiny_config, train_tiny_gpt

TP2 = ParallelConfig(tensor_model_parallel_size=2)
PP2 = ParallelConfig(pipeline_model_parallel_size=2)
CP2 = ParallelConfig(context_parallel_size=2)
LAYOUTS = {
    "one": (1, ParallelConfig()),
    "dp2": (2, ParallelConfig()),
    "tp2": (2, TP2),
    "tp2_sp": (2, replace(TP2, sequence_parallel=True)),
    "pp2": (2, PP2),
    "pp2_vpp2": (2, replace(PP2, num_layers_per_virtual_pipeline_stage=1)),
    "pp2_empty": (2, replace(PP2, pipeline_model_parallel_layout="Et*2||t|tL")),
    "tp2_sp_pp2": (4, replace(PP2, tensor_model_parallel_size=2, sequence_parallel=True)),
    "cp2": (2, CP2),
    "cp2_a2a": (2, replace(CP2, cp_comm_type="a2a")),
}
DELAYED, BLOCKWISE = PrecisionConfig(fp8_recipe="delayed"), PrecisionConfig(fp8_recipe="blockwise")
BLOCK_GRADS = PrecisionConfig(fp8_lm_head=False, fp8_weight_grad_scaling="block")
PRECISIONS = {
    "O3": PrecisionConfig(),
    "O1": PrecisionConfig(opt_level="O1"),
    "tensorwise": PrecisionConfig(fp8_recipe="tensorwise"),
    "delayed": DELAYED,
    "delayed_grads": replace(DELAYED, fp8_weight_grad_scaling="delayed"),
    "blockwise": BLOCKWISE,
    "head": PrecisionConfig(fp8_lm_head=True, fp8_recipe="tensorwise"),
    "delayed_head": PrecisionConfig(fp8_lm_head=True),
    "attention": replace(BLOCK_GRADS, fp8_dot_product_attention=True),
    "16_bit_attention": BLOCK_GRADS,
    "wire": replace(DELAYED, fp8_pipeline_communication=True),
    "first_bf16": PrecisionConfig(first_last_layers_bf16=True, num_layers_at_end_in_bf16=0),
    "bf16": PrecisionConfig(precision="bf16"),
}
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "mlp": {"recompute_granularity": "selective", "recompute_modules": ("mlp",)},
    "core_attn": {"recompute_granularity": "selective", "recompute_modules": ("core_attn",)},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
}

Train = Callable[[Config, Tensor], Any]


def everyones_runs(
    ranks: RankPool,
    model: ModelConfig,
    precision: str | PrecisionConfig,
    layout: str,
    tokens: Tensor,
    *,
    parallel: ParallelConfig | None = None,
    optimizer: OptimizerConfig | None = None,
    train: Train = train_tiny_gpt,
    **training: object,
) -> list[Any]:
    """What `train` returns on each rank, a `TinyRun`; `training` are fields of the configuration's section.

    Tests that compare with one run share it (`RankPool.run_once`).
    """
    num_ranks, usual = LAYOUTS[layout]
    chosen = PRECISIONS[precision] if isinstance(precision, str) else precision
    config = tiny_config(model, parallel=parallel or usual, precision=chosen, optimizer=optimizer)
    config = replace(config, training=replace(config.training, **training))  # type: ignore[arg-type]
    return ranks.run_once(train, config, tokens, num_ranks=num_ranks)


def run(*args: Any, **kwargs: Any) -> Any:
    """The first rank's run."""
    return everyones_runs(*args, **kwargs)[0]


def assert_same_bits(run: TinyRun, expected: TinyRun) -> None:
    """Losses, norms and weights."""
    assert run.losses == expected.losses and run.grad_norms == expected.grad_norms
    assert all(torch.equal(run.weights[name], weight) for name, weight in expected.weights.items())
