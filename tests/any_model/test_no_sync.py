"""Gradients that stay on their rank between the backward passes of a step: ours, torch's DDP's, and what may differ."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import fp8_megatron
from fp8_megatron.any_model.fsdp import FullyShard
from fp8_megatron.any_model.torch_optimizers import OptimizerError
from fp8_megatron.device.group import Group
from fp8_megatron.sharding.sharded_grads import ShardedGradBuffer
from fp8_megatron.sharding.storage import ModelStorage
from tests.harness.fp8_models import assert_equal, masters
from tests.harness.ranks import RankError, RankPool, on_default_group

WIDTH, ROWS = 64, 16


class Model(torch.nn.Module):
    """Two FP8 weights, and a vector for torch's DDP to reduce."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.shift = torch.nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x.roll(1, dims=1)) + self.shift


def build(level: str) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Model()
    return fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), opt_level=level)


def exact_batch(number: int) -> tuple[Tensor, Tensor]:
    """Inputs and the outputs' gradients, each [ROWS, WIDTH], that every format takes exactly.

    A column of the input has one row that is not zero, so gradients of weights are −1, 0 or 1. The largest values are
    7: divided by 448 or 57,344 they are powers of two. They meet zeros.
    """
    generator = torch.Generator().manual_seed(number)
    x, grad = torch.zeros(ROWS, WIDTH), torch.randint(-1, 2, (ROWS, WIDTH), generator=generator).float()
    rows = torch.randint(2, ROWS, (WIDTH,), generator=generator)
    x[rows, torch.arange(WIDTH)] = torch.randint(0, 2, (WIDTH,), generator=generator) * 2.0 - 1
    grad[0], grad[1] = 0, 0
    x[0, number % WIDTH] = grad[1, number % WIDTH] = 7
    return x, grad


def counted_reductions() -> list[int]:
    """Receives the index of every bucket that is reduced from now on, in this process."""
    found: list[int] = []
    reduce = ShardedGradBuffer._reduce

    def counting(self: Any, state: Any) -> None:
        found.append(state.bucket.index)
        reduce(self, state)

    ShardedGradBuffer._reduce = counting  # type: ignore[method-assign]
    return found


#: By step and rank: micro-batches. Ranks differ in all but the second step.
PLAN = [((0, 1, 2), (3,)), ((4,), (5,)), ((6, 7), (8, 9, 10)), ((11, 12), (13,))]


def _in_parts(group: Group, level: str, way: str, plan: Any, ends_inside: bool) -> tuple[dict[str, Tensor], list[int]]:
    """Steps over the rank's micro-batches of `plan`, all but the last one of each step in ``no_sync``; and by step, how
    many reductions had begun when its last backward did."""
    model, optimizer = build(level)
    called: Any = torch.nn.parallel.DistributedDataParallel(model) if way == "ddp" else model
    found, begun = counted_reductions(), []
    no_sync: Callable[[], AbstractContextManager[None]] = called.no_sync if way == "ddp" else optimizer.no_sync
    for step in plan:
        mine = step[group.rank()]
        found.clear()
        for index, number in enumerate(mine):
            is_last = index + 1 == len(mine)
            if is_last:
                begun.append(len(found))
            x, grad = exact_batch(number)
            with nullcontext() if is_last and not ends_inside else no_sync():
                called(x).backward(grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step is not plan[1])
    return masters(model), begun


def _whole(group: Group, level: str, plan: Any) -> dict[str, Tensor]:
    """The same steps on one rank, with one backward each."""
    model, optimizer = build(level)
    for step in plan:
        batches = [exact_batch(number) for of_rank in step for number in of_rank]
        x, grad = (torch.cat(parts) for parts in zip(*batches, strict=True))
        model(x).backward(grad / len(step))
        optimizer.step()
        optimizer.zero_grad()
    return masters(model)


@pytest.mark.parametrize(("level", "ends_inside"), [("O1", False), ("O2", False), ("O3", False), ("O3", True)], ids=str)
@pytest.mark.parametrize("way", ["ours", "ddp"])
def test_ranks_that_add_locally_are_one_rank_with_the_whole_batch(
    ranks: RankPool, way: str, level: str, ends_inside: bool
) -> None:
    """Bit for bit, with unequal numbers of micro-batches; nothing leaves inside of no_sync. A step sends what no
    backward has sent."""
    (expected,) = ranks.run(on_default_group, _whole, level, PLAN, num_ranks=1)
    for weights, begun in ranks.run(on_default_group, _in_parts, level, way, PLAN, ends_inside, num_ranks=2):
        assert begun == [0] * len(PLAN)
        assert_equal(weights, expected)


def _reads(group: Group) -> tuple[list[Tensor], float, dict[str, int]]:
    """p.grad of a weight after each backward, the norm, and bytes before and after."""
    model, optimizer = build("O2")
    before = optimizer.storage_bytes["main_grad"]
    found = []
    for number, context in enumerate((optimizer.no_sync(), optimizer.no_sync(), nullcontext())):
        x, grad = exact_batch(2 * number + group.rank())
        with context:
            model(x).backward(grad)
            found.append(model.first.weight.grad.clone())
    norm = fp8_megatron.clip_grad_norm_(model, 1e9).item()
    return found, norm, {"before": before, "after": optimizer.storage_bytes["main_grad"]}


def test_a_gradient_that_is_read_inside_is_the_mean_so_far(ranks: RankPool) -> None:
    results = ranks.run(on_default_group, _reads, num_ranks=2)
    sums, expected = torch.zeros(WIDTH, WIDTH), []
    for number in range(6):
        x, grad = exact_batch(number)
        sums = sums + grad.t() @ x / 2
        if number % 2:
            expected.append(sums)
    for found, norm, count in results:
        for shown, value in zip(found, expected, strict=True):
            assert torch.equal(shown, value)
        assert norm == results[0][1] > 0
        assert count["after"] - count["before"] == 2 * WIDTH * WIDTH * 2  # two weights in BF16


def _drops(group: Group, sets_to_none: bool) -> dict[str, Tensor]:
    """One rank drops a micro-batch that it alone has seen."""
    model, optimizer = build("O3")
    for step in range(3):
        if group.rank() == 1:
            with optimizer.no_sync():
                x, grad = exact_batch(20 + step)
                model(x).backward(grad * torch.nan)
            optimizer.zero_grad(set_to_none=sets_to_none)
        x, grad = exact_batch(2 * step + group.rank())
        model(x).backward(grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=sets_to_none)
    assert optimizer.num_skipped_steps == 0
    return masters(model)


@pytest.mark.parametrize("sets_to_none", [True, False])
def test_what_one_rank_drops_concerns_no_other(ranks: RankPool, sets_to_none: bool) -> None:
    plan = [((0,), (1,)), ((2,), (3,)), ((4,), (5,))]
    (expected,) = ranks.run(on_default_group, _whole, "O3", plan, num_ranks=1)
    for weights in ranks.run(on_default_group, _drops, sets_to_none, num_ranks=2):
        assert_equal(weights, expected)


def _a_dropped_gradient_is_zero(group: Group) -> dict[str, Tensor]:
    """zero_grad(set_to_none=False) behind a backward in no_sync: the step has the gradient 0, not an earlier one."""
    model, optimizer = build("O3")
    for _ in range(2):
        x, grad = exact_batch(group.rank())
        with optimizer.no_sync():
            model(x).backward(grad)
        optimizer.step()
        optimizer.zero_grad()
    with optimizer.no_sync():
        model(x).backward(grad)
    optimizer.zero_grad(set_to_none=False)
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


def test_a_dropped_gradient_is_zero(ranks: RankPool) -> None:
    for grads in ranks.run(on_default_group, _a_dropped_gradient_is_zero, num_ranks=2):
        assert len(grads) == 4 and not any(grad.any() for grad in grads.values())


def _unequal_outside(group: Group) -> None:
    model, optimizer = build("O2")
    for index in range(2):
        x, grad = exact_batch(index)
        with optimizer.no_sync() if group.rank() or not index else nullcontext():
            model(x).backward(grad)
    optimizer.step()


def _no_gradient_on_one(group: Group) -> None:
    model, optimizer = build("O2")
    if group.rank() == 0:
        x, grad = exact_batch(0)
        with optimizer.no_sync():
            model(x).backward(grad)
    optimizer.step()


@pytest.mark.parametrize("unequal", [_unequal_outside, _no_gradient_on_one])
def test_unequal_numbers_outside_are_an_error(ranks: RankPool, unequal: Callable[[Group], None]) -> None:
    with pytest.raises(RankError, match=r"ReplicaError: .* call backward as often outside of no_sync\(\)"):
        ranks.run(on_default_group, unequal, num_ranks=2)


def test_one_replica_has_nothing_to_hold_back() -> None:
    model, optimizer = build("O2")
    x, grad = exact_batch(0)
    with optimizer.no_sync():
        model(x).backward(grad)
    assert torch.equal(model.first.weight.grad.clone(), grad.t() @ x)


def test_fully_shard_names_its_own_way() -> None:
    with pytest.raises(OptimizerError, match=r"set_requires_gradient_sync\(False\)"):
        FullyShard(ModelStorage()).no_sync()
