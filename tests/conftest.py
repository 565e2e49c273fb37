"""Fixtures of the whole suite."""

import gc
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Executor

import pytest

# Before torch is imported. Threads that share a core spin while they wait for each other: with two, the same tests take
# three times the processor time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from tests.harness.forked import fork_server
from tests.harness.ranks import RankPool

_THREADS = "/proc/self/task"
_MANY_THREADS = 40

# Programs that tests start obey a terminal that closes, also where the tests themselves run under nohup.
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test for a GPU is left out where there is none."""
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("needs a GPU with FP8 tensor cores")


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """A test draws the same numbers alone, in any order and on any machine."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _few_threads() -> Iterator[None]:
    """Process groups end that a model of an earlier test holds: each has a thread, which wakes every 10 ms."""
    yield
    if os.path.isdir(_THREADS) and len(os.listdir(_THREADS)) > _MANY_THREADS:
        gc.collect()


def pytest_collection_finish() -> None:
    """What is there before the first test is not looked through again for cycles."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Up to four ranks on this machine, kept alive between tests."""
    with RankPool(4) as pool:
        yield pool


@pytest.fixture(scope="session")
def forks() -> Iterator[Executor]:
    """A process that has imported what programs do; see `tests.harness.forked`."""
    with fork_server() as server:
        yield server
