"""Fixtures of the whole suite."""

from collections.abc import Iterator

import pytest

from tests.harness.ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Up to four ranks on this machine, kept alive between tests."""
    with RankPool(4) as pool:
        yield pool
