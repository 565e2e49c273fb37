"""Norms of query and key: tensor-parallel ranks share their parameters, and each has its own heads' gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fp8_megatron.config.schema import ParallelConfig, PrecisionConfig, TrainingConfig
from fp8_megatron.quantization.stats import snr_db
from tests.harness.ranks import RankPool
from tests.harness.tiny_gpt import GPT3_STYLE, LLAMA_STYLE, random_batches, tiny_config, train_tiny_gpt

STYLES = {
    "llama": replace(LLAMA_STYLE, qk_layernorm=True),
    "gpt3": replace(GPT3_STYLE, qk_layernorm=True),
}
LAYOUTS = {
    "tp2": ParallelConfig(2),
    "tp2_sp": ParallelConfig(2, sequence_parallel=True),
    "dp2": ParallelConfig(),
}
NUM_STEPS = 4


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("style", STYLES)
def test_layouts_agree(ranks: RankPool, style: str, precision: str, layout: str) -> None:
    """Ranks sum in another order, in BF16: a loss of 5.5 moves by some 10⁻³ over four steps in which it falls by one.
    In FP8 each rank's part of a weight has its own scale besides, which moves it by a few times that, the first
    gradient's norm by up to 0.3%, and later ones, behind weights that Adam moved, by up to 5% (six seeds).

    Adam goes by signs at first, and elements whose gradient is near zero may move the other way. That leaves 10 dB of
    a norm's movement at least. A rank that keeps its own heads' gradient alone agrees by half of the power: below 6 dB.
    """
    settings = {
        "model": STYLES[style],
        "precision": PrecisionConfig(precision="bf16")
        if precision == "bf16"
        else PrecisionConfig(fp8_recipe="tensorwise"),
    }
    batches = random_batches(1, 2).expand(NUM_STEPS, -1, -1, -1)
    (alone,) = ranks.run(train_tiny_gpt, tiny_config(**settings), batches, num_ranks=1)
    shared = ranks.run(train_tiny_gpt, tiny_config(parallel=LAYOUTS[layout], **settings), batches, num_ranks=2)
    assert shared[0].losses == shared[1].losses
    assert shared[0].losses == pytest.approx(alone.losses, abs=1e-2)
    assert shared[0].grad_norms[0] == pytest.approx(alone.grad_norms[0], rel=5e-3)
    assert shared[0].grad_norms == pytest.approx(alone.grad_norms, rel=2e-2 if precision == "bf16" else 6e-2)
    assert alone.losses[0] - alone.losses[-1] > 0.5
    names = [name for name in alone.weights if "q_layernorm" in name or "k_layernorm" in name]
    assert len(names) == 2 * 2 * (1 if style == "llama" else 2)
    for name in names:
        start = 1.0 if name.endswith("weight") else 0.0
        if name.endswith("k_layernorm.bias"):
            continue  # without RoPE it shifts all scores of a query alike: its gradient is rounding alone
        moved = [run.weights[name] - start for run in (shared[0], alone)]
        assert moved[1].abs().max() > 5e-4 and snr_db(*moved) > 10.0, name


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("settings", [{}, {"qk_layernorm": True}], ids=["rope", "qk_norm"])
def test_recomputation_changes_nothing(ranks: RankPool, settings: dict[str, bool], precision: str) -> None:
    """The layer's input and the table of angles are what recomputing it needs: losses are the same bit for bit.

    Full recomputation adds the two gradients of a 16-bit layer's input in another order, which moves later steps by
    some 10⁻⁴.
    """
    config = tiny_config(
        replace(LLAMA_STYLE, **settings),
        precision=PrecisionConfig(precision="bf16") if precision == "bf16" else PrecisionConfig(),
    )
    batches = random_batches(3, 2)
    (kept,) = ranks.run(train_tiny_gpt, config, batches, num_ranks=1)
    full = TrainingConfig(seed=1, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    for training in (full, TrainingConfig(seed=1, recompute_granularity="selective")):
        (again,) = ranks.run(train_tiny_gpt, replace(config, training=training), batches, num_ranks=1)
        reorders = precision == "bf16" and training is full
        assert again.losses[0] == kept.losses[0]
        assert again.losses == pytest.approx(kept.losses, rel=0.0, abs=5e-4 if reorders else 0.0)
        assert again.grad_norms == pytest.approx(kept.grad_norms, rel=1e-3 if reorders else 0.0, abs=0.0)
