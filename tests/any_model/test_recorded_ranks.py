"""`record_step` over replicas: gradients stay on their rank in a recording, and the step sends their sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fp8_megatron
from fp8_megatron.any_model.data_parallel import ReplicaError
from fp8_megatron.device.group import Group
from fp8_megatron.errors import UserError
from tests.any_model.test_no_sync import counted_reductions
from tests.any_model.test_recorded_step import assert_same, batch, build, loss_of, train
from tests.harness.played_recordings import recorded
from tests.harness.ranks import RankError, RankPool, on_default_group

LOOPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"micro_batches": 3},
    "reading": {"micro_batches": 3, "reads": True},
    "zeroed": {"set_to_none": False, "micro_batches": 2},
    "clipping": {"clips": True},
    "wide": {"micro_batches": 35, "steps": 4},
}


def _of_rank(group: Group) -> Any:
    """Each rank sees batches of its own."""
    return lambda seed, rows=16: batch(1000 * group.rank() + seed, rows)


def _held(group: Group, level: str, recipe: str, loop: dict[str, Any]) -> list[Tensor]:
    """The loop with every backward inside of ``no_sync``."""
    model, optimizer = build(level, recipe)
    compute = loss_of(model)

    def step(found: dict[str, Tensor]) -> Tensor:
        with optimizer.no_sync():
            return compute(found)

    return train(step, model, optimizer, batches=_of_rank(group), **loop)


def _recorded(group: Group, level: str, recipe: str, loop: dict[str, Any]) -> tuple[list[Tensor], int, int]:
    """The loop with a recorded step; its recordings, and what had been sent when a step returned."""
    model, optimizer = build(level, recipe)
    step, _ = recorded(loss_of(model), model)
    sent, begun = counted_reductions(), []

    def counted(found: dict[str, Tensor]) -> Tensor:
        before = len(sent)
        result = step(found)
        begun.append(len(sent) - before)
        return result

    return train(counted, model, optimizer, batches=_of_rank(group), **loop), step.num_recordings, sum(begun)


#: One loop under all, the others under two of them.
PRECISIONS = [(level, recipe) for level in ("O1", "O2", "O3") for recipe in ("tensorwise", "delayed")]


@pytest.mark.parametrize(
    ("level", "recipe", "loop"),
    [(*each, "accumulation") for each in PRECISIONS]
    + [(*each, loop) for loop in LOOPS if loop != "accumulation" for each in (PRECISIONS[1], PRECISIONS[4])],
)
def test_a_recorded_loop_has_the_bits_of_no_sync(ranks: RankPool, level: str, recipe: str, loop: str) -> None:
    expected = ranks.run(on_default_group, _held, level, recipe, LOOPS[loop], num_ranks=2)
    found = ranks.run(on_default_group, _recorded, level, recipe, LOOPS[loop], num_ranks=2)
    for (ours, num_recordings, begun), theirs in zip(found, expected, strict=True):
        assert_same(ours, theirs)
        assert num_recordings > 0 and begun == 0


def _on_cpu(group: Group) -> tuple[list[Tensor], list[Tensor]]:
    model, optimizer = build("O3")
    step = fp8_megatron.record_step(loss_of(model), model)
    return train(step, model, optimizer, batches=_of_rank(group)), _held(group, "O3", "tensorwise", {})


def test_a_cpu_runs_the_loop_inside_of_no_sync(ranks: RankPool) -> None:
    for ours, theirs in ranks.run(on_default_group, _on_cpu, num_ranks=2):
        assert_same(ours, theirs)


def _losses(group: Group) -> list[float]:
    """Every rank trains on the same batches."""
    model, optimizer = build("O3")
    step, _ = recorded(loss_of(model), model)
    return [loss.item() for loss in train(step, model, optimizer, steps=8)[:8]]


def test_ranks_with_the_same_data_are_one_rank(ranks: RankPool) -> None:
    """But for what the wire rounds."""
    (alone,) = ranks.run(on_default_group, _losses, num_ranks=1)
    assert alone[-1] < 0.8 * alone[0]
    for losses in ranks.run(on_default_group, _losses, num_ranks=2):
        assert losses == pytest.approx(alone, rel=0.02)


def _kinds_differ(group: Group) -> list[Tensor]:
    """Rank 1 has batches of two shapes in turn, so it records later than rank 0."""
    model, optimizer = build("O3")
    step, _ = recorded(loss_of(model), model)
    for index in range(8):
        rows = 32 if group.rank() and index % 2 else 16
        step(batch(10 * index + group.rank(), rows))
        optimizer.step()
        optimizer.zero_grad()
    return [value for name, value in model.state_dict().items() if "running" not in name and "tracked" not in name]


def test_ranks_may_record_at_different_times(ranks: RankPool) -> None:
    first, second = ranks.run(on_default_group, _kinds_differ, num_ranks=2)
    assert_same(first, second)


def _fails_on_one_rank(group: Group) -> list[Tensor]:
    model, optimizer = build("O3")
    step, recorder = recorded(loss_of(model), model, on_error="warn")
    if group.rank():
        recorder.fails = RuntimeError("no")
    train(step, model, optimizer, batches=_of_rank(group))
    assert bool(step.num_recordings) is not bool(group.rank())
    return [value for name, value in model.state_dict().items() if "running" not in name and "tracked" not in name]


def test_a_rank_that_cannot_record_stays_with_the_others(ranks: RankPool) -> None:
    first, second = ranks.run(on_default_group, _fails_on_one_rank, num_ranks=2)
    assert_same(first, second)


def _other_wrappers(group: Group) -> None:
    model, _ = build("O3")
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    with pytest.raises(UserError, match="the model is a DistributedDataParallel"):
        fp8_megatron.record_step(print, wrapped)
    step = fp8_megatron.record_step(loss_of(wrapped), model)
    with pytest.raises(ReplicaError, match=r"record_step cannot record: call the model of initialize itself"):
        step(batch(0))
    plain, _ = build(None)
    with pytest.raises(UserError, match="has 2 ranks, which share no gradient"):
        fp8_megatron.record_step(print, plain)


def test_other_wrappers_are_refused(ranks: RankPool) -> None:
    ranks.run(on_default_group, _other_wrappers, num_ranks=2)


def _unequal(group: Group) -> None:
    model, optimizer = build("O3")
    step, _ = recorded(loss_of(model), model)
    for index in range(6):
        if group.rank() == 0 or index != 5:
            step(batch(index))
        optimizer.step()
        optimizer.zero_grad()


def test_a_rank_without_a_gradient_is_an_error(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="replicas have gradients of different parameters"):
        ranks.run(on_default_group, _unequal, num_ranks=2)
