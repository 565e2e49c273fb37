"""The blockwise recipe trains, under every way to share a layer, as one rank does under it.

A rank's shards are whole blocks, so that it casts the blocks that one rank casts. What a layout changes is the scale of
each rank's weights at rest and the rounding of partial sums to BF16: the noise of test_layouts.py's sharded FP8, and
its bounds. Over replicas, gradients take the wire's 28 dB.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from fp8_megatron.config.schema import Config, ParallelConfig, PrecisionConfig
from tests.harness.ranks import RankPool
from tests.harness.tiny_gpt import (
    GPT3_STYLE,
    LLAMA_STYLE,
    TinyRun,
    random_batches,
    tiny_config,
    tiny_optimizer,
    train_tiny_gpt,
)

#: Half of every dimension, and of a micro-batch's 256 tokens, is a whole number of blocks.
SEQ_LENGTH, STEPS, MICRO_BATCHES = 128, 4, 2
MODELS = {
    "gpt3": replace(GPT3_STYLE, hidden_size=256, ffn_hidden_size=512, seq_length=SEQ_LENGTH),
    "llama": replace(LLAMA_STYLE, hidden_size=256, ffn_hidden_size=256, num_query_groups=4, seq_length=SEQ_LENGTH),
}
BLOCKWISE = PrecisionConfig(fp8_recipe="blockwise")


def _train(config: Config) -> TinyRun:
    batch = random_batches(1, MICRO_BATCHES, seq_length=SEQ_LENGTH)
    return train_tiny_gpt(config, batch.expand(STEPS, -1, -1, -1))


def _run(
    ranks: RankPool,
    model: str = "gpt3",
    precision: PrecisionConfig = BLOCKWISE,
    parallel: ParallelConfig | None = None,
    num_ranks: int = 1,
) -> TinyRun:
    config = tiny_config(MODELS[model], precision=precision, parallel=parallel, optimizer=tiny_optimizer(lr=5e-4))
    first, *others = ranks.run(_train, config, num_ranks=num_ranks)
    assert all(run.losses == first.losses and run.grad_norms == first.grad_norms for run in others)
    return first


@pytest.fixture(scope="module")
def single(ranks: RankPool) -> dict[str, TinyRun]:
    return {model: _run(ranks, model) for model in MODELS}


@pytest.mark.parametrize(
    "precision",
    [
        PrecisionConfig(),
        replace(BLOCKWISE, fp8_power_of_two_scales=True),
        replace(BLOCKWISE, opt_level="O2"),
        replace(BLOCKWISE, fp8_lm_head=True, keep_fp8_transpose_cache=1),
        replace(BLOCKWISE, first_last_layers_bf16=True, num_layers_at_end_in_bf16=0),
    ],
    ids=["tensorwise", "power_of_two", "O2", "head_and_cache", "first_layer_in_bf16"],
)
def test_it_learns_as_other_precisions_do(
    ranks: RankPool, single: dict[str, TinyRun], precision: PrecisionConfig
) -> None:
    run, expected = _run(ranks, precision=precision), single["gpt3"]
    assert expected.losses[0] - expected.losses[-1] > 0.3
    assert run.losses != expected.losses
    # As much as layouts of one precision differ (test_layouts.py).
    assert run.losses == pytest.approx(expected.losses, abs=1e-2)
    assert run.grad_norms == pytest.approx(expected.grad_norms, rel=0.1)


LAYOUTS = {
    "tp2_sp": ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True),
    "tp2": ParallelConfig(tensor_model_parallel_size=2),
    "dp2": ParallelConfig(),
}
#: (model, layout) of `make test`: every layout, both models.
FAST = [("llama", "tp2_sp"), ("gpt3", "tp2"), ("gpt3", "dp2")]


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        *FAST,
        *[
            pytest.param(model, layout, marks=pytest.mark.slow)
            for model in MODELS
            for layout in LAYOUTS
            if (model, layout) not in FAST
        ],
    ],
)
def test_ranks_train_what_one_does(ranks: RankPool, single: dict[str, TinyRun], model: str, layout: str) -> None:
    run, expected = _run(ranks, model, parallel=LAYOUTS[layout], num_ranks=2), single[model]
    assert run.losses[0] == pytest.approx(expected.losses[0], abs=3e-3)
    assert run.grad_norms[0] == pytest.approx(expected.grad_norms[0], rel=1e-2)
    assert run.losses == pytest.approx(expected.losses, abs=1e-2)
    assert run.grad_norms == pytest.approx(expected.grad_norms, rel=0.1)
