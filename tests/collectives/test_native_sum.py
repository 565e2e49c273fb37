"""Mode nccl: the emulated ring with auto-scaling. It is worse than the default, as expected.

Each hop rounds a partial sum to E4M3: the noise of N − 1 roundings of sums of 2 … N independent gradients, against a
signal of N of them, is (N + 1)/2 roundings' worth and one more for the gradients' own, where the all-to-all has one. So
10·log10((N + 3)/2) dB are lost: 5.4, 7.4, 12.4 and 15.3 dB at N = 4, 8, 32 and 64, of 31.5 dB. Small values round
coarser in a sum that saturates at the amax's scale, so 1.5 dB are allowed below that.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fp8_megatron.collectives.autoscale import AutoScale
from fp8_megatron.collectives.native_sum import native_reduce_scatter_mean, ring_sum
from fp8_megatron.collectives.wire import WireTensor
from fp8_megatron.dtypes import E4M3, GRAD_BLOCK, StorageDtype
from tests.collectives.simulated_reductions import NUM_TENSORS, GradientSource, reduce_nccl, worst_snr_db
from tests.harness.ranks import RankPool, on_default_group

CPU = torch.device("cpu")


@pytest.mark.parametrize("world", [4, 8, 32, 64])
def test_emulated_ring(world: int) -> None:
    """At μ = 1/N, the paper's pre-scaling, nothing saturates."""
    values = GradientSource("uncorrelated", blocks_per_tensor=16).draw(world)
    mean, _ = reduce_nccl(values, initial_mu=1.0 / world)
    expected_db = 31.5 - 10 * math.log10((world + 3) / 2)
    assert expected_db - 1.5 < worst_snr_db(mean, values.double().mean(dim=0)) < expected_db + 1.5


def test_ring_order_and_rounding() -> None:
    """16 + 1 is half way to E4M3's next number, 18, and goes to the even 16; 1 + 1 + 16 is 18. 448 + 448 saturates
    at 448, from which a later 64 is taken away, but not an earlier one."""
    rows = torch.tensor([[16.0, 448.0], [1.0, 448.0], [1.0, -64.0]]).to(E4M3)
    sums = [ring_sum(rows, first).float().tolist() for first in range(3)]
    assert sums == [[16.0, 384.0], [18.0, 448.0], [16.0, 448.0]]


def _reduce(
    group: torch.distributed.ProcessGroup, values: Tensor, num_tensors: int, initial_mu: float, times: int
) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """The last of several reductions of the same values, and the state of μ after each."""
    numel = values.shape[1]
    sent, received = (WireTensor.empty(numel, StorageDtype.FP8, CPU) for _ in range(2))
    num_blocks = numel // GRAD_BLOCK
    block_tensor = (torch.arange(num_blocks) // (num_blocks // num_tensors)).int()
    autoscale = AutoScale(num_tensors, block_tensor, CPU, initial_mu=initial_mu)
    mean = torch.zeros(numel // group.size())
    states = []
    for _ in range(times):
        sent.store_(values[group.rank()])
        native_reduce_scatter_mean(sent, received, group, autoscale).wait_into(mean, add=False)
        states.append({"mu": autoscale.mu.clone(), "saturated": autoscale.saturated_fraction.clone()})
    return mean, states


def reduced(
    ranks: RankPool, values: Tensor, *, num_tensors: int = NUM_TENSORS, initial_mu: float = 1.0, times: int = 1
) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """The ranks' shards, put together; asserts that they agree on μ."""
    results = ranks.run(
        on_default_group, _reduce, values, num_tensors, initial_mu, times, num_ranks=values.shape[0], timeout_seconds=60
    )
    states = results[0][1]
    for _, others in results:
        assert all(torch.equal(a["mu"], b["mu"]) for a, b in zip(states, others, strict=True))
    return torch.cat([mean for mean, _ in results]), states


@pytest.mark.parametrize("world", [1, 2, 4])
def test_real_ranks_agree_with_virtual_ones(ranks: RankPool, world: int) -> None:
    """Bitwise, and so does μ, over several reductions."""
    values = GradientSource("correlated", blocks_per_tensor=8).draw(world)
    mean, states = reduced(ranks, values, times=4)
    virtual, autoscale = reduce_nccl(values, num_reductions=4)
    assert torch.equal(mean, virtual) and torch.equal(states[-1]["mu"], autoscale.mu)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("mu", [0.25, 1.0, 4.0])
def test_mu_is_not_in_the_result(ranks: RankPool, world: int, mu: float) -> None:
    """Small integers in the 15 blocks after the amax's: E4M3 keeps them and their sums at any μ, bit by bit. The amax
    of 8 makes the scale 8/448/μ, rounded up to 2⁻⁷ at μ = 4, where sums up to 448 · 2⁻⁷ = 3.5 fit."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-2, 3, (world, 16 * GRAD_BLOCK), generator=generator).float() * (2.0 / world / 2)
    values[:, 0] = 8.0
    mean, _ = reduced(ranks, values, num_tensors=1, initial_mu=mu)
    expected = values.double().mean(dim=0).float()
    assert torch.equal(mean[1:], expected[1:])
    assert mean[0] <= 8.0 and (mean[0] < 8.0) == (8.0 * world > 448 * _scale(8.0, mu))


def _scale(amax: float, mu: float) -> float:
    return 2.0 ** math.ceil(math.log2(amax / 448 / mu))


@pytest.mark.parametrize("magnitude", [1e-30, 1e30])
@pytest.mark.parametrize("mu", [0.25, 1.0])
def test_any_magnitude(ranks: RankPool, magnitude: float, mu: float) -> None:
    """A scale applied twice or the wrong way round would overflow or vanish here; two ranks lose 10·log10(5/2) dB. At
    μ = 1 the sum saturates where both are near the amax, so that only μ = 1/4 keeps it all."""
    values = GradientSource("uncorrelated", blocks_per_tensor=16).draw(2) * magnitude
    mean, _ = reduced(ranks, values, initial_mu=mu)
    assert worst_snr_db(mean, values.double().mean(dim=0)) > (26.0 if mu < 1.0 else 15.0)


def test_overflow_of_the_sum_halves_mu_until_it_fits(ranks: RankPool) -> None:
    """Four equal gradients at μ = 1 leave a payload sum of at least 4 · 224: it saturates, and μ halves at every
    reduction until it fits, at 1/4 or 1/8 (a scale that was rounded up has half of the range to spare)."""
    values = GradientSource("uncorrelated", blocks_per_tensor=16).draw(1).expand(4, -1).contiguous()
    exact = values[0].double()
    first, _ = reduced(ranks, values)
    mean, states = reduced(ranks, values, times=8)
    assert states[0]["saturated"].eq(-1.0).all(), "nothing was seen before the first reduction"
    assert states[1]["saturated"].gt(1e-5).all() and states[1]["mu"].eq(0.5).all()
    settled = states[-1]["mu"]
    assert ((settled > 0.12) & (settled < 0.27)).all() and states[-1]["saturated"].eq(0.0).all()
    assert worst_snr_db(first, exact) < 15.0 and worst_snr_db(mean, exact) > 25.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_value_makes_exactly_its_block_nan(ranks: RankPool, bad: float) -> None:
    """It does not enter the shared scale: its neighbours are unchanged."""
    values = GradientSource("uncorrelated", blocks_per_tensor=8).draw(2)
    clean, _ = reduced(ranks, values)
    values[1, 40 * GRAD_BLOCK + 3] = bad
    result, states = reduced(ranks, values, times=2)
    expected = torch.zeros(values.shape[1], dtype=torch.bool)
    expected[40 * GRAD_BLOCK : 41 * GRAD_BLOCK] = True
    assert torch.equal(result.isnan(), expected) and states[-1]["mu"].isfinite().all()
    result, _ = reduced(ranks, values)
    tensor = slice(0, 40 * GRAD_BLOCK)
    assert torch.equal(result[tensor], clean[tensor])


def test_an_outlier_takes_its_tensors_range(ranks: RankPool) -> None:
    """One scale a tensor: 10⁴ beside values of 10⁻³ makes them zero everywhere in the tensor, in no other."""
    values = torch.randn(2, 64 * GRAD_BLOCK, generator=torch.Generator().manual_seed(0)) * 1e-3
    values[1, 5] = 1e4
    mean, _ = reduced(ranks, values, num_tensors=2, initial_mu=0.5)
    half = values.shape[1] // 2
    assert abs(mean[5] - 5e3) <= 5e3 * 2**-4
    assert mean[:half].count_nonzero() == 1
    assert mean[half:].count_nonzero() > 0.95 * half
