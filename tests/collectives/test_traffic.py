"""What a rank sends to others, to the byte."""

from __future__ import annotations

import pytest
import torch

from fp8_megatron.collectives.all_gather import all_gather_into
from fp8_megatron.collectives.autoscale import AutoScale
from fp8_megatron.collectives.gradient_reduction import GradReducer
from fp8_megatron.collectives.hierarchical import new_node_groups
from fp8_megatron.collectives.wire import WireTensor
from fp8_megatron.device.group import max_over_group_
from fp8_megatron.dtypes import E4M3, GRAD_BLOCK, GradReduceMode, StorageDtype
from tests.harness.ranks import RankPool, on_default_group
from tests.harness.traffic import counted_traffic

CPU = torch.device("cpu")
NUMEL = 64 * GRAD_BLOCK
FP8, BF16 = StorageDtype.FP8, StorageDtype.BF16


def _count_reduction(
    group: torch.distributed.ProcessGroup, mode: GradReduceMode, dtype: StorageDtype
) -> dict[str, int]:
    reducer = GradReducer(mode, group, new_node_groups([[0, 1, 2, 3]], 2), dtype)
    sent, received = (WireTensor.empty(NUMEL, dtype, CPU) for _ in range(2))
    sent.store_(torch.ones(NUMEL))
    autoscale = AutoScale(5, torch.arange(64) // 13, CPU)
    with counted_traffic() as traffic:
        reducer.start(sent, received, autoscale).wait()
    return dict(traffic)


@pytest.mark.parametrize(
    ("mode", "dtype", "expected"),
    [
        # Of n + n/32 bytes a quarter stays.
        (GradReduceMode.ALL_TO_ALL, FP8, {"reduce_scatter": (NUMEL + NUMEL // 32) * 3 // 4}),
        (GradReduceMode.ALL_TO_ALL, BF16, {"reduce_scatter": 2 * NUMEL * 3 // 4}),
        # Half leaves for the other rank of the node; of half the elements, half leaves for the other node.
        (
            GradReduceMode.HIERARCHICAL,
            FP8,
            {"reduce_scatter": (NUMEL + NUMEL // 32) // 2 + (NUMEL + NUMEL // 32) // 4},
        ),
        (
            GradReduceMode.HIERARCHICAL,
            BF16,
            {"reduce_scatter": NUMEL + (NUMEL + NUMEL // 32) // 4},
        ),
        # No scales beside the payload, but amax and saturation of five tensors over an all-reduce.
        (GradReduceMode.NCCL, FP8, {"reduce_scatter": NUMEL * 3 // 4, "all_reduce": 2 * 5 * 8 * 3 // 4}),
    ],
)
def test_reductions(ranks: RankPool, mode: GradReduceMode, dtype: StorageDtype, expected: dict[str, int]) -> None:
    assert ranks.run(on_default_group, _count_reduction, mode, dtype, num_ranks=4) == [expected] * 4


def _count_a_step(group: torch.distributed.ProcessGroup) -> tuple[dict[str, int], int]:
    """Gradients scattered and weights gathered in FP8; one scale for a weight."""
    sent, received = (WireTensor.empty(NUMEL, FP8, CPU) for _ in range(2))
    sent.store_(torch.ones(NUMEL))
    weights = torch.ones(NUMEL).to(E4M3)
    shard = weights.chunk(group.size())[group.rank()]
    with counted_traffic() as traffic:
        GradReducer(GradReduceMode.ALL_TO_ALL, group).start(sent, received).wait()
        all_gather_into(weights, shard, group).wait()
        max_over_group_(torch.ones(1), group)
    return dict(traffic), traffic.total()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_step_sends_two_bytes_a_parameter(ranks: RankPool, world: int) -> None:
    for sent_bytes, total in ranks.run(on_default_group, _count_a_step, num_ranks=world):
        assert total == sum(sent_bytes.values()) <= 2.05 * NUMEL * (world - 1) / world
        if world > 1:
            assert sent_bytes == {
                "reduce_scatter": (NUMEL + NUMEL // 32) * (world - 1) // world,
                "all_gather": NUMEL // world * (world - 1),
                "all_reduce": 8 * (world - 1) // world,
            }
