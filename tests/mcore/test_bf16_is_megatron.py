"""The bf16 mode against stock megatron-core: its GPTModel with its local layer spec, and AdamW written out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from torch import Tensor

from fp8_megatron.config.schema import Config, ModelConfig, PrecisionConfig
from fp8_megatron.mcore.initialization import initial_values
from fp8_megatron.mcore.runtime import runtime, seed_everything
from fp8_megatron.mcore.topology import initialized
from fp8_megatron.mcore.transformer_config import transformer_config
from fp8_megatron.quantization.stats import snr_db
from tests.harness.ranks import RankPool
from tests.harness.tiny_gpt import (
    GPT3_STYLE,
    LLAMA_STYLE,
    VOCAB_SIZE,
    TinyRun,
    random_batches,
    tiny_config,
    tiny_optimizer,
    train_tiny_gpt,
)

CPU = torch.device("cpu")
NUM_STEPS = 5


def _build_stock_model(config: Config) -> GPTModel:
    model, normalization = config.model, config.model.normalization
    return GPTModel(
        transformer_config(config, CPU),
        get_gpt_layer_local_spec(normalization=normalization),
        vocab_size=VOCAB_SIZE,
        max_sequence_length=model.seq_length,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type,
        rotary_base=model.rotary_base,
    ).bfloat16()


def _train_stock_model(config: Config, batches: Tensor) -> TinyRun:
    """The textbook loop: BF16 weights, FP32 gradients summed over micro-batches, clipping, torch's AdamW on masters."""
    with runtime(CPU), initialized(config.parallel, config.model.num_layers, CPU) as topology:
        seed_everything(config.training.seed, CPU, tensor_parallel_rank=0, pipeline_rank=0)
        model = _build_stock_model(config)
        params = dict(model.named_parameters())
        masters = {
            name: torch.nn.Parameter(value)
            for name, value in initial_values(
                params,
                std=config.model.init_method_std,
                num_layers=config.model.num_layers,
                seed=config.training.seed,
                region_of=topology.region_of,
            )
        }
        options = config.optimizer
        optimizer = torch.optim.AdamW(
            [{"params": [p], "weight_decay": options.weight_decay if p.ndim > 1 else 0.0} for p in masters.values()],
            lr=options.lr,
            betas=(options.adam_beta1, options.adam_beta2),
            eps=options.adam_eps,
        )
        seq = config.model.seq_length
        future = torch.ones(1, 1, seq, seq, dtype=torch.bool).triu(1)  # megatron-core masks where True
        losses, grad_norms = [], []
        for micro_batches in batches:
            with torch.no_grad():
                for name, param in params.items():
                    param.copy_(masters[name])
            for master in masters.values():
                master.grad = torch.zeros_like(master)
            total = 0.0
            for tokens in micro_batches:
                inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
                positions = torch.arange(seq).expand_as(inputs)
                loss = model(inputs, positions, future, labels=labels).float().mean() / len(micro_batches)
                loss.backward()
                total += loss.item()
                for name, param in params.items():
                    assert param.grad is not None and masters[name].grad is not None
                    masters[name].grad += param.grad  # type: ignore[operator]
                    param.grad = None
            losses.append(total)
            grad_norms.append(torch.nn.utils.clip_grad_norm_(masters.values(), options.clip_grad).item())
            optimizer.step()
        return TinyRun(losses, grad_norms, {name: master.detach() for name, master in masters.items()})


@pytest.mark.parametrize(
    ("style", "backend"),
    [
        *((style, backend) for style in (GPT3_STYLE, LLAMA_STYLE) for backend in ("auto", "math")),
        (replace(LLAMA_STYLE, activation_func_clamp_value=0.3), "auto"),
    ],
    ids=["gpt3", "gpt3-math", "llama", "llama-math", "clamped"],
)
def test_follows_stock_megatron_step_for_step(
    ranks: RankPool, style: ModelConfig, backend: Literal["auto", "math"]
) -> None:
    """Attention and norms round elsewhere than stock megatron-core's; the rest is the same arithmetic.

    Logits of about 0.5 in BF16 are off by 0.5 · 2⁻⁹ = 10⁻³ each, and a token's loss by about as much; the mean over 128
    tokens, whose errors are related, by 2 · 10⁻⁴. Steps at slightly different weights add up to a few times that. The
    loss itself falls by more than 0.8.
    """
    config = tiny_config(
        replace(style, attention_backend=backend),
        precision=PrecisionConfig(precision="bf16"),
        optimizer=tiny_optimizer(lr=5e-4, weight_decay=0.1, clip_grad=1.0),
    )
    batches = random_batches(1, 2).expand(NUM_STEPS, -1, -1, -1)  # one batch, so that the loss falls
    (ours,) = ranks.run(train_tiny_gpt, config, batches, num_ranks=1)
    (stock,) = ranks.run(_train_stock_model, config, batches, num_ranks=1)
    assert stock.losses[0] - stock.losses[-1] > 0.8
    assert ours.losses[0] == pytest.approx(stock.losses[0], abs=5e-4)
    assert ours.losses == pytest.approx(stock.losses, abs=1.5e-3)
    assert min(stock.grad_norms) > 1.0  # clipped at every step
    assert ours.grad_norms == pytest.approx(stock.grad_norms, rel=2**-8)

    (start,) = ranks.run(train_tiny_gpt, config, batches[:0], num_ranks=1)
    assert list(ours.weights) == sorted(stock.weights)
    for name, initial in start.weights.items():
        if name.endswith("linear_qkv.bias"):
            continue  # a key's bias does not change a softmax: its gradient is rounding alone, and Adam makes it a step
        moved, expected = ours.weights[name] - initial, stock.weights[name] - initial
        # Adam's first steps go by a gradient's sign, so elements whose gradient is within its rounding error move the
        # other way: about one in a thousand of a matrix; the sums in a vector's gradient cancel more.
        assert snr_db(moved, expected) > (25.0 if initial.ndim == 2 else 15.0), name
