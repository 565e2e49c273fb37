"""Layers that a forward does not train, after ``eval()``, leave delayed scales as training made them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fp8_megatron

SIZES = (32, 64, 32)


def losses(*, compiled: bool, evaluates: Callable[[torch.nn.Module], None] | None) -> list[float]:
    """Of six steps, with `evaluates` between them."""
    torch.manual_seed(0)
    first, hidden, last = SIZES
    model: torch.nn.Module = torch.nn.Sequential(
        torch.nn.Linear(first, hidden), torch.nn.GELU(), torch.nn.Linear(hidden, last)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = fp8_megatron.initialize(model, optimizer, opt_level="O2", recipe="delayed")
    called = torch.compile(model, backend="aot_eager") if compiled else model
    found = []
    for step in range(6):
        x = batch(step)
        loss = (called(x) - x.sin()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss))
        if evaluates is not None:
            model.eval()
            evaluates(called)
            model.train()
    assert optimizer.num_skipped_steps == 0
    return found


def batch(seed: int) -> Tensor:
    return torch.randn(16, SIZES[0], generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("scale", [100.0, math.nan])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_training_goes_on_bit_for_bit(mode: Callable[[], torch.no_grad], scale: float, compiled: bool) -> None:
    def evaluate(model: torch.nn.Module) -> None:
        with mode():
            assert model(scale * batch(100)).isfinite().all() == math.isfinite(scale)

    assert losses(compiled=compiled, evaluates=evaluate) == losses(compiled=compiled, evaluates=None)


def test_values_beyond_what_training_saw_are_not_clamped() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(*SIZES[:2]))
    plain = torch.nn.Sequential(torch.nn.Linear(*SIZES[:2]))
    plain.load_state_dict(model.state_dict())
    model, optimizer = fp8_megatron.initialize(
        model, torch.optim.AdamW(model.parameters(), lr=0.0), opt_level="O2", recipe="delayed"
    )
    for step in range(3):
        model(batch(step)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        x = 1000 * batch(7)
        expected = plain(x)
        error = (model(x) - expected).norm() / expected.norm()
    assert error < 0.05


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_frozen_model_passes_gradients_of_any_size(compiled: bool) -> None:
    """A teacher, or a network that a loss looks through: no step follows that would move its delayed scales."""
    torch.manual_seed(0)
    first, hidden, last = SIZES
    model: torch.nn.Module = torch.nn.Sequential(
        torch.nn.Linear(first, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, last)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = fp8_megatron.initialize(model, optimizer, opt_level="O2", recipe="delayed")
    for step in range(3):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state, recipe = optimizer.state_dict()["state"][0], model[0].quantizers.input.history
    model.eval().requires_grad_(False)
    plain = torch.nn.Sequential(torch.nn.Linear(first, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, last))
    plain.load_state_dict(model.state_dict())
    called = torch.compile(model, backend="aot_eager") if compiled else model
    for scale in (1e-3, 1.0, 1e3):
        grads = []
        for network in (called, plain):
            x = batch(7).requires_grad_()
            (network(x).square() * scale).sum().backward()
            assert x.grad is not None
            grads.append(x.grad)
        # E5M2 rounds by an eighth at most, twice; clamped gradients are off by nine tenths and more.
        assert (grads[0] - grads[1]).norm() < 0.25 * grads[1].norm()
    after = optimizer.state_dict()["state"][0]
    assert all(torch.equal(state[key], after[key]) for key in state if key.startswith("delayed"))
    assert recipe.record.abs().max() == 0


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_weights_and_gradients_are_read_in_inference_mode(level: str) -> None:
    """An evaluation saves the best model, and may load one."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(*SIZES[:2]))
    model, optimizer = fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters()), opt_level=level)
    model(batch(0)).square().mean().backward()
    expected, weight = model.state_dict(), model[0].weight
    with torch.inference_mode():
        state = model.state_dict()
        model.load_state_dict(state)
        assert torch.equal(weight.grad.detach().clone(), weight.grad.clone())
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    optimizer.step()
    model(batch(1)).square().mean().backward()
