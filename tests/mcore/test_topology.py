"""How ranks share parameters, according to megatron-core and its layers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8_megatron.config.schema import ParallelConfig
from fp8_megatron.mcore.topology import Topology
from fp8_megatron.sharding.replicas import Replicas

CPU = torch.device("cpu")


class Group:
    """A group as this rank sees it."""

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


def topology(*, tp: int = 1, tp_rank: int = 0, pp: int = 1, pp_rank: int = 0) -> Topology:
    ends: Any = Group(2, int(pp_rank > 0)) if pp > 1 else None
    groups: Any = SimpleNamespace(tp=Group(tp, tp_rank), pp=Group(pp, pp_rank), embd=ends)
    return Topology(
        0,
        tp * pp,
        groups,
        groups.tp,
        Replicas.of(None, CPU),
        ParallelConfig(pipeline_model_parallel_size=pp).pipeline_layout(pp),
    )


def parameter(**tags: bool) -> torch.nn.Parameter:
    param = torch.nn.Parameter(torch.ones(4))
    for name, value in tags.items():
        setattr(param, name, value)
    return param


@pytest.mark.parametrize("rank", [0, 1])
def test_tensor_parallel_ranks_hold_parts_or_duplicates(rank: int) -> None:
    place = topology(tp=2, tp_rank=rank)
    split = place.sharing_of(parameter(tensor_model_parallel=True))
    assert split.duplicates is None and split.summed_over is None and split.counts_in_norm
    norm = place.sharing_of(parameter(tensor_model_parallel=False))
    assert norm.duplicates is place.tp and norm.summed_over is None and norm.counts_in_norm == (rank == 0)
    over_sequence = place.sharing_of(parameter(sequence_parallel=True))
    assert over_sequence.summed_over is place.tp and over_sequence.counts_in_norm == (rank == 0)
    assert len({split, norm, over_sequence}) == 3


def test_one_rank_keeps_the_same_spaces() -> None:
    """What is split and what is not lies apart for every tensor-parallel size, one too."""
    place = topology()
    assert place.sharing_of(parameter()) != place.sharing_of(parameter(tensor_model_parallel=True))
    assert place.sharing_of(parameter()).counts_in_norm


@pytest.mark.parametrize(("stage", "counts"), [(0, True), (3, False)])
def test_both_ends_of_a_pipeline_hold_a_tied_embedding(stage: int, counts: bool) -> None:
    place = topology(pp=4, pp_rank=stage)
    tied = place.sharing_of(parameter(tensor_model_parallel=True, shared_embedding=True))
    assert tied.summed_over is place.embedding is not None and tied.counts_in_norm == counts
