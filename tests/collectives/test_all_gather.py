"""The FP8 all-gather moves bytes: every code arrives as it was, in rank order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp8_megatron.collectives.all_gather import all_gather_fp8
from fp8_megatron.collectives.scale_sync import max_over_group_
from fp8_megatron.formats import E4M3, E5M2
from fp8_megatron.testing.ranks import RankPool, on_default_group


def _gather(group: torch.distributed.ProcessGroup, codes: Tensor, dtype: torch.dtype) -> tuple[torch.dtype, Tensor]:
    gathered = all_gather_fp8(codes[group.rank()].view(dtype), group).wait()
    return gathered.dtype, gathered.view(torch.uint8)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_every_code_arrives(ranks: RankPool, world: int, dtype: torch.dtype) -> None:
    codes = torch.stack([torch.arange(256, dtype=torch.uint8).roll(rank).view(16, 16) for rank in range(world)])
    for gathered_dtype, gathered in ranks.run(on_default_group, _gather, codes, dtype, num_ranks=world):
        assert gathered_dtype == dtype and torch.equal(gathered, codes.view(16 * world, 16))


def _share(group: torch.distributed.ProcessGroup) -> Tensor:
    amax = torch.tensor([[1.0, 5.0], [3.0, 2.0]])[group.rank()]
    max_over_group_(amax, group)
    return amax


def test_scale_sync_takes_the_maximum(ranks: RankPool) -> None:
    for amax in ranks.run(on_default_group, _share, num_ranks=2):
        assert torch.equal(amax, torch.tensor([3.0, 5.0]))
