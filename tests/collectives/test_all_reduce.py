"""all_reduce_mean_fp8 on real ranks against the mean in float64.

Noise of independent values: each rank's rounding to E4M3 leaves 31.5 dB, and so does their sum, in which signal and
noise powers both add up; rounding the mean once more adds the same noise again: 28.5 dB. Where ranks share a gradient
of power 1 beside their own noise of power s, the mean of N has power 1 + s/N and the averaged roundings (1 + s)/N of
one rounding's. The mean lies between the numbers of E4M3 on a lattice of N points, whose rounding has up to 1 + 2/N²
times the noise of a continuous value's (at N = 2 half of them are ties). Together
31.5 dB − 10·log10((1 + s)/(N + s) + 1 + 2/N²), better with more ranks. Tests allow 0.5 dB for the sample.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fp8_megatron.collectives.all_reduce import all_reduce_mean_fp8
from fp8_megatron.collectives.wire import WireTensor
from fp8_megatron.formats import GRAD_BLOCK, StorageDtype
from fp8_megatron.quantization.stats import snr_db
from tests.harness.ranks import RankPool, on_default_group

WORLDS = pytest.mark.parametrize("world", [2, 4])
SIZE = 40_000


def _reduce(group: torch.distributed.ProcessGroup, values: list[Tensor]) -> Tensor:
    return all_reduce_mean_fp8(values[group.rank()], group)


def reduced(ranks: RankPool, values: list[Tensor]) -> Tensor:
    """The result of one value per rank; asserts that every rank has the same bits."""
    results = ranks.run(on_default_group, _reduce, values, num_ranks=len(values))
    for result in results:
        assert result.dtype == torch.float32 and result.shape == values[0].shape
        assert torch.equal(result.view(torch.int32), results[0].view(torch.int32))
    return results[0]


def mean_of(values: list[Tensor]) -> Tensor:
    return torch.stack(values).double().mean(dim=0)


def gaussians(world: int, size: int = SIZE, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for _ in range(world)]


@WORLDS
def test_independent_values(ranks: RankPool, world: int) -> None:
    values = gaussians(world)
    assert snr_db(reduced(ranks, values), mean_of(values)) > 28.0


@WORLDS
def test_values_of_very_different_ranks(ranks: RankPool, world: int) -> None:
    """Magnitudes of 1, 10⁻², 10⁻⁴ …: the largest rank's noise is all that counts, as if it were alone."""
    values = [value * 10.0 ** (-2 * rank) for rank, value in enumerate(gaussians(world))]
    assert snr_db(reduced(ranks, values), mean_of(values)) > 28.0


@WORLDS
def test_agreeing_values(ranks: RankPool, world: int) -> None:
    common, noise_power = gaussians(1, seed=1)[0], 0.25  # with less, the ranks' roundings agree too
    values = [common + math.sqrt(noise_power) * noise for noise in gaussians(world)]
    expected_db = 31.5 - 10 * math.log10((1 + noise_power) / (world + noise_power) + 1 + 2 / world**2)
    assert snr_db(reduced(ranks, values), mean_of(values)) > expected_db - 0.5


@WORLDS
def test_blocks_of_very_different_size(ranks: RankPool, world: int) -> None:
    """Each block has its own scale: small blocks (10⁻⁸) are as good as large ones."""
    sizes = torch.logspace(-8, 2, SIZE // GRAD_BLOCK + 1).repeat_interleave(GRAD_BLOCK)[:SIZE]
    values = [value * sizes for value in gaussians(world)]
    result, mean = reduced(ranks, values), mean_of(values)
    for part, exact in zip(result.split(4000), mean.split(4000), strict=True):
        assert snr_db(part, exact) > 27.5  # 0.5 dB more for the smaller sample


@WORLDS
@pytest.mark.parametrize("size", [1, 127, 128, 129, 1000, 4 * 128, 5001])
def test_sizes_that_are_no_multiple_of_the_blocks(ranks: RankPool, world: int, size: int) -> None:
    values = gaussians(world, size)
    result, mean = reduced(ranks, values), mean_of(values)
    # Element by element: half a step of each rank's rounding, and of the mean's, relative to its block's amax (a step
    # is at most 2⁻³ of the value, at most 2⁻³ of the amax).
    block_amax = torch.stack(values).abs().amax()
    assert (result - mean).abs().max() <= block_amax * 2 * 2**-4
    if size >= 1000:
        assert snr_db(result, mean) > 27.5


@WORLDS
def test_bf16_values(ranks: RankPool, world: int) -> None:
    values = [value.bfloat16() for value in gaussians(world, 1000)]
    assert snr_db(reduced(ranks, values), mean_of(values)) > 27.5


@WORLDS
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_value_makes_exactly_its_block_nan(ranks: RankPool, world: int, bad: float) -> None:
    values = gaussians(world, 5001)
    position = 3 * GRAD_BLOCK + 17
    values[1][position] = bad
    values[0][5000] = bad  # in the last block, which is padded
    result = reduced(ranks, values)
    expected = torch.zeros(5001, dtype=torch.bool)
    expected[3 * GRAD_BLOCK : 4 * GRAD_BLOCK] = True
    expected[5000 // GRAD_BLOCK * GRAD_BLOCK :] = True
    assert torch.equal(result.isnan(), expected) and result[~expected].isfinite().all()


@WORLDS
def test_zero_ranks(ranks: RankPool, world: int) -> None:
    values = gaussians(world)
    for value in values[1:]:
        value.zero_()
    assert snr_db(reduced(ranks, values), mean_of(values)) > 28.0
    values[0].zero_()
    assert not reduced(ranks, values).any()


@WORLDS
def test_an_outlier_hurts_its_block_only(ranks: RankPool, world: int) -> None:
    values = gaussians(world)
    values[1][1000] = -1e4
    result, mean = reduced(ranks, values), mean_of(values)
    assert abs(result[1000].item() - mean[1000].item()) <= 1e4 / world * 2 * 2**-4
    block = slice(1000 // GRAD_BLOCK * GRAD_BLOCK, (1000 // GRAD_BLOCK + 1) * GRAD_BLOCK)
    outside = torch.ones(SIZE, dtype=torch.bool)
    outside[block] = False
    assert snr_db(result[outside], mean[outside]) > 28.0
    # Inside, E4M3's subnormal step of 2⁻⁹ with the outlier's scale, 2⁵ ≥ 10⁴ / 448: rounding moves a value by at most
    # half of 2⁻⁴, or of 2⁻³ of itself, on each rank and once more on the mean.
    inside = (result[block] - mean[block]).abs()
    inside[1000 % GRAD_BLOCK] = 0.0
    largest = torch.stack(values)[:, block].abs().sort().values[:, -2].max().item()
    assert inside.max() <= 2 * max(2**-5, 2**-4 * largest)


def test_storing_the_mean_in_fp8_again_is_exact(ranks: RankPool) -> None:
    """Power-of-two scales: what came off the wire is stored without a third rounding."""
    result = reduced(ranks, gaussians(2, 64 * GRAD_BLOCK))
    stored = WireTensor.empty(result.numel(), StorageDtype.FP8, result.device)
    stored.store_(result)
    assert torch.equal(stored.load(), result)


def test_one_rank_changes_nothing(ranks: RankPool) -> None:
    values = gaussians(1)
    assert torch.equal(reduced(ranks, values), values[0])
