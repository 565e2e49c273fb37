"""Squared ReLU, quick GEGLU and no positions: FP8 layers, BF16 layers and tensor-parallel ones compute one model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fp8_megatron.config.model import ModelConfig
from fp8_megatron.config.schema import ParallelConfig, PrecisionConfig
from fp8_megatron.kernels.activation.reference import INPUTS, activation
from fp8_megatron.mcore.transformer_config import transformer_config
from tests.harness.ranks import RankPool
from tests.harness.tiny_gpt import GPT3_STYLE, LLAMA_STYLE, TinyRun, random_batches, tiny_config, train_tiny_gpt

TP2 = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)
#: Weights so large that the MLP counts.
LARGE = {"init_method_std": 0.1, "num_layers": 2}
MODELS = {
    "squared_relu": replace(GPT3_STYLE, squared_relu=True, **LARGE),
    "quick_geglu": replace(LLAMA_STYLE, swiglu=False, quick_geglu=True, **LARGE),
    "none": replace(GPT3_STYLE, position_embedding_type="none", **LARGE),
}


def run(ranks: RankPool, model: ModelConfig, precision: str, parallel: ParallelConfig | None = None) -> TinyRun:
    config = tiny_config(model, precision=PrecisionConfig(precision=precision), parallel=parallel)  # type: ignore[arg-type]
    return ranks.run(train_tiny_gpt, config, random_batches(1, 2), num_ranks=1 if parallel is None else 2)[0]


@pytest.mark.parametrize("kind", list(MODELS))
def test_it_is_one_model(ranks: RankPool, kind: str) -> None:
    """Logits are of size 0.1 √128; FP8's noise after two layers is some 20 dB, a tenth. The mean over 128 tokens is off
    by 0.01, and three times that is allowed. Gradients' norms add their noise in squares: a few percent."""
    bf16 = run(ranks, MODELS[kind], "bf16")
    for fp8 in (run(ranks, MODELS[kind], "fp8"), run(ranks, MODELS[kind], "fp8", TP2)):
        assert fp8.losses == pytest.approx(bf16.losses, abs=0.03)
        assert fp8.grad_norms == pytest.approx(bf16.grad_norms, rel=0.03)
    has_table = any("position" in name for name in bf16.weights)
    assert has_table == (MODELS[kind].position_embedding_type == "learned_absolute")


@pytest.mark.parametrize("kind", ["gelu", "squared_relu", "swiglu", "quick_geglu"])
def test_a_bf16_layers_activation_is_the_kernels(kind: str) -> None:
    """FP32 of both; megatron-core multiplies the gated ones itself."""
    settings = {} if kind == "gelu" else {kind: True}
    model = replace(GPT3_STYLE, **settings)  # type: ignore[arg-type]
    mcore = transformer_config(tiny_config(model), torch.device("cpu"))
    z = 3 * torch.randn(64, 32 * INPUTS[kind], generator=torch.Generator().manual_seed(1))
    assert mcore.gated_linear_unit == (INPUTS[kind] == 2) == model.is_gated and model.activation == kind
    value = mcore.activation_func(z[:, :32])
    torch.testing.assert_close(value * z[:, 32:] if model.is_gated else value, activation(z, kind))
