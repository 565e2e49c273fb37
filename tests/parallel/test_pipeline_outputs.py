"""Pipeline stages free an output once it is sent: the same bits, less memory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel import schedules
from torch import Tensor

from fp8_megatron.config.schema import Config, ParallelConfig, PrecisionConfig
from tests.harness.ranks import RankPool
from tests.harness.tiny_gpt import (
    GPT3_STYLE,
    LLAMA_STYLE,
    TinyGPT,
    TinyRun,
    random_batches,
    tiny_config,
    train_tiny_gpt,
)

PP2 = ParallelConfig(pipeline_model_parallel_size=2)
LAYOUTS = {
    "pp2": (2, PP2),
    "pp2_vpp2": (2, replace(PP2, num_layers_per_virtual_pipeline_stage=1)),
    "empty": (2, replace(PP2, pipeline_model_parallel_layout="Et*2||t|tL")),
    "tp2_sp_pp2": (4, replace(PP2, tensor_model_parallel_size=2, sequence_parallel=True)),
}
MODELS = {"gpt3": replace(GPT3_STYLE, num_layers=4), "llama": replace(LLAMA_STYLE, num_layers=4)}
PRECISIONS = {
    "O3": PrecisionConfig(),
    "wire": PrecisionConfig(fp8_pipeline_communication=True, fp8_recipe="delayed"),
    "bf16": PrecisionConfig(precision="bf16"),
}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def train(config: Config, tokens: Tensor, *, keeps: bool) -> tuple[TinyRun, list[int]]:
    """A run, and the elements that each output of a stage held when its backward began."""
    held: list[int] = []
    plain = schedules.backward_step

    def backward_step(
        input_tensor: Any, output_tensor: Any, output_tensor_grad: Any, *others: Any, **named: Any
    ) -> Any:
        output = output_tensor[0] if isinstance(output_tensor, list) else output_tensor
        if (output_tensor_grad[0] if isinstance(output_tensor_grad, list) else output_tensor_grad) is not None:
            held.append(output.untyped_storage().nbytes() // output.itemsize)
        return plain(input_tensor, output_tensor, output_tensor_grad, *others, **named)

    def keep(gpt: TinyGPT) -> None:
        for chunk in gpt.chunks:
            chunk.module.config.deallocate_pipeline_outputs = False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedules, "backward_step", backward_step)
        return train_tiny_gpt(config, tokens, before_training=keep if keeps else None), held


@pytest.mark.parametrize(
    ("model", "precision", "layout", "training"),
    [
        ("gpt3", "O3", "pp2", {}),
        ("llama", "wire", "pp2_vpp2", FULL),
        pytest.param("llama", "bf16", "empty", {}, marks=pytest.mark.slow),
        pytest.param("gpt3", "wire", "pp2", {"cpu_offloading_num_layers": 2}, marks=pytest.mark.slow),
        pytest.param("llama", "bf16", "pp2_vpp2", FULL, marks=pytest.mark.slow),
        pytest.param("llama", "O3", "tp2_sp_pp2", FULL | {"mlp_chunks_for_training": 2}, marks=pytest.mark.slow),
    ],
)
def test_what_was_sent_is_freed(
    ranks: RankPool, model: str, precision: str, layout: str, training: dict[str, object]
) -> None:
    num_ranks, parallel = LAYOUTS[layout]
    config = tiny_config(MODELS[model], parallel=parallel, precision=PRECISIONS[precision])
    config = replace(config, training=replace(config.training, **training))  # type: ignore[arg-type]
    tokens = random_batches(2, 4)
    runs = {
        keeps: ranks.run(partial(train, keeps=keeps), config, tokens, num_ranks=num_ranks) for keeps in (False, True)
    }
    for (freed, held), (kept, held_before) in zip(runs[False], runs[True], strict=True):
        assert freed.losses == kept.losses and freed.grad_norms == kept.grad_norms
        assert all(torch.equal(freed.weights[name], weight) for name, weight in kept.weights.items())
        assert set(held) <= {1} and len(held) == len(held_before) and all(size > 1 for size in held_before)
    assert any(held for _, held in runs[False])
