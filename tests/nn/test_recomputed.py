"""Activations that backward computes again: the same bits, and nothing kept in FP8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fp8_megatron
from fp8_megatron.errors import UserError
from fp8_megatron.nn import recomputed
from fp8_megatron.nn.module import FP8Linear

WIDTH, ROWS, STEPS = 128, 128, 3  # blocks have 128 elements


def _gelu_of_tanh(x: Tensor) -> Tensor:
    """GPT-2's, written out as in transformers."""
    return 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.04 * torch.pow(x, 3.0))))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "written out": _gelu_of_tanh,
    "swiglu": lambda x: F.silu(x) * x.roll(1, 0),
    "quick": lambda x: x * torch.sigmoid(1.702 * x),
}
#: Whose result cannot be made from what they keep, or is no longer what they made.
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "scaled": lambda x: F.gelu(x) * 0.5,
    "written to": lambda x: _doubled(F.gelu(x)),
    "constant factor": lambda x: x * torch.full_like(x, 0.5),
    "broadcast": lambda x: x * x.sum(0),
}


def _doubled(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.mul_(2.0)


class MLP(torch.nn.Module):
    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc1, self.fc2 = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.fc2(self.activation(self.fc1(x)))
        return y


def trained(activation: Callable[[Tensor], Tensor], recipe: Any, *, recomputes: bool) -> list[Tensor]:
    """Outputs, gradients of inputs and weights of some steps."""
    torch.manual_seed(0)
    model: Any = MLP(activation).to(torch.bfloat16)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = fp8_megatron.initialize(model, optimizer, recipe=recipe, recompute_activations=recomputes)
    generator, seen = torch.Generator().manual_seed(1), []
    for _ in range(STEPS):
        x, cotangent = (torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.bfloat16) for _ in range(2))
        y = model(x.requires_grad_())
        y.backward(cotangent)
        optimizer.step()
        optimizer.zero_grad()
        assert x.grad is not None
        seen += [y.detach(), x.grad, *(value.clone() for value in model.state_dict().values())]
    return seen


def count_recomputations(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The activations that later backward passes make."""
    made: list[Tensor] = []

    find = recomputed.Recomputations.of

    def counted(self: recomputed.Recomputations, x: Tensor) -> recomputed.Recomputation | None:
        found = find(self, x)
        if found is None:
            return None

        def function(*inputs: Tensor) -> Tensor:
            made.append(inputs[0])
            return found.function(*inputs)

        return recomputed.Recomputation(function, found.inputs)

    monkeypatch.setattr(recomputed.Recomputations, "of", counted)
    return made


@pytest.mark.parametrize("name", [*ACTIVATIONS, *OTHERS])
def test_the_bits_are_those_of_kept_columns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    activation = {**ACTIVATIONS, **OTHERS}[name]
    expected = trained(activation, "delayed", recomputes=False)
    made = count_recomputations(monkeypatch)
    got = trained(activation, "delayed", recomputes=True)
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    assert len(made) == (STEPS if name in ACTIVATIONS else 0)


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_under_other_recipes(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained(F.gelu, recipe, recomputes=False)
    made = count_recomputations(monkeypatch)
    got = trained(F.gelu, recipe, recomputes=True)
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    assert len(made) == STEPS


def recomputing(**settings: Any) -> MLP:
    torch.manual_seed(0)
    model: Any = MLP(F.gelu).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    model, _ = fp8_megatron.initialize(model, optimizer, recompute_activations=True, **settings)
    result: MLP = model
    return result


def test_an_input_changed_before_backward_is_an_error() -> None:
    model = recomputing()
    z = model.fc1(torch.randn(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True))
    y = model.fc2(F.gelu(z))
    with torch.no_grad():
        z.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_compiled_models_are_refused() -> None:
    model = recomputing()
    x = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(Exception, match="recompute_activations does nothing under torch"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(x)


@pytest.mark.parametrize("name", ["gelu", "relu"])
def test_a_setting_that_does_nothing_is_told_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """At the first step that has a gradient."""
    model: Any = MLP({**ACTIVATIONS, **OTHERS}[name]).to(torch.bfloat16)
    optimizer: Any = torch.optim.AdamW(model.parameters())
    model, optimizer = fp8_megatron.initialize(model, optimizer, recompute_activations=True)
    optimizer.step()
    assert not caplog.records
    for _ in range(2):
        model(torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    told = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert told == ["recompute_activations does nothing"] * (name == "relu")


def test_without_a_layer_in_fp8_it_is_told_at_once(caplog: pytest.LogCaptureFixture) -> None:
    model = MLP(F.gelu).to(torch.bfloat16)
    fp8_megatron.initialize(
        model, torch.optim.AdamW(model.parameters()), recompute_activations=True, filter=lambda name, layer: False
    )
    assert "the model has no FP8Linear" in caplog.text


def test_layers_that_are_in_fp8_already_are_refused() -> None:
    model = torch.nn.Sequential(FP8Linear(WIDTH, WIDTH))
    with pytest.raises(UserError, match="give recipe, filter and recompute_activations to replace_linears"):
        fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters()), recompute_activations=True)
