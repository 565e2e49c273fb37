"""The two-stage reduce-scatter: shards are placed as in the flat one, and only the rounding of the node's sum is added.

With bf16 inside the node only the node's sum is rounded to E4M3: 31.5 dB, as for one rank. With fp8 inside, ranks and
nodes round independently, once each: for independent gradients 31.5 dB − 10·log10(2) = 28.5 dB. The worst of eight
tensors is asked for 1 dB less, as in test_reduce_scatter.
"""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import Tensor

from fp8_megatron.collectives.hierarchical import hierarchical_reduce_scatter_mean, new_node_groups
from fp8_megatron.collectives.wire import WireTensor
from fp8_megatron.dtypes import GRAD_BLOCK, StorageDtype
from tests.collectives.simulated_reductions import GradientSource, reduce_hierarchical, worst_snr_db
from tests.harness.ranks import RankPool, on_default_group

CPU = torch.device("cpu")
FP8, BF16, FP32 = StorageDtype.FP8, StorageDtype.BF16, StorageDtype.FP32
INTRA = pytest.mark.parametrize("intra", [BF16, FP8])
LAYOUTS = pytest.mark.parametrize(
    ("world", "ranks_per_node"), [(4, 2), (4, 1), (4, 4), (2, 1)], ids=lambda value: str(value)
)


@functools.cache
def gradients(world: int) -> Tensor:
    """[world, n]; not to be written to."""
    return GradientSource("uncorrelated").draw(world)


def exact_gradients(world: int) -> Tensor:
    """Small integers: they and their sums over four ranks are E4M3 numbers, so that nothing is ever rounded."""
    values = torch.randint(-2, 3, (world, 64 * GRAD_BLOCK), generator=torch.Generator().manual_seed(1)).float()
    return values * (2.0 ** (torch.arange(64) - 32)).repeat_interleave(GRAD_BLOCK)


def _reduce(
    group: torch.distributed.ProcessGroup, values: Tensor, ranks_per_node: int, intra: StorageDtype, inter: StorageDtype
) -> list[Tensor]:
    """Shards of every gradient of values [k, d, n], all of them in flight at once."""
    groups = new_node_groups([list(range(group.size()))], ranks_per_node)
    works = []
    for value in values:
        sent, received = (WireTensor.empty(values.shape[2], intra, CPU) for _ in range(2))
        sent.store_(value[group.rank()])
        works.append(hierarchical_reduce_scatter_mean(sent, received, groups, intra=intra, inter=inter))
    return [work.wait() for work in works]


def reduced(
    ranks: RankPool, values: Tensor, ranks_per_node: int, intra: StorageDtype, inter: StorageDtype = FP8
) -> Tensor:
    """The ranks' shards of values [d, n], put together in rank order."""
    world = values.shape[0]
    results = ranks.run(on_default_group, _reduce, values[None], ranks_per_node, intra, inter, num_ranks=world)
    return torch.cat([shards[0] for shards in results])


@LAYOUTS
@INTRA
def test_shards_lie_as_in_the_flat_form(ranks: RankPool, world: int, ranks_per_node: int, intra: StorageDtype) -> None:
    values = exact_gradients(world)
    assert torch.equal(reduced(ranks, values, ranks_per_node, intra), values.double().mean(dim=0).float())


@LAYOUTS
@INTRA
def test_signal_to_noise(ranks: RankPool, world: int, ranks_per_node: int, intra: StorageDtype) -> None:
    values = gradients(world)
    rounds_twice = intra is FP8 and 1 < ranks_per_node < world
    measured = worst_snr_db(reduced(ranks, values, ranks_per_node, intra), values.double().mean(dim=0))
    one_node_in_bf16 = intra is BF16 and ranks_per_node == world
    assert measured > (27.5 if rounds_twice else 54.0 if one_node_in_bf16 else 30.5)
    assert one_node_in_bf16 or measured < (29.5 if rounds_twice else 32.5), "so the bounds mean something"


@INTRA
def test_real_ranks_agree_with_virtual_ones(ranks: RankPool, intra: StorageDtype) -> None:
    values = gradients(4)
    assert torch.equal(reduced(ranks, values, 2, intra), reduce_hierarchical(values, intra))


def test_bf16_across_nodes_too(ranks: RankPool) -> None:
    """Ranks and nodes round to 8 bits, independently: 55.6 dB − 3 dB, less 1 dB for the worst tensor."""
    values = gradients(4)
    assert worst_snr_db(reduced(ranks, values, 2, BF16, BF16), values.double().mean(dim=0)) > 51.5


@INTRA
def test_calls_in_flight_are_kept_apart(ranks: RankPool, intra: StorageDtype) -> None:
    values = torch.stack([gradients(4), gradients(4).flip(1), gradients(4) * 3.0])
    results = ranks.run(on_default_group, _reduce, values, 2, intra, FP8, num_ranks=4)
    for index, value in enumerate(values):
        result = torch.cat([shards[index] for shards in results])
        assert torch.equal(result, reduce_hierarchical(value, intra))


@INTRA
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rank", [0, 3])
def test_a_bad_value_makes_exactly_its_block_nan(ranks: RankPool, intra: StorageDtype, bad: float, rank: int) -> None:
    values = gradients(4).clone()
    values[rank, 300 * GRAD_BLOCK + 17] = bad
    expected = torch.zeros(values.shape[1], dtype=torch.bool)
    expected[300 * GRAD_BLOCK : 301 * GRAD_BLOCK] = True
    result = reduced(ranks, values, 2, intra)
    assert torch.equal(result.isnan(), expected) and result[~expected].isfinite().all()


@INTRA
def test_zero_ranks_and_an_outlier(ranks: RankPool, intra: StorageDtype) -> None:
    """As in the flat form: zero ranks do not count, and an outlier costs its block of 128 its precision, no other."""
    values = gradients(4).clone()
    values[1:] = 0.0
    assert worst_snr_db(reduced(ranks, values, 2, intra), values.double().mean(dim=0)) > 30.5  # rounded twice alike
    clean = reduced(ranks, gradients(4), 2, intra)
    values = gradients(4).clone()
    values[2, 1000] = 1e4
    result = reduced(ranks, values, 2, intra)
    block = slice(1000 // GRAD_BLOCK * GRAD_BLOCK, (1000 // GRAD_BLOCK + 1) * GRAD_BLOCK)
    outside = torch.ones(values.shape[1], dtype=torch.bool)
    outside[block] = False
    assert torch.equal(result[outside], clean[outside])
    assert abs(result[1000] - 1e4 / 4) <= 1e4 / 4 * 2 * 2**-4
    # Elsewhere in the block values of 10⁻⁶ drown: half of 2⁻⁹ times the outlier's scale of 2⁵ is larger than they are.
    rest = result[block].clone()
    rest[1000 % GRAD_BLOCK] = 0.0
    assert not torch.equal(rest, clean[block]) and rest.abs().max() < 2**-5


def _two_dp_groups(group: torch.distributed.ProcessGroup) -> tuple[list[int], list[int]]:
    """Four ranks with tensor parallelism of 2 hold two data-parallel groups; here each is two nodes of one rank."""
    groups = new_node_groups([[0, 2], [1, 3]], 1)
    members = torch.distributed.get_process_group_ranks
    return members(groups.intra), members(groups.inter)


def test_every_data_parallel_group_gets_its_node_groups(ranks: RankPool) -> None:
    results = ranks.run(on_default_group, _two_dp_groups, num_ranks=4)
    assert results == [([0], [0, 2]), ([1], [1, 3]), ([2], [0, 2]), ([3], [1, 3])]


def test_what_cannot_be_is_refused(ranks: RankPool) -> None:
    with pytest.raises(RuntimeError, match=r"ranks_per_node\(3\) does not divide the data-parallel size \(4\)"):
        reduced(ranks, gradients(4), 3, FP8)
    with pytest.raises(RuntimeError, match="a tensor in fp32 cannot start a hierarchical reduction"):
        reduced(ranks, gradients(4), 2, FP32)
