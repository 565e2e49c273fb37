"""A padded vocabulary: one seed is one loss under any tensor-parallel size."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy as megatron_cross_entropy
from torch import Tensor

from fp8_megatron.config.io import parse_config
from fp8_megatron.config.schema import ParallelConfig
from fp8_megatron.mcore.runtime import runtime
from fp8_megatron.mcore.topology import initialized
from fp8_megatron.nn.cross_entropy import fill_padding, vocab_parallel_cross_entropy
from fp8_megatron.reporting.metrics_file import METRICS_FILE, read_rows
from fp8_megatron.training.trainer import Trainer
from tests.harness.ranks import RankPool
from tests.harness.runs import tiny_flags

CPU = torch.device("cpu")


def _first_loss(output_dir: Path, overrides: dict) -> float:
    Trainer(parse_config(tiny_flags(output_dir, train_iters=1, **overrides))).fit()
    (record,) = [record for record in read_rows(output_dir / METRICS_FILE) if record["kind"] == "train"]
    return record["loss"]


@pytest.mark.parametrize(
    ("vocab_size", "multiple", "head"),
    [(41, 16, "bf16"), (41, 16, "fp8"), (50257, 128, "bf16")],
    ids=["a_rank_of_padding_alone", "fp8", "gpt2"],
)
def test_one_seed_is_one_loss(ranks: RankPool, tmp_path: Path, vocab_size: int, multiple: int, head: str) -> None:
    """TP 1, 2 and 4 pad 41 tokens to 48, 64 and 64 rows, and 50,257 to 50,304, 50,432 and 50,688. With padding in the
    softmax the losses would differ by log(64 / 48) = 0.29 and by log(50688 / 50304) = 0.0076.

    Ranks round their summands to BF16. In FP8 they cast their part of each weight with its own scale. Logits are about
    0.02 · √64 = 0.16. Some BF16 roundings move a token's loss by 0.16 · 2⁻⁸ = 6 · 10⁻⁴, five FP8 GEMMs in a row of
    28.5 dB each by 0.16 · 0.084 = 0.013. The mean over 128 tokens moves by a tenth of that; three times this passes.
    """
    sizes = {"vocab_size": vocab_size, "make_vocab_size_divisible_by": multiple, "hidden_size": 64, "seq_length": 64}
    sizes |= {"num_attention_heads": 4, "precision": head, "fp8_lm_head": head == "fp8"}
    losses = []
    for tp in (1, 2, 4):
        flags = {**sizes, "tensor_model_parallel_size": tp}
        losses += ranks.run(_first_loss, tmp_path / str(tp), flags, num_ranks=tp)[:1]
    assert losses[0] == pytest.approx(math.log(vocab_size), abs=0.05)
    assert losses == pytest.approx([losses[0]] * 3, abs=4e-3 if head == "fp8" else 2e-4)


def _losses_and_gradients(vocab_size: int) -> tuple[Tensor, ...]:
    with runtime(CPU), initialized(ParallelConfig(tensor_model_parallel_size=2), 1, CPU) as topology:
        whole = torch.randn(6, 2, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
        labels = torch.randint(vocab_size, (6, 2), generator=torch.Generator().manual_seed(2))
        cotangent = torch.rand(6, 2, generator=torch.Generator().manual_seed(3))
        results = []
        for kind in ("ours", "megatron"):
            leaf = whole.chunk(2, dim=-1)[topology.tp.rank()].clone().requires_grad_()
            logits = leaf * 1.0
            if kind == "ours":
                loss = vocab_parallel_cross_entropy(logits, labels, topology.tp, vocab_size)
            else:
                filled = fill_padding(logits, vocab_size, topology.tp)
                loss = megatron_cross_entropy(filled.float(), labels)
            loss.backward(cotangent)
            assert leaf.grad is not None
            results += [loss.detach(), leaf.grad]
        return tuple(results)


@pytest.mark.parametrize("vocab_size", [20, 32, 45, 64])
def test_megatrons_loss_over_filled_padding_is_ours(ranks: RankPool, vocab_size: int) -> None:
    """Transformer Engine's layers have megatron-core's loss. 20 of 64 columns leave the second rank without a token."""
    for rank, (loss, grad, theirs, their_grad) in enumerate(ranks.run(_losses_and_gradients, vocab_size, num_ranks=2)):
        torch.testing.assert_close(loss, theirs, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(grad, their_grad, rtol=2**-7, atol=1e-6)
        padding = max(0, 32 * (rank + 1) - vocab_size)
        assert not grad[..., 32 - min(padding, 32) :].any() and not their_grad[..., 32 - min(padding, 32) :].any()
