"""Attention within documents and windows is the same under every layout and with recomputation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fp8_megatron.config.schema import Config, DataConfig, ParallelConfig, PrecisionConfig
from tests.harness.ranks import RankPool
from tests.harness.tiny_gpt import (
    EOD,
    LLAMA_STYLE,
    TinyRun,
    random_batches,
    tiny_config,
    tiny_optimizer,
    train_tiny_gpt,
)

TP2 = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)
PP2 = ParallelConfig(pipeline_model_parallel_size=2)
HEADS2 = ParallelConfig(context_parallel_size=2, cp_comm_type="a2a")


def tokens() -> Tensor:
    """Two steps of two micro-batches of two sequences; every fifth token or so ends a document."""
    text = random_batches(2, 2)
    return torch.where(text % 5 == 0, EOD, text)


def config(
    parallel: ParallelConfig, *, documents: bool = True, window: str | None = None, **training: object
) -> Config:
    """BF16; with a window, every other layer has none. A large first step makes the second loss differ."""
    model = replace(LLAMA_STYLE, window_size=window, window_attn_skip_freq=None if window is None else "2")
    optimizer = tiny_optimizer(lr=1e-2)
    made = tiny_config(model, parallel=parallel, precision=PrecisionConfig(precision="bf16"), optimizer=optimizer)
    data = DataConfig(reset_attention_mask=documents)
    return replace(made, data=data, training=replace(made.training, **training))  # type: ignore[arg-type]


def run(ranks: RankPool, config: Config, num_ranks: int = 1) -> TinyRun:
    return ranks.run(train_tiny_gpt, config, tokens(), num_ranks=num_ranks)[0]


def assert_same(run: TinyRun, expected: TinyRun, loss: float) -> None:
    """Gradients keep some 45 dB in BF16: their norm is off by far less than 10⁻²·²⁵. Then Adam steps by their signs."""
    assert run.losses[0] == pytest.approx(expected.losses[0], abs=loss)
    assert run.grad_norms[0] == pytest.approx(expected.grad_norms[0], rel=2e-3)
    assert run.losses[1] == pytest.approx(expected.losses[1], abs=1e-2)


@pytest.mark.parametrize("kind", [{"documents": True}, {"documents": False, "window": "3,0"}, {"window": "3,0"}])
def test_layouts_and_recomputation_change_nothing(ranks: RankPool, kind: dict) -> None:
    one, plain = run(ranks, config(ParallelConfig(), **kind)), run(ranks, config(ParallelConfig(), documents=False))
    assert abs(one.losses[1] - plain.losses[1]) > 2e-2 and abs(one.grad_norms[0] / plain.grad_norms[0] - 1) > 2e-2
    # Tensor parallelism rounds partial sums to BF16: a token's logits are off by 2⁻⁹, the mean loss by 2 · 10⁻⁴.
    assert_same(run(ranks, config(TP2, **kind), 2), one, loss=1e-3)
    assert_same(run(ranks, config(PP2, **kind), 2), one, loss=1e-5)
    # Gradients of weights are means over two ranks' tokens, and travel in BF16.
    assert_same(run(ranks, config(HEADS2, **kind), 2), one, loss=1e-5)
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    for settings in (full, {"recompute_granularity": "selective"}):
        assert_same(run(ranks, config(ParallelConfig(), **kind, **settings)), one, loss=0.0)
