"""A jump skips a few steps of `initialize`'s optimizers, and whoever skips on says so."""

from __future__ import annotations

import copy
import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import fp8_megatron
from fp8_megatron.any_model import replace_linears, skipped_steps
from fp8_megatron.any_model.torch_optimizers import OptimizerError
from tests.harness.fp8_models import shard
from tests.harness.played_recordings import recorded
from tests.harness.ranks import RankPool, on_default_group

Group = torch.distributed.ProcessGroup
LOGGER = "fp8_megatron.any_model.skipped_steps"


def build(recipe: str = "delayed", *, level: str = "O2", is_sharded: bool = False) -> tuple[torch.nn.Sequential, Any]:
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
    if is_sharded:
        replace_linears(model, recipe=recipe)  # type: ignore[arg-type]
        shard(model)
        level = "O3"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    recipes = {} if is_sharded else {"recipe": recipe}
    return fp8_megatron.initialize(model, optimizer, opt_level=level, **recipes)  # type: ignore[arg-type]


def batch(step: int, rank: int = 0) -> Tensor:
    return torch.randn(32, 32, generator=torch.Generator().manual_seed(100 * step + rank))


def train(model: torch.nn.Module, optimizer: Any, steps: range, factor: float = 1.0, rank: int = 0) -> list[int]:
    """The number of skipped steps behind each step."""
    found = []
    for step in steps:
        x = batch(step, rank)
        ((model(x) - x.sin()).square().mean() * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(optimizer.num_skipped_steps)
    return found


@pytest.mark.parametrize("factor", [30.0, 1e3, 1e-3])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_lasting_jump_skips_a_few_steps(level: str, factor: float) -> None:
    model, optimizer = build(level=level)
    assert train(model, optimizer, range(4))[-1] == 0
    skipped = train(model, optimizer, range(4, 16), factor)
    assert skipped[4:] == [skipped[3]] * 8 and (skipped[-1] == 0) == (factor < 1.0)


def _jumps(group: Group, is_sharded: bool) -> list[int]:
    """The jump is one rank's; that of the other rank comes a step later."""
    model, optimizer = build(is_sharded=is_sharded)
    train(model, optimizer, range(4), rank=group.rank())
    jumps = [1e3 if step > 4 or group.rank() == 0 else 1.0 for step in range(4, 16)]
    found = []
    for step, factor in enumerate(jumps, start=4):
        found += train(model, optimizer, range(step, step + 1), factor, group.rank())
    return found


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_lasting_jump_of_ranks_skips_a_few_steps(ranks: RankPool, is_sharded: bool) -> None:
    for skipped in ranks.run(on_default_group, _jumps, is_sharded, num_ranks=2):
        assert 0 < skipped[-1] <= 4 and skipped[4:] == [skipped[-1]] * 8, skipped


def test_a_warning_names_the_tensor_and_an_error_ends_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A cast that stays bad; the fourth step reads that the third was skipped."""
    monkeypatch.setattr(skipped_steps, "RAISE_AFTER", 6)
    model, optimizer = build()
    train(model, optimizer, range(3))
    with caplog.at_level(logging.WARNING, LOGGER):
        train(model, optimizer, range(3, 6), math.inf)
        assert not caplog.messages
        train(model, optimizer, range(6, 9), math.inf)
    (message,) = caplog.messages
    assert "skipped 3 steps in a row" in message and "not finite: output gradient of 2" in message
    with pytest.raises(OptimizerError, match="skipped 6 steps in a row: not finite: output gradient of 2"):
        train(model, optimizer, range(9, 10), math.inf)


def test_loading_a_state_ends_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error asks for it."""
    monkeypatch.setattr(skipped_steps, "RAISE_AFTER", 6)
    model, optimizer = build()
    train(model, optimizer, range(3))
    state = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(OptimizerError, match="skipped 6 steps in a row"):
        train(model, optimizer, range(3, 10), math.inf)
    optimizer.zero_grad()
    optimizer.load_state_dict(state)
    assert train(model, optimizer, range(3, 8)) == [0] * 5


def test_a_good_step_ends_the_row(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = build()
    with caplog.at_level(logging.WARNING, LOGGER):
        for step in range(12):
            train(model, optimizer, range(step, step + 1), 1.0 if step % 3 == 0 else math.nan)
    assert optimizer.num_skipped_steps == 8 and not caplog.messages


def test_without_delayed_scales_the_gradient_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = build("tensorwise")
    with caplog.at_level(logging.WARNING, LOGGER):
        for step in range(5):
            model(batch(step)).square().mean().backward()
            model[2].bias.grad.fill_(math.nan)
            optimizer.step()
            optimizer.zero_grad()
    (message,) = caplog.messages
    assert "not finite: gradient of 2.bias" in message


def _one_rank_is_bad(group: Group, is_sharded: bool) -> list[str]:
    messages: list[str] = []
    logging.getLogger(LOGGER).addFilter(lambda record: messages.append(record.getMessage()) or True)  # type: ignore[func-returns-value]
    model, optimizer = build(is_sharded=is_sharded)
    train(model, optimizer, range(3), rank=group.rank())
    train(model, optimizer, range(3, 8), math.nan if group.rank() == 0 else 1.0, group.rank())
    return messages


@pytest.mark.parametrize("is_sharded", [False, True])
def test_all_ranks_warn_at_the_same_step(ranks: RankPool, is_sharded: bool) -> None:
    bad, other = ranks.run(on_default_group, _one_rank_is_bad, is_sharded, num_ranks=2)
    assert ["skipped 3 steps in a row" in message for message in (*bad, *other)] == [True, True]
    assert "not finite: output gradient of 2" in bad[0]


@pytest.mark.parametrize("num_bad", [16, 22])
def test_grad_scaler_may_look_for_its_scale(num_bad: int, caplog: pytest.LogCaptureFixture) -> None:
    """It begins with 2^16, and halves that 16 times until it is 1."""
    model, optimizer = build("tensorwise")
    scaler = torch.amp.GradScaler("cpu")
    with caplog.at_level(logging.WARNING, LOGGER):
        for step in range(num_bad + 2):
            scaler.scale(model(batch(step)).square().mean() * (math.inf if step < num_bad else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert optimizer.num_skipped_steps == num_bad
    assert [("skipped 20 steps" in message) for message in caplog.messages] == [True] * (num_bad > 20)


def zero_initialised(is_recorded: bool) -> tuple[Any, Any, Any, Any]:
    """A net whose gradients reach one layer more at each step."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(32, 32) for _ in range(4)]
    for layer in layers[1:]:
        torch.nn.init.zeros_(layer.weight)
    model: Any = torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.Hardtanh())))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    model, optimizer = fp8_megatron.initialize(model, optimizer, opt_level="O2", recipe="delayed")

    def compute(x: Tensor) -> Tensor:
        loss = (model(x) - x.sin()).square().mean()
        loss.backward()
        return loss

    if not is_recorded:
        return model, optimizer, compute, None
    return (model, optimizer, *recorded(compute, model))


def run_zero_initialised(is_recorded: bool, resumes_at: int = -1, rests: int = 0) -> tuple[list[Tensor], Any]:
    """`rests`: steps at the beginning that move nothing."""
    model, optimizer, step, recorder = zero_initialised(is_recorded)
    found = []
    for index in range(14 + rests):
        optimizer.param_groups[0]["lr"] = 0.0 if index < rests else 1e-2
        found.append(step(batch(index)).detach())
        optimizer.step()
        optimizer.zero_grad()
        if index == resumes_at:
            states = model.state_dict(), optimizer.state_dict()
            model, optimizer, step, recorder = zero_initialised(is_recorded)
            model.load_state_dict(states[0])
            optimizer.load_state_dict(states[1])
    return [*found, *model.state_dict().values()], recorder


@pytest.mark.parametrize("resumes_at", range(7))
@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_run_with_cold_slots_resumes(resumes_at: int, is_recorded: bool) -> None:
    """Bit for bit, at whichever layer the gradients have come."""
    expected, _ = run_zero_initialised(False)
    assert all(map(torch.equal, run_zero_initialised(is_recorded, resumes_at)[0], expected))


def test_a_run_resumes_between_two_steps_that_are_skipped() -> None:
    """The second of them takes the amaxes."""
    found = []
    for resumes in (False, True):
        model, optimizer = build()
        train(model, optimizer, range(4))
        skipped = train(model, optimizer, range(4, 5), 1e3)
        if resumes:
            states = model.state_dict(), optimizer.state_dict()
            model, optimizer = build()
            model.load_state_dict(states[0])
            optimizer.load_state_dict(states[1])
        skipped += train(model, optimizer, range(5, 12), 1e3)
        found.append((skipped, [value.clone() for value in model.state_dict().values()]))
    assert found[0][0] == found[1][0] and found[0][0][-1] > 0
    assert all(map(torch.equal, found[0][1], found[1][1]))
