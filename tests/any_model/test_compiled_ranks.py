"""A compiled model over several ranks: the bits of eager mode."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fp8_megatron
from fp8_megatron.device.group import Group
from tests.harness.ranks import RankPool, on_default_group


def _train(group: Group, level: str, compiles: bool) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 32))
    model, optimizer = fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), level)
    call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiles else model
    losses = []
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + group.rank())
        x = torch.randn(24, 64, generator=generator)
        for part in x.chunk(1 + step % 2):  # two micro-batches in every second step
            loss = (call(part) - part[:, :32].sin()).square().mean()
            loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_compiled_ranks_have_the_bits_of_eager_ones(ranks: RankPool, level: str) -> None:
    eager = ranks.run(on_default_group, _train, level, False, num_ranks=2)
    compiled = ranks.run(on_default_group, _train, level, True, num_ranks=2)
    for (expected_losses, expected), (losses, state) in zip(eager, compiled, strict=True):
        assert losses == expected_losses
        for name, value in expected.items():
            assert torch.equal(state[name], value), name


def _wrapped(group: Group, way: str) -> dict[str, Tensor]:
    """Two steps of two micro-batches."""
    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.LayerNorm(128), torch.nn.Linear(128, 32)
    )
    model, optimizer = fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), "O3")
    if way == "inner":
        call: torch.nn.Module = torch.nn.parallel.DistributedDataParallel(torch.compile(model, backend="aot_eager"))
    elif way == "outer":
        call = torch.compile(torch.nn.parallel.DistributedDataParallel(model), backend="aot_eager")  # type: ignore[assignment]
    elif way == "part":
        model[0] = torch.compile(model[0], backend="aot_eager")  # type: ignore[index]
        call = torch.nn.parallel.DistributedDataParallel(model)
    else:
        call = torch.nn.parallel.DistributedDataParallel(model)
    for step in range(2):
        x = torch.randn(24, 64, generator=torch.Generator().manual_seed(10 * step + group.rank()))
        for part in x.chunk(2):
            (call(part) - part[:, :32].sin()).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {name.replace("_orig_mod.", ""): value for name, value in model.state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["inner", "outer", "part"])
def test_ddp_and_compile_in_any_order_have_the_bits_of_ddp(ranks: RankPool, way: str) -> None:
    """DDP keeps one vector, and leaves out the rest under the names that torch.compile gives."""
    expected = ranks.run(on_default_group, _wrapped, "eager", num_ranks=2)
    for states in zip(expected, ranks.run(on_default_group, _wrapped, way, num_ranks=2), strict=True):
        for name, value in states[0].items():
            assert torch.equal(states[1][name], value), name
            assert torch.equal(expected[0][name], value), name
