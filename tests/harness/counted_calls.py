"""How many operators are called. Each is a launch or more, and small models wait for the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from fp8_megatron.kernels import ops, registration


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
