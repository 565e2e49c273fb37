"""--mlp-chunks-for-training: a run has the losses and gradients of the run whose MLPs are whole."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fp8_megatron.config.schema import ParallelConfig, PrecisionConfig, TrainingConfig
from tests.harness.ranks import RankPool
from tests.harness.tiny_gpt import GPT3_STYLE, LLAMA_STYLE, TinyRun, random_batches, tiny_config, train_tiny_gpt

#: Sizes that blockwise casts take; 384 positions are three chunks of 128, on two ranks each 192 = 128 + 64.
SEQ = 384
MODELS = {
    "gpt3": replace(GPT3_STYLE, hidden_size=256, ffn_hidden_size=512, seq_length=SEQ),
    "llama": replace(LLAMA_STYLE, hidden_size=256, ffn_hidden_size=256, num_query_groups=4, seq_length=SEQ),
}
PRECISIONS = {
    "O3": PrecisionConfig(),
    "O1": PrecisionConfig(opt_level="O1"),
    "delayed": PrecisionConfig(fp8_recipe="delayed", fp8_weight_grad_scaling="delayed"),
    "blockwise": PrecisionConfig(fp8_recipe="blockwise"),
    "first_bf16": PrecisionConfig(first_last_layers_bf16=True, num_layers_at_end_in_bf16=0),
    "bf16": PrecisionConfig(precision="bf16"),
}
TP2 = ParallelConfig(tensor_model_parallel_size=2)
LAYOUTS = {
    "one": (1, ParallelConfig()),
    "tp2": (2, TP2),
    "tp2_sp": (2, replace(TP2, sequence_parallel=True)),
    "dp2": (2, ParallelConfig()),
    "cp2": (2, ParallelConfig(context_parallel_size=2)),
}
MLP = {"recompute_granularity": "selective", "recompute_modules": ("mlp",)}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
OFFLOAD = {"cpu_offloading_num_layers": 1}


def run(ranks: RankPool, model: str, precision: str, layout: str, **training: object) -> TinyRun:
    num_ranks, parallel = LAYOUTS[layout]
    config = tiny_config(MODELS[model], precision=PRECISIONS[precision], parallel=parallel)
    config = replace(config, training=TrainingConfig(seed=1, **training))  # type: ignore[arg-type]
    return ranks.run(train_tiny_gpt, config, random_batches(2, 2, seq_length=SEQ), num_ranks=num_ranks)[0]


@pytest.mark.parametrize(
    ("model", "precision", "layout", "others"),
    [
        ("llama", "bf16", "one", MLP),
        ("gpt3", "delayed", "tp2_sp", FULL | OFFLOAD),
        ("llama", "blockwise", "one", FULL),
        ("gpt3", "O1", "dp2", MLP | OFFLOAD),
        pytest.param("llama", "O3", "one", MLP, marks=pytest.mark.slow),
        pytest.param("gpt3", "bf16", "tp2_sp", FULL, marks=pytest.mark.slow),
        pytest.param("gpt3", "O1", "tp2", MLP, marks=pytest.mark.slow),
        pytest.param("llama", "first_bf16", "one", MLP, marks=pytest.mark.slow),
        pytest.param("llama", "delayed", "one", FULL, marks=pytest.mark.slow),
        pytest.param("llama", "blockwise", "tp2_sp", MLP, marks=pytest.mark.slow),
        pytest.param("llama", "O3", "cp2", MLP, marks=pytest.mark.slow),
    ],
)
def test_the_run_is_that_of_whole_mlps(
    ranks: RankPool, model: str, precision: str, layout: str, others: dict[str, object]
) -> None:
    """Chunks of 128 positions.

    Rows do not see each other in an MLP. In the first step, bits are the same but under one scale a tensor, which then
    comes from the values: each chunk has its own, and a loss near ln 256 moves by FP8's noise, 2⁻⁴ of hidden states
    below 1 and averaged over 1,536 tokens. Sums of gradients have another order, or are rounded at another place: 2⁻⁸.
    """
    whole = run(ranks, model, precision, layout, **others)
    parts = run(ranks, model, precision, layout, mlp_chunks_for_training=3, **others)
    if precision in ("bf16", "blockwise"):
        assert parts.losses[0] == whole.losses[0]
        error = 2**-8
    else:
        assert parts.losses[0] == pytest.approx(whole.losses[0], abs=1e-3)
        error = 0.02
    assert parts.grad_norms[0] == pytest.approx(whole.grad_norms[0], rel=error)
    assert parts.losses[1] == pytest.approx(whole.losses[1], abs=5e-3)
    assert whole.losses[1] != whole.losses[0]
    for name, weight in whole.weights.items():
        # AdamW's first steps move an element by about its learning rate, 1e-3, in the direction of its sign. Noise
        # turns the signs of the smallest gradients: of 8%, arctan(0.08) / π = 2.5% of them a step. A key's bias has no
        # gradient but noise.
        if weight.dim() == 2:
            turned = (parts.weights[name] - weight).abs() > 1e-3
            assert turned.float().mean() < 0.08, name
