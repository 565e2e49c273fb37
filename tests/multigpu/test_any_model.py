"""`fp8_megatron.initialize` over two GPUs and NCCL: data parallelism, torch's DDP and fully_shard."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import fp8_megatron
from fp8_megatron.any_model import replace_linears
from fp8_megatron.device.group import Group
from fp8_megatron.dtypes import LEVELS
from tests.harness.ranks import RankPool, on_default_group

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

STEPS, ROWS = 40, 512


def _model(seed: int) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(64, 256), torch.nn.LayerNorm(256), torch.nn.GELU(), torch.nn.Linear(256, 256)]
    return torch.nn.Sequential(*layers, torch.nn.GELU(), torch.nn.Linear(256, 16)).cuda()


def _train(group: Group, level: str, form: str, micro_batches: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses over all ranks' rows, and the weights at the end."""
    torch.cuda.set_device(group.rank())
    # Replicas start from the first rank's values. Under fully_shard the user sees to equal values.
    model: Any = _model(0 if form == "fsdp" else group.rank())
    if form == "fsdp":
        replace_linears(model, weight=LEVELS[level].weight)
        for layer in (*model, model):
            if any(True for _ in layer.parameters()):
                fully_shard(layer)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer = fp8_megatron.initialize(model, optimizer, opt_level=level)
    forward = torch.nn.parallel.DistributedDataParallel(model) if form == "ddp" else model
    losses = []
    for step in range(STEPS):
        x = torch.randn(ROWS, 64, generator=torch.Generator("cuda").manual_seed(step), device="cuda")
        target = torch.sin(x[:, :16])
        total = torch.zeros((), device="cuda")
        mine = slice(group.rank(), None, group.size())
        for rows, wanted in zip(x[mine].chunk(micro_batches), target[mine].chunk(micro_batches), strict=True):
            with torch.autocast("cuda", torch.bfloat16):
                y = forward(rows)
            loss = (y.float() - wanted).square().mean() / micro_batches
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.distributed.all_reduce(total, group=group)
        losses.append(float(total) / group.size())
    weights = {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).cpu()
        for name, value in model.state_dict().items()
    }
    return losses, weights


def _on_gpus(*arguments: Any) -> Any:
    return on_default_group(_train, *arguments, backend="nccl")


@pytest.mark.parametrize(
    ("level", "form", "micro_batches"),
    [
        ("O1", "plain", 1),
        ("O2", "plain", 2),
        ("O3", "plain", 1),
        ("O3", "plain", 3),
        ("O3", "ddp", 2),
        ("O3", "fsdp", 1),
    ],
)
def test_two_gpus_train_as_one(gpus: RankPool, level: str, form: str, micro_batches: int) -> None:
    """The mean of gradients is rounded to E4M3 once more, 31 dB, and activations have other scales."""
    timeout = {"timeout_seconds": 240.0}
    ((one, _),) = gpus.run(_on_gpus, level, "plain", 1, num_ranks=1, **timeout)
    (two, weights), (others, other_weights) = gpus.run(_on_gpus, level, form, micro_batches, num_ranks=2, **timeout)
    assert two == others and one[-1] < 0.4 * one[0]
    assert two == pytest.approx(one, rel=0.05)
    for name, value in weights.items():
        assert torch.equal(value, other_weights[name]), f"replicas differ in {name}"
