"""Transformer Engine's modules over several ranks: data parallel, under torch's DDP, and sharded by FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fp8_megatron
from fp8_megatron.any_model import replace_linears
from fp8_megatron.any_model.fsdp_reduce import reduce_in_own_dtype
from fp8_megatron.dtypes import LEVELS
from fp8_megatron.quantization.scaled_tensor import ScaledTensor
from tests.any_model.te_stand_ins import LayerNormLinear, LayerNormMLP, Linear
from tests.harness.fp8_models import shard
from tests.harness.ranks import RankPool, on_default_group

NUM_STEPS, RANKS = 4, 2


def build() -> torch.nn.Sequential:
    torch.manual_seed(0)
    split = ("query", "key", "value")
    return torch.nn.Sequential(
        LayerNormLinear(64, 96, split=split),
        Linear(96, 64),
        LayerNormMLP(64, 128, activation="swiglu"),
        torch.nn.LayerNorm(64),  # DDP wants a parameter of its own
    )


def batches(step: int) -> torch.Tensor:
    """[ranks, rows, 64]; the ranks' means are those of all rows."""
    return torch.randn(RANKS, 32, 64, generator=torch.Generator().manual_seed(step)).bfloat16()


def sharded(group: Any) -> tuple[list[float], dict[str, Any], dict[str, float]]:
    """Losses of all rows on every rank, the shapes of a state dict, and bytes gathered a weight."""
    model = build().bfloat16()
    replace_linears(model, weight=LEVELS["O3"].weight)
    shard(*model, model)
    model, optimizer = fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), "O3")
    reduce_in_own_dtype(model)
    losses = []
    for step in range(NUM_STEPS):
        x = batches(step).flatten(0, 1)
        loss = (model(x) - x.sin()).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    local = {name: param._local_tensor for name, param in model.named_parameters()}
    bytes_of = {name: w.payload.element_size() for name, w in local.items() if isinstance(w, ScaledTensor)}
    return losses, state, bytes_of


def test_two_shards_train_what_one_does(ranks: RankPool) -> None:
    both = ranks.run(on_default_group, sharded, num_ranks=2)
    (expected,) = ranks.run(on_default_group, sharded, num_ranks=1)
    for losses, state, bytes_of in both:
        assert losses == pytest.approx(expected[0], rel=2**-7) and state == expected[1]  # gradients add up in BF16
        assert len(bytes_of) == 4 and set(bytes_of.values()) == {1}
