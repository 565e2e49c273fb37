"""Spaces of one model with different groups: experts that one rank holds, among layers that all ranks replicate.

Two ranks have two experts, one each, and exchange their tokens; one process that holds both experts and all tokens is
what they must be. Everything is FP32, so that only the order of sums differs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from fp8_megatron.device.group import Group
from fp8_megatron.dtypes import StorageDtype, StorageFormats
from fp8_megatron.optimizer.distributed_optimizer import FP8DistributedOptimizer
from fp8_megatron.optimizer.hyperparameters import OptimizerSettings
from fp8_megatron.sharding.data_parallel import DataParallelModule, Exchange, finish_gradients
from fp8_megatron.sharding.replicas import Replicas, Sharing
from fp8_megatron.sharding.storage import ModelStorage
from tests.harness.ranks import RankPool, on_default_group

CPU = torch.device("cpu")
F = StorageDtype
FP32 = ModelStorage(StorageFormats(F.FP32, F.FP32, F.FP32, F.FP32, F.FP32), has_fp8_layers=False)
NUM_EXPERTS, WIDTH, TOKENS_PER_RANK, NUM_STEPS = 2, 48, 32, 5
#: Clips: gradients of the first step have a norm of about 3.
SETTINGS = OptimizerSettings(lr=1e-2, options={"eps": 1e-3}, clip_grad=0.5)


class ExchangeTokens(torch.autograd.Function):
    """Part r of this rank's tokens goes to rank r, in both directions; a copy where one process has all experts."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, group: Group) -> Tensor:
        ctx.group = group
        received = torch.empty_like(tokens)
        torch.distributed.all_to_all_single(received, tokens, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ExchangeTokens.apply(grads[0].contiguous(), ctx.group), None


class Experts(torch.nn.Module):
    """A dense layer, then the expert of each token: the first half of a rank's tokens takes expert 0."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group = group
        self.dense = torch.nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.bias = torch.nn.Parameter(torch.empty(WIDTH))
        held = range(NUM_EXPERTS) if group.size() == 1 else [group.rank()]
        self.experts = torch.nn.ParameterDict({str(i): torch.nn.Parameter(torch.empty(WIDTH, WIDTH)) for i in held})

    def forward(self, tokens: Tensor) -> Tensor:
        """[ranks' tokens that this process computes, WIDTH], a rank's after another."""
        hidden = linear(tokens, self.dense, self.bias).relu()
        if self.group.size() > 1:
            (expert,) = self.experts.values()
            return ExchangeTokens.apply(linear(ExchangeTokens.apply(hidden, self.group), expert), self.group)
        parts = hidden.view(-1, NUM_EXPERTS, TOKENS_PER_RANK // NUM_EXPERTS, WIDTH).unbind(1)
        outputs = [linear(part, self.experts[str(i)]) for i, part in enumerate(parts)]
        return torch.stack(outputs, dim=1).view_as(hidden)


@dataclass(frozen=True)
class Outcome:
    """Losses, norms, and masters and first moments by parameter."""

    losses: list[float]
    norms: list[float]
    masters: dict[str, Tensor]
    exp_avg: dict[str, Tensor]
    shard_numel: dict[str, int]


def _train(group: Group, expert_factor: float | None) -> Outcome:
    """Train; `expert_factor` replaces the factor of the experts' gradients, to see that it matters."""
    module = Experts(group)
    everywhere = Sharing(Replicas.of(group, CPU))
    factor = 1 / group.size() if expert_factor is None else expert_factor
    expert = Sharing(Replicas.of(None, CPU), grad_factor=factor)
    own = set(module.experts.values())
    model = DataParallelModule(
        module,
        sharing_of=lambda param: expert if param in own else everywhere,
        storage=FP32,
        exchange=Exchange(bucket_numel=1 << 10),
    )
    optimizer = FP8DistributedOptimizer([model], SETTINGS, FP32, world=group, device=CPU)
    optimizer.load_weights((name, initial_value(name, param)) for name, param in module.named_parameters())
    generator = torch.Generator().manual_seed(0)
    losses, norms = [], []
    for _ in range(NUM_STEPS):
        tokens, targets = torch.randn(2, NUM_EXPERTS * TOKENS_PER_RANK, WIDTH, generator=generator)
        width = len(tokens) // group.size()
        mine = slice(group.rank() * width, (group.rank() + 1) * width)
        model.reset()
        loss = (module(tokens[mine]) - targets[mine]).square().sum(dim=1).mean()
        loss.backward()
        finish_gradients([model])
        norms.append(optimizer.step().item())
        mean = loss.detach() / group.size()
        torch.distributed.all_reduce(mean)
        losses.append(mean.item())
    model.wait_for_weights()
    for name, param in module.named_parameters():
        state, slot = next((state, slot) for state, slot in optimizer.slots() if slot.name == name)
        assert torch.equal(state.get_master(slot), param), "FP32 weights are their masters"
    return Outcome(
        losses,
        norms,
        {slot.name: state.get_master(slot) for state, slot in optimizer.slots()},
        {
            slot.name: state.space.assemble(slot, lambda part, state=state: state.states["exp_avg"].part(part).load())
            for state, slot in optimizer.slots()
        },
        {slot.name: state.space.shard_numel for state, slot in optimizer.slots()},
    )


def initial_value(name: str, param: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randn(param.shape, generator=generator) / WIDTH**0.5


def test_two_ranks_with_an_expert_each_are_one_process_with_both(ranks: RankPool) -> None:
    """Sums of up to 64 terms of FP32 in another order differ by about 2⁻²¹ of their largest term; eps holds back the
    elements whose gradient is that small, so that a step moves them apart by less than 1e-4 of the learning rate."""
    (single,) = ranks.run(on_default_group, _train, None, num_ranks=1)
    outcomes = ranks.run(on_default_group, _train, None, num_ranks=2)
    for outcome in outcomes:
        assert outcome.losses == pytest.approx(single.losses, rel=1e-5)
        assert outcome.norms == pytest.approx(single.norms, rel=1e-5)
        assert min(outcome.norms) > SETTINGS.clip_grad, "clipping is tried, too"
        for name, moment in outcome.exp_avg.items():
            torch.testing.assert_close(moment, single.exp_avg[name], rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(outcome.masters[name], single.masters[name], rtol=0, atol=NUM_STEPS * 1e-6)
    for rank, outcome in enumerate(outcomes):
        assert [name for name in outcome.masters if name.startswith("experts")] == [f"experts.{rank}"]
        assert outcome.shard_numel[f"experts.{rank}"] >= WIDTH * WIDTH > outcome.shard_numel["dense"], (
            "not cut, and cut"
        )
        assert torch.equal(outcome.masters["dense"], outcomes[0].masters["dense"])


def test_the_comparison_notices_a_mean_over_the_wrong_ranks(ranks: RankPool) -> None:
    """Adam hides a factor of all gradients of a tensor from the weights, but not from the norm and the moments."""
    (single,) = ranks.run(on_default_group, _train, None, num_ranks=1)
    for rank, outcome in enumerate(ranks.run(on_default_group, _train, 1.0, num_ranks=2)):
        assert outcome.norms[0] > 1.1 * single.norms[0]
        name = f"experts.{rank}"
        assert not torch.allclose(outcome.exp_avg[name], single.exp_avg[name], rtol=0.1)
