"""configs/recipes against the papers and scripts that they name: tokens, rates and schedules."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from fp8_megatron.config.checks import check_config
from fp8_megatron.config.io import parse_config
from fp8_megatron.config.schema import Config

CONFIGS = Path(__file__).parents[2] / "configs"


@dataclass(frozen=True)
class Published:
    """What a source says of a run. Batches are powers of two near the tokens that papers round.

    Attributes:
        lr: peak learning rate, and the part of it that is left at the end.
        batch: tokens in one batch.
        tokens: of the run.
        warmup, decay: tokens up to the peak and to the end of the schedule.
        init: standard deviation of the first weights.
    """

    lr: float
    end: float
    batch: float
    tokens: float
    warmup: float
    decay: float
    style: str = "cosine"
    init: float = 0.02
    epsilon: float = 1e-8


PUBLISHED = {
    # arXiv 2005.14165, table 2.1 and appendix B
    "gpt_345m": Published(3e-4, 0.1, 0.5e6, 300e9, 375e6, 260e9),
    "gpt_1.3b": Published(2e-4, 0.1, 1e6, 300e9, 375e6, 260e9),
    "gpt_175b": Published(0.6e-4, 0.1, 3.2e6, 300e9, 375e6, 260e9, init=0.006),
    # MS-AMP-Examples, gpt3/pretrain_*_megatron.sh: sequences of 2,048 tokens
    "gpt_7b": Published(3e-4, 0.1, 2048 * 2048, 48828125 * 2048, 2048000 * 2048, 43945312 * 2048, init=0.0099),
    "gpt_13b": Published(2e-4, 0.1, 1280 * 2048, 146484375 * 2048, 4096000 * 2048, 131835938 * 2048, init=0.0099),
    # arXiv 2205.01068, table 1 and section 2.2
    "gpt_30b": Published(1e-4, 0.1, 4e6, 300e9, 375e6, 300e9, "linear", init=0.006),
    # arXiv 2307.09288, section 2.2: 2,000 steps
    "llama_7b": Published(3e-4, 0.1, 4e6, 2e12, 2000 * 2**22, 2e12, epsilon=1e-5),
    # arXiv 2407.21783, table 3; 8,000 steps
    "llama_8b": Published(3e-4, 0.01, 4e6, 15e12, 8000 * 2**22, 15e12, init=0.0134, epsilon=1e-5),
    "llama_70b": Published(1.5e-4, 0.01, 4e6, 15e12, 8000 * 2**22, 15e12, init=0.007, epsilon=1e-5),
    # Megatron-LM's examples/mixtral: steps of 256 sequences of 4,096 tokens
    "mixtral_8x7b": Published(1e-4, 0.1, 2**20, 500_000 * 2**20, 500 * 2**20, 320_000 * 2**20, init=0.01),
    # arXiv 2505.09388, section 3.1: tokens alone
    "qwen3_30b_a3b": Published(3e-4, 0.1, 4e6, 36e12, 2000 * 2**22, 36e12),
}


def recipe(name: str, *flags: str) -> Config:
    files = [str(CONFIGS / folder / f"{name}.yaml") for folder in ("", "recipes")]
    return parse_config(["--config", *files, "--mock-data", *flags])


def test_every_recipe_is_compared() -> None:
    assert {path.stem for path in (CONFIGS / "recipes").glob("*.yaml")} == PUBLISHED.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_is_what_its_source_says(name: str) -> None:
    """Numbers of steps are rounded, by half a batch at most. "4M" tokens may be 4 · 2^20, 5% more."""
    config, theirs = recipe(name), PUBLISHED[name]
    optimizer, training = config.optimizer, config.training
    assert (optimizer.lr, optimizer.lr_decay_style) == (theirs.lr, theirs.style)
    assert optimizer.min_lr == pytest.approx(theirs.lr * theirs.end)
    assert (optimizer.adam_beta1, optimizer.adam_beta2, optimizer.weight_decay) == (0.9, 0.95, 0.1)
    assert (optimizer.adam_eps, optimizer.clip_grad) == (theirs.epsilon, 1.0)
    assert config.model.init_method_std == theirs.init
    batch = config.global_batch_size(1) * config.model.seq_length
    assert batch == pytest.approx(theirs.batch, rel=0.05)
    count = config.samples_per_count(1) * config.model.seq_length  # tokens
    warmup, decay = optimizer.warmup_counts(config.counts_samples), optimizer.decay_counts(config.train_counts)
    assert warmup * count == pytest.approx(theirs.warmup, abs=batch)
    assert decay * count == pytest.approx(theirs.decay, abs=batch)
    assert config.train_counts * count == pytest.approx(theirs.tokens, abs=batch)
    assert config.counts_samples == bool(training.rampup_batch_size)  # steps of a growing batch are no measure


@pytest.mark.parametrize("name", ["gpt_345m", "gpt_1.3b"])
def test_the_growing_batch_that_a_recipe_names(name: str) -> None:
    """GPT-3's: from 32,768 tokens to all within 4 to 12 billion; on eight GPUs, and 300 billion tokens in all."""
    text = (CONFIGS / "recipes" / f"{name}.yaml").read_text()
    flags = " ".join(re.findall(r"^#   (--.*)$", text, re.MULTILINE))
    config = recipe(name, *flags.split())
    check_config(config, 8, on_this_machine=False)
    start, _, samples = map(int, config.training.rampup_batch_size)
    assert start * config.model.seq_length == 32768
    assert 4e9 <= samples * config.model.seq_length <= 12e9
    constant, batch = recipe(name), config.global_batch_size(8)
    assert config.train_counts * config.model.seq_length == pytest.approx(300e9, abs=batch * config.model.seq_length)
    of_steps = (constant.optimizer.lr_warmup_iters, constant.optimizer.lr_decay_iters)
    assert (config.optimizer.lr_warmup_samples, config.optimizer.lr_decay_samples) == tuple(
        steps * batch for steps in of_steps if steps is not None
    )
