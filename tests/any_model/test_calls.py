"""How many operators a layer takes in a step. Each is a launch or more, and small models wait for the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fp8_megatron
from fp8_megatron.kernels import ops, registration

CASTS_OF_TENSORS = {"quantize_with_scale": 1, "quantize_grad_output": 1}
GEMMS = {"scaled_mm": 1, "scaled_mm_into_": 2}
#: By level, the calls of one layer's forward and backward under delayed scaling.
EXPECTED = {
    # The weight is cast with a scale that the optimizer keeps, in forward and in backward.
    "O1": Counter(CASTS_OF_TENSORS | GEMMS | {"quantize_weight": 2}),
    "O2": Counter(CASTS_OF_TENSORS | GEMMS | {"quantize_weight": 2}),
    "O3": Counter(CASTS_OF_TENSORS | GEMMS | {"transpose": 1}),
}
STORED = Counter({"quantize_blockwise_": 1})


@pytest.mark.parametrize("level", EXPECTED)
def test_of_one_layer(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    user = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = fp8_megatron.initialize(model, user, opt_level=level, recipe="delayed")

    def forward_and_backward() -> None:
        x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
        y = model(x)
        y.backward(torch.randn_like(y))

    for _ in range(2):  # the first step has no delayed scales
        forward_and_backward()
        optimizer.step()
        optimizer.zero_grad()
    calls = count_calls(monkeypatch)
    forward_and_backward()
    assert Counter({name: number / 2 for name, number in calls.items()}) == EXPECTED[level] + STORED


def count_calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Later calls of operators, by name."""
    calls: Counter[str] = Counter()

    def counted(name: str, operator: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            calls[name] += 1
            return operator(*arguments, **named)

        return call

    for name in registration.operators():
        monkeypatch.setattr(ops, name, counted(name, getattr(ops, name)))
    return calls
