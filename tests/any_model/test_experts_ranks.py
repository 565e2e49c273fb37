"""FP8 experts over two ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

import fp8_megatron
from fp8_megatron.any_model import replace_linears
from fp8_megatron.any_model.fsdp_reduce import reduce_in_own_dtype
from fp8_megatron.dtypes import LEVELS
from fp8_megatron.errors import UserError
from tests.any_model.test_experts import Experts, TurnedExperts
from tests.harness.fp8_models import shard
from tests.harness.ranks import RankPool, on_default_group

Group = torch.distributed.ProcessGroup
STEPS, TOKENS = 4, 48


class Model(torch.nn.Module):
    """A router and experts, those of gpt-oss if `turned`."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.router = torch.nn.Linear(64, 4, bias=False)
        self.experts = TurnedExperts() if turned else Experts(torch.nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        return x + self.experts(x, chosen, weights)


def build(turned: bool) -> Model:
    torch.manual_seed(0)
    return Model(turned)


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(TOKENS, 64, generator=generator), torch.randn(TOKENS, 64, generator=generator)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> list[float]:
    losses = []
    for step in range(STEPS):
        x, target = batch(step, rank)
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def start(level: str, turned: bool = False) -> tuple[Model, torch.optim.Optimizer]:
    model = build(turned)
    return fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), level)


def replicated(group: Group, level: str, same_data: bool) -> tuple[list[float], dict[str, Tensor]]:
    model, optimizer = start(level)
    losses = train(model, optimizer, 0 if same_data else group.rank())
    return losses, {name: param.clone().detach() for name, param in model.named_parameters()}


def sharded(group: Group, level: str, turned: bool) -> tuple[list[float], list[float], list[str]]:
    """Losses, the first one and that of the model that has taken on its first state, and what the shards are."""
    model = build(turned)
    replace_linears(model, weight=LEVELS[level].weight)
    shard(model.experts, model)
    model, optimizer = fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), level)
    reduce_in_own_dtype(model)
    before = {name: value.full_tensor() for name, value in model.state_dict().items()}
    losses = train(model, optimizer, 0)
    kinds = [type(param._local_tensor).__name__ for param in model.experts.parameters() if param.ndim == 3]
    optimizer.load_state_dict(optimizer.state_dict())
    state = {name: distribute_tensor(value, init_device_mesh("cpu", (2,))) for name, value in before.items()}
    model.load_state_dict(state)
    with torch.no_grad():
        x, target = batch(0, 0)
        again = (model(x) - target).square().mean().item()
    return losses, [losses[0], again], kinds


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_replicas(ranks: RankPool, level: str) -> None:
    """With the same batches they train as one rank does. Its gradients are rounded alike, the mean is rounded once more
    (E4M3, 2⁻⁴ of a gradient). With other batches they have the same weights."""
    found = ranks.run(on_default_group, replicated, level, True, num_ranks=2)
    assert found[0][0] == pytest.approx(train(*start(level), 0), rel=1e-3)
    first, second = ranks.run(on_default_group, replicated, level, False, num_ranks=2)
    assert all(torch.equal(value, second[1][name]) for name, value in first[1].items())


@pytest.mark.parametrize(("level", "turned"), [("O2", False), ("O3", False), ("O3", True)])
def test_fully_shard(ranks: RankPool, level: str, turned: bool) -> None:
    """Ranks have two of the four experts each, and gather them with their scales. Their masters start from rounded
    weights (31.5 dB), which moves the loss by less than 1%."""
    losses, (before, again), kinds = ranks.run(on_default_group, sharded, level, turned, num_ranks=2)[0]
    assert kinds == ["ScaledTensor"] * 2
    assert losses == pytest.approx(train(*start(level, turned), 0), rel=1e-2)
    assert again == pytest.approx(before, rel=1e-3)


def one_each(group: Group) -> tuple[bool, str]:
    """Whether frozen experts compute the same with one a rank, and what three experts over two ranks raise."""
    model = Experts(torch.nn.SiLU(), sizes=(2, 64, 64)).requires_grad_(False)
    odd = Experts(torch.nn.SiLU(), sizes=(3, 64, 64)).requires_grad_(False)
    for each in (model, odd):
        replace_linears(each)
    call = (batch(0, 0)[0], torch.arange(TOKENS)[:, None] % 2, torch.ones(TOKENS, 1))
    expected = model(*call)
    shard(model, odd)
    try:
        odd(*call)
    except UserError as error:
        return torch.equal(model(*call), expected), str(error)
    return False, ""


def test_one_expert_a_rank(ranks: RankPool) -> None:
    for is_same, message in ranks.run(on_default_group, one_each, num_ranks=2):
        assert is_same and "3 matrices, which 2 ranks do not share evenly" in message
