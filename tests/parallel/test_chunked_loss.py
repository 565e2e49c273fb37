"""--loss-chunk-size: a run has the losses and gradients of the run whose logits exist at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fp8_megatron.config.schema import ParallelConfig, PrecisionConfig
from tests.harness.ranks import RankPool
from tests.harness.tiny_gpt import GPT3_STYLE, LLAMA_STYLE, TinyRun, random_batches, tiny_config, train_tiny_gpt

MODELS = {"tied": replace(GPT3_STYLE, num_layers=1), "untied": replace(LLAMA_STYLE, num_layers=1)}
PRECISIONS = {
    "O3": PrecisionConfig(fp8_recipe="tensorwise"),
    "head": PrecisionConfig(fp8_lm_head=True, fp8_recipe="tensorwise"),
    "delayed-head": PrecisionConfig(fp8_lm_head=True),
    "bf16": PrecisionConfig(precision="bf16"),
}
TP2 = ParallelConfig(tensor_model_parallel_size=2)
LAYOUTS = {
    "one": (1, ParallelConfig()),
    "tp2": (2, TP2),
    "tp2_sp": (2, replace(TP2, sequence_parallel=True)),
    "cp2": (2, ParallelConfig(context_parallel_size=2)),
}


def run(ranks: RankPool, model: str, precision: str, layout: str, chunk: int | None) -> TinyRun:
    num_ranks, parallel = LAYOUTS[layout]
    config = tiny_config(replace(MODELS[model], seq_length=96), precision=PRECISIONS[precision], parallel=parallel)
    config = replace(config, training=replace(config.training, loss_chunk_size=chunk))
    return ranks.run(train_tiny_gpt, config, random_batches(2, 2, seq_length=96), num_ranks=num_ranks)[0]


@pytest.mark.parametrize(
    ("model", "precision", "layout"),
    [
        ("untied", "O3", "one"),
        ("tied", "bf16", "tp2_sp"),
        ("untied", "head", "tp2_sp"),
        ("tied", "delayed-head", "one"),
        pytest.param("tied", "O3", "tp2", marks=pytest.mark.slow),
        pytest.param("untied", "head", "tp2", marks=pytest.mark.slow),
        pytest.param("tied", "head", "cp2", marks=pytest.mark.slow),
    ],
)
def test_the_run_is_that_of_whole_logits(ranks: RankPool, model: str, precision: str, layout: str) -> None:
    """Two chunks of 32 positions and one of what is left of 96, or of 48.

    Losses of a step differ by the rounding of logits, 2⁻⁹ of values below 1, or 2⁻⁴ in FP8 with another scale, over 384
    tokens. Gradients of the head's weight are rounded by chunk.
    """
    whole, parts = run(ranks, model, precision, layout, None), run(ranks, model, precision, layout, 32)
    error = 2e-3 if "head" in precision else 1e-4
    assert parts.losses[0] == pytest.approx(whole.losses[0], abs=error)
    assert parts.grad_norms[0] == pytest.approx(whole.grad_norms[0], rel=10 * error)
    assert parts.losses[1] == pytest.approx(whole.losses[1], abs=10 * error)
    assert whole.losses[1] != whole.losses[0]
    for name, weight in whole.weights.items():
        # AdamW's first steps move an element by about its learning rate, 1e-3, in the direction of its sign. Noise
        # turns the signs of the smallest gradients. A key's bias has no gradient but noise.
        if weight.dim() == 2:
            turned = (parts.weights[name] - weight).abs() > 1e-3
            assert turned.float().mean() < 0.05, name
