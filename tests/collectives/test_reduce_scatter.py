"""reduce_scatter_mean_fp8: the sum of many ranks keeps more than one rank's rounding, on virtual and on real ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp8_megatron.collectives.reduce_scatter import reduce_scatter_mean_fp8
from fp8_megatron.collectives.wire import mean_of_packed, pack, shard_size
from fp8_megatron.formats import GRAD_BLOCK
from fp8_megatron.quantization.stats import snr_db
from fp8_megatron.testing.ranks import RankPool, on_default_group


def gradients(world: int, size: int, seed: int = 0) -> list[Tensor]:
    """Independent gradients whose magnitudes spread over five binades from rank to rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) * 2.0 ** (rank % 5 - 2) for rank in range(world)]


@pytest.mark.parametrize("world", [2, 4, 8, 32, 64])
def test_sum_of_virtual_ranks(world: int) -> None:
    """Through the code of the real collective. Signal and rounding noise of independent values both add, so the sum
    keeps the 31.5 dB of one rounding to E4M3; 0.5 dB is the sample's, 1 dB less is the issue of a wrong block scale."""
    size = 64 * GRAD_BLOCK
    values = gradients(world, size)
    received = torch.cat([pack(value.view(1, -1)) for value in values])
    expected = torch.stack(values).double().mean(dim=0)
    assert snr_db(mean_of_packed(received, size), expected) > 31.0


def test_bytes_on_the_wire() -> None:
    """1 byte an element and one FP32 scale for 128."""
    assert pack(torch.randn(4, 1280)).numel() == 4 * (1280 + 40)


def _reduce_scatter(group: torch.distributed.ProcessGroup, values: list[Tensor]) -> Tensor:
    return reduce_scatter_mean_fp8(values[group.rank()], group).wait()


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("size", [40_000, 128, 1000])
def test_every_rank_gets_its_shard(ranks: RankPool, world: int, size: int) -> None:
    """Shards in rank order make the whole, padding is zero, and the real ranks agree with the virtual ones, bitwise."""
    values = gradients(world, size)
    shards = ranks.run(on_default_group, _reduce_scatter, values, num_ranks=world)
    shard = shard_size(size, world)
    assert all(result.shape == (shard,) and result.dtype == torch.float32 for result in shards)
    padded = [torch.nn.functional.pad(value, (0, world * shard - size)) for value in values]
    packed = torch.stack([pack(value.view(world, shard)) for value in padded])
    for rank, result in enumerate(shards):
        assert torch.equal(result, mean_of_packed(packed[:, rank], shard))
    assert torch.cat(shards)[size:].eq(0).all()
    assert snr_db(torch.cat(shards)[:size], torch.stack(values).double().mean(dim=0)) > 30.0
