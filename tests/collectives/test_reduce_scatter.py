"""reduce_scatter_mean: the sum of many ranks keeps one rank's rounding, on virtual and on real ranks.

Signal and rounding noise of independent values both add up, so a sum keeps the 31.5 dB of one rounding to E4M3 however
many ranks there are, and correlated values do better. Gradients here have eight tensors a decade apart, and blocks that
spread over two decades within a tensor: some thirty of its 64 blocks carry a tensor's power, about 4,000 values whose
roundings leave the ratio uncertain by 0.2 dB; the worst of eight is asked for 30.5.
"""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import Tensor

from fp8_megatron.collectives.reduce_scatter import reduce_scatter_mean
from fp8_megatron.collectives.wire import WireTensor, accumulate_rows_
from fp8_megatron.dtypes import GRAD_BLOCK, StorageDtype
from fp8_megatron.quantization.stats import snr_db
from tests.collectives.simulated_reductions import GradientSource, worst_snr_db
from tests.harness.ranks import RankPool, on_default_group

CPU = torch.device("cpu")
WORLDS = pytest.mark.parametrize("world", [2, 4])
FP8, BF16, FP32 = StorageDtype.FP8, StorageDtype.BF16, StorageDtype.FP32


@functools.cache
def gradients(world: int, correlated: bool = False) -> Tensor:
    """[world, n]; not to be written to."""
    return GradientSource("correlated" if correlated else "uncorrelated").draw(world)


def virtual_mean(values: Tensor, dtype: StorageDtype = FP8) -> Tensor:
    """The shards of all ranks for values [d, n], through the code of the real collective."""
    num_ranks, numel = values.shape
    rows = WireTensor.empty(values.numel(), dtype, CPU)
    rows.store_(values.reshape(-1))
    mean = torch.empty(numel)
    accumulate_rows_(rows, num_ranks, mean, factor=1.0 / num_ranks, add=False)
    return mean


@pytest.mark.parametrize("correlated", [False, True], ids=["uncorrelated", "correlated"])
@pytest.mark.parametrize("world", [2, 4, 8, 32, 64])
def test_sum_of_virtual_ranks(world: int, correlated: bool) -> None:
    values = gradients(world, correlated)
    assert worst_snr_db(virtual_mean(values), values.double().mean(dim=0)) > 30.5


def _reduce(group: torch.distributed.ProcessGroup, values: Tensor, dtype: StorageDtype) -> Tensor:
    sent, received = (WireTensor.empty(values.shape[1], dtype, CPU) for _ in range(2))
    sent.store_(values[group.rank()])
    return reduce_scatter_mean(sent, received, group).wait()


def reduced(ranks: RankPool, values: Tensor, dtype: StorageDtype = FP8) -> Tensor:
    """The ranks' shards, put together."""
    shards = ranks.run(on_default_group, _reduce, values, dtype, num_ranks=values.shape[0])
    assert all(shard.shape == (values.shape[1] // values.shape[0],) for shard in shards)
    return torch.cat(shards)


@WORLDS
@pytest.mark.parametrize("dtype", [FP8, BF16, FP32])
def test_every_rank_gets_its_shard(ranks: RankPool, world: int, dtype: StorageDtype) -> None:
    """Shards in rank order make the whole; real ranks agree with virtual ones, bitwise. BF16 rounds to 8 bits where
    E4M3 rounds to 4: 24 dB more. FP32's noise is that of d additions, 138 dB or more."""
    values = gradients(world)
    result = reduced(ranks, values, dtype)
    assert result.dtype == torch.float32 and torch.equal(result, virtual_mean(values, dtype))
    assert worst_snr_db(result, values.double().mean(dim=0)) > {FP8: 30.5, BF16: 54.0, FP32: 130.0}[dtype]


@pytest.mark.parametrize("world", [1, 3])
def test_one_rank_and_three(ranks: RankPool, world: int) -> None:
    """One rank gets its own gradient as it was rounded; 1/3 is rounded to FP32 and nothing else is different."""
    values = gradients(world)[:, : 3 * 1024]
    result = reduced(ranks, values)
    assert torch.equal(result, virtual_mean(values))
    assert snr_db(result, values.double().mean(dim=0)) > 30.0


def _reduce_three_times(group: torch.distributed.ProcessGroup, values: Tensor) -> tuple[list[Tensor], Tensor]:
    """Sums of the first one, two and three gradients [3, d, n], through one pair of buffers."""
    sent, received = (WireTensor.empty(values.shape[2], FP8, CPU) for _ in range(2))
    assert sent.scales is not None and received.scales is not None
    places = [part.data_ptr() for part in (sent.payload, sent.scales, received.payload, received.scales)]
    accumulator = torch.full((values.shape[2] // group.size(),), math.nan)
    sums = []
    for index, value in enumerate(values):
        sent.store_(value[group.rank()])
        before = sent.payload.view(torch.uint8).clone()
        reduce_scatter_mean(sent, received, group).wait_into(accumulator, add=index > 0)
        assert torch.equal(sent.payload.view(torch.uint8), before), "the flat form leaves what it sent alone"
        sums.append(accumulator.clone())
    assert places == [part.data_ptr() for part in (sent.payload, sent.scales, received.payload, received.scales)]
    return sums, received.load()


@WORLDS
def test_buffers_are_reused(ranks: RankPool, world: int) -> None:
    """The first reduction overwrites what is in the accumulator, the others add to it; runs repeat bit by bit."""
    source = GradientSource("uncorrelated", blocks_per_tensor=8)
    values = torch.stack([source.draw(world) for _ in range(3)])
    results = ranks.run(on_default_group, _reduce_three_times, values, num_ranks=world)
    for count in range(1, 4):
        total = torch.cat([sums[count - 1] for sums, _ in results])
        assert worst_snr_db(total, values[:count].double().mean(dim=1).sum(dim=0)) > 30.0  # fewer blocks: 0.5 dB off
    shard = values.shape[2] // world
    for rank, (_, received) in enumerate(results):  # the bytes went into the caller's memory
        own = slice(rank * shard, (rank + 1) * shard)
        expected = torch.stack([virtual_mean(values[-1, r : r + 1])[own] for r in range(world)])
        assert torch.equal(received.view(world, shard), expected)
    again = ranks.run(on_default_group, _reduce_three_times, values, num_ranks=world)
    for (sums, _), (sums_again, _) in zip(results, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(sums, sums_again, strict=True))


def _reduce_two_at_once(group: torch.distributed.ProcessGroup, values: Tensor) -> list[Tensor]:
    works = []
    for value in values:
        sent, received = (WireTensor.empty(values.shape[2], FP8, CPU) for _ in range(2))
        sent.store_(value[group.rank()])
        works.append(reduce_scatter_mean(sent, received, group))
    return [work.wait() for work in works]


def test_two_in_flight(ranks: RankPool) -> None:
    values = torch.stack([gradients(2), gradients(2).flip(1)])
    results = ranks.run(on_default_group, _reduce_two_at_once, values, num_ranks=2)
    for index in range(2):
        assert torch.equal(torch.cat([result[index] for result in results]), virtual_mean(values[index]))


@WORLDS
def test_zero_ranks(ranks: RankPool, world: int) -> None:
    values = gradients(world).clone()
    values[1:] = 0.0
    assert worst_snr_db(reduced(ranks, values), values.double().mean(dim=0)) > 30.5
    values[0] = 0.0
    assert not reduced(ranks, values).any()


@WORLDS
def test_an_outlier_hurts_its_block_only(ranks: RankPool, world: int) -> None:
    """10⁴ among values of size 1: the block's scale is 2⁵, so that others are rounded to half of max(2⁻⁴, 2⁻³ |x|)."""
    values = torch.randn(world, 64 * GRAD_BLOCK, generator=torch.Generator().manual_seed(3))
    clean = reduced(ranks, values)
    values[1, 1000] = 1e4
    result, exact = reduced(ranks, values), values.double().mean(dim=0)
    block = slice(1000 // GRAD_BLOCK * GRAD_BLOCK, (1000 // GRAD_BLOCK + 1) * GRAD_BLOCK)
    outside = torch.ones(values.shape[1], dtype=torch.bool)
    outside[block] = False
    assert torch.equal(result[outside], clean[outside])
    assert abs(result[1000] - exact[1000]) <= 1e4 / world * 2**-4
    error = (result - exact)[block].abs()
    error[1000 % GRAD_BLOCK] = 0.0
    bound = torch.maximum(torch.tensor(2**-5), 2**-4 * values[:, block].abs()).mean(dim=0)
    assert (error <= bound + 1e-6).all() and error.max() > 2**-4 / 8  # worse than without: 2⁻⁶ steps around 1


@WORLDS
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_value_makes_exactly_its_block_nan(ranks: RankPool, world: int, bad: float) -> None:
    values = gradients(world).clone()
    values[world - 1, 3 * GRAD_BLOCK + 17] = bad
    expected = torch.zeros(values.shape[1], dtype=torch.bool)
    expected[3 * GRAD_BLOCK : 4 * GRAD_BLOCK] = True
    result = reduced(ranks, values)
    assert torch.equal(result.isnan(), expected) and result[~expected].isfinite().all()


def test_a_bad_value_in_bf16_stays_an_element(ranks: RankPool) -> None:
    values = gradients(2).clone()
    values[1, 5], values[0, 9] = math.nan, math.inf
    result = reduced(ranks, values, BF16)
    assert result[5].isnan() and result[9] == math.inf
    assert result.isfinite().sum() == result.numel() - 2


def test_shards_that_cut_blocks_are_refused(ranks: RankPool) -> None:
    with pytest.raises(RuntimeError, match="384 elements over 2 ranks are no shards of whole blocks of 128"):
        reduced(ranks, gradients(2)[:, :384])
