"""Fixtures of the tests over several GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.ranks import RankPool


@pytest.fixture(scope="module")
def gpus() -> Iterator[RankPool]:
    """Up to four ranks, one a GPU, kept alive between the tests of a file."""
    with RankPool(4, on_gpus=True) as pool:
        yield pool
