"""All-gathers move bytes: every code arrives as it was, in rank order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp8_megatron.collectives.all_gather import all_gather_into
from fp8_megatron.device.group import max_over_group_
from fp8_megatron.dtypes import E4M3
from tests.harness.ranks import RankPool, on_default_group


def _gather_into(
    group: torch.distributed.ProcessGroup, shards: Tensor, dtype: torch.dtype, in_place: bool
) -> tuple[bool, Tensor]:
    shard = shards[group.rank()].view(dtype)
    full = torch.zeros(group.size() * shard.numel(), dtype=dtype)
    if in_place:
        own = full[group.rank() * shard.numel() : (group.rank() + 1) * shard.numel()]
        own.copy_(shard)
        shard = own
    result = all_gather_into(full, shard, group).wait()
    return result.data_ptr() == full.data_ptr(), full.view(torch.uint8)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("in_place", [False, True], ids=["apart", "in place"])
@pytest.mark.parametrize("dtype", [E4M3, torch.bfloat16, torch.float32, torch.int8], ids=str)
def test_any_dtype_arrives_in_the_callers_memory(
    ranks: RankPool, world: int, in_place: bool, dtype: torch.dtype
) -> None:
    shards = torch.randint(0, 256, (world, 512), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for same_memory, gathered in ranks.run(on_default_group, _gather_into, shards, dtype, in_place, num_ranks=world):
        assert same_memory and torch.equal(gathered, shards.view(-1))


def _share(group: torch.distributed.ProcessGroup) -> Tensor:
    amax = torch.tensor([[1.0, 5.0], [3.0, 2.0]])[group.rank()]
    max_over_group_(amax, group)
    return amax


def test_scale_sync_takes_the_maximum(ranks: RankPool) -> None:
    for amax in ranks.run(on_default_group, _share, num_ranks=2):
        assert torch.equal(amax, torch.tensor([3.0, 5.0]))
