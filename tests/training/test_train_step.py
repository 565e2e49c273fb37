"""Values that ranks exchange in a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8_megatron.training.train_step import _over_ranks
from tests.harness.ranks import RankPool, on_default_group


def _figures(group: torch.distributed.ProcessGroup) -> dict[str, list[float]]:
    rank = group.rank()
    topology = SimpleNamespace(world_size=group.size(), rank=rank)
    state: Any = SimpleNamespace(topology=topology, device=torch.device("cpu"))
    peak = [3.0, 7.5, 5.0][rank]
    figures = _over_ranks(torch.tensor([rank + 1.0]), state, wants_stop=rank != 1, peak_memory_gib=peak)
    return {name: figure.tolist() for name, figure in figures.items()}


@pytest.mark.parametrize(
    ("num_ranks", "expected"),
    [
        (1, {"loss": [1.0], "num_stop_requests": [1.0], "peak_memory_gib": [3.0]}),
        (3, {"loss": [6.0], "num_stop_requests": [2.0], "peak_memory_gib": [7.5]}),
    ],
)
def test_sums_and_the_largest_peak_are_everywhere(ranks: RankPool, num_ranks: int, expected: Any) -> None:
    assert ranks.run(on_default_group, _figures, num_ranks=num_ranks) == [expected] * num_ranks
