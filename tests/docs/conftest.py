"""What a session collects, before slow tests are left out."""

from __future__ import annotations

import pytest

from tests.docs.clumsy_cases import Collected, collected

COLLECTED = pytest.StashKey[list[Collected]]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests for the table of cases (`clumsy_cases`)."""
    config.stash[COLLECTED] = collected(items)
