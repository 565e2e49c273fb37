"""Squared ReLU, quick GEGLU and no positions: FP8 layers, BF16 layers and tensor-parallel ones compute one model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from megatron.core.fusions.fused_bias_gelu import bias_gelu

from fp8_megatron.config.io import parse_command_line
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
    "gelu_erf": replace(GPT3_STYLE, bias_gelu_fusion=False, **LARGE),
    "gelu_erf without biases": replace(GPT3_STYLE, disable_bias_linear=True, **LARGE),
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


@pytest.mark.parametrize("kind", list(INPUTS))
def test_a_bf16_layers_activation_is_the_kernels(kind: str) -> None:
    """FP32 of both; megatron-core multiplies the gated ones itself."""
    settings = {"gelu": {}, "gelu_erf": {"bias_gelu_fusion": False}}.get(kind, {kind: True})
    model = replace(GPT3_STYLE, **settings)  # type: ignore[arg-type]
    mcore = transformer_config(tiny_config(model), torch.device("cpu"))
    z = 3 * torch.randn(64, 32 * INPUTS[kind], generator=torch.Generator().manual_seed(1))
    assert mcore.gated_linear_unit == (INPUTS[kind] == 2) == model.is_gated and model.activation == kind
    value = mcore.activation_func(z[:, :32])
    torch.testing.assert_close(value * z[:, 32:] if model.is_gated else value, activation(z, kind))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", "gelu"),
        ("--openai-gelu", "gelu"),
        ("--no-bias-gelu-fusion", "gelu_erf"),
        ("--openai-gelu --no-bias-gelu-fusion", "gelu_erf"),
        ("--disable-bias-linear", "gelu_erf"),
        ("--disable-bias-linear --add-qkv-bias", "gelu_erf"),
        ("--no-bias-gelu-fusion --use-te-activation-func", "gelu"),
        ("--disable-bias-linear --use-transformer-engine-op-fuser", "gelu"),
        ("--no-bias-swiglu-fusion", "gelu"),
        ("--swiglu --no-bias-gelu-fusion --disable-bias-linear", "swiglu"),
        ("--squared-relu --no-bias-gelu-fusion", "squared_relu"),
        ("--quick-geglu --no-bias-gelu-fusion", "quick_geglu"),
    ],
)
def test_what_flags_mean_in_megatron(flags: str, expected: str) -> None:
    """Megatron's `validate_args` turns the fusion off without biases, and its kernel computes the tanh form alone.

    Transformer Engine's own GELU is the tanh form.
    """
    line = parse_command_line(["--bf16", *flags.split()])
    assert line.config.model.activation == expected
    is_idle = any("no effect here" in note and "--no-bias-gelu-fusion" in note for note in line.notes)
    assert is_idle == ("gelu_erf" != expected != "gelu"), line.notes


def test_megatrons_function_on_a_gpu_computes_the_form() -> None:
    """megatron-core's fused kernel where the settings ask for it, else the function that they name."""
    z = 3 * torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    for model in (GPT3_STYLE, *(MODELS[name] for name in MODELS if name.startswith("gelu_erf"))):
        mcore = transformer_config(tiny_config(model), torch.device("meta"))
        fused = mcore.bias_activation_fusion
        assert fused == (model.activation == "gelu")
        value = bias_gelu(torch.zeros(32), z) if fused else mcore.activation_func(z)
        torch.testing.assert_close(value, activation(z, model.activation), atol=2e-6, rtol=0)
