"""Fixtures shared by tests of collectives."""

from __future__ import annotations

import pytest

from fp8_megatron.graphs import exchanges
from fp8_megatron.graphs.exchanges import Recordable


@pytest.fixture
def recordables(monkeypatch: pytest.MonkeyPatch) -> dict[str, Recordable]:
    """The exchanges that a test registers, by name, until it ends."""
    registered: dict[str, Recordable] = {}
    monkeypatch.setattr(exchanges, "_recordables", registered)
    return registered
