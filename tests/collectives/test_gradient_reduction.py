"""GradReducer: the enum picks the reduction, and tensors of another dtype take the plain all-to-all."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import Tensor

from fp8_megatron.collectives.autoscale import AutoScale
from fp8_megatron.collectives.gradient_reduction import GradReducer
from fp8_megatron.collectives.hierarchical import new_node_groups
from fp8_megatron.collectives.wire import WireTensor
from fp8_megatron.dtypes import GRAD_BLOCK, GradReduceMode, StorageDtype
from fp8_megatron.quantization.stats import snr_db
from tests.collectives.simulated_reductions import (
    NUM_TENSORS,
    GradientSource,
    reduce_all_to_all,
    reduce_hierarchical,
    reduce_nccl,
)
from tests.harness.ranks import RankPool, on_default_group

CPU = torch.device("cpu")
FP8, BF16, FP32 = StorageDtype.FP8, StorageDtype.BF16, StorageDtype.FP32
ALL_TO_ALL, HIERARCHICAL, NCCL = GradReduceMode.ALL_TO_ALL, GradReduceMode.HIERARCHICAL, GradReduceMode.NCCL


@functools.cache
def gradients() -> Tensor:
    return GradientSource("correlated", blocks_per_tensor=8).draw(4)


def _start(
    group: torch.distributed.ProcessGroup, values: Tensor, mode: GradReduceMode, intra: StorageDtype, sent_dtype: str
) -> Tensor:
    reducer = GradReducer(mode, group, new_node_groups([list(range(group.size()))], 2), intra)
    dtype = reducer.wire_dtype if sent_dtype == "wire" else StorageDtype(sent_dtype)
    sent, received = (WireTensor.empty(values.shape[1], dtype, CPU) for _ in range(2))
    sent.store_(values[group.rank()])
    num_blocks = values.shape[1] // GRAD_BLOCK
    autoscale = AutoScale(NUM_TENSORS, torch.arange(num_blocks) // (num_blocks // NUM_TENSORS), CPU)
    return reducer.start(sent, received, autoscale if reducer.needs_autoscale else None).wait()


@pytest.mark.parametrize(
    ("mode", "intra", "sent", "expected"),
    [
        (ALL_TO_ALL, FP8, "wire", reduce_all_to_all),
        (ALL_TO_ALL, FP8, "bf16", lambda values: reduce_all_to_all(values, BF16)),
        (HIERARCHICAL, FP8, "wire", lambda values: reduce_hierarchical(values, FP8)),
        (HIERARCHICAL, BF16, "wire", lambda values: reduce_hierarchical(values, BF16)),
        (HIERARCHICAL, FP8, "bf16", lambda values: reduce_all_to_all(values, BF16)),
        (HIERARCHICAL, BF16, "fp32", lambda values: reduce_all_to_all(values, FP32)),
        (NCCL, FP8, "wire", lambda values: reduce_nccl(values)[0]),
        (NCCL, FP8, "bf16", lambda values: reduce_all_to_all(values, BF16)),
    ],
)
def test_the_mode_and_the_dtype_pick(ranks: RankPool, mode, intra, sent, expected) -> None:  # type: ignore[no-untyped-def]
    shards = ranks.run(on_default_group, _start, gradients(), mode, intra, sent, num_ranks=4)
    assert torch.equal(torch.cat(shards), expected(gradients()))


def _construct(group: torch.distributed.ProcessGroup, with_nodes: bool, intra: StorageDtype) -> StorageDtype:
    nodes = new_node_groups([[0], [1]], 1) if with_nodes else None  # of another data-parallel size
    return GradReducer(HIERARCHICAL, group, nodes, intra).wire_dtype


def test_what_cannot_be_is_refused(ranks: RankPool) -> None:
    with pytest.raises(RuntimeError, match="mode hierarchical needs node_groups"):
        ranks.run(on_default_group, _construct, False, FP8, num_ranks=2)
    with pytest.raises(RuntimeError, match=r"ranks_per_node\(1\) × nodes\(1\) is not the data-parallel size \(2\)"):
        ranks.run(on_default_group, _construct, True, FP8, num_ranks=2)


def _send_fp32_inside(group: torch.distributed.ProcessGroup) -> None:
    GradReducer(HIERARCHICAL, group, new_node_groups([[0, 1]], 1), FP32)


def test_fp32_inside_a_node_is_refused(ranks: RankPool) -> None:
    with pytest.raises(RuntimeError, match="not fp32 and fp8"):
        ranks.run(on_default_group, _send_fp32_inside, num_ranks=2)


@pytest.mark.parametrize("mean", [0.1, 0.001])
def test_anti_correlated_ranks_cancel(mean: float) -> None:
    """E4M3 leaves 31.5 dB beside a rank's gradient. The mean over d ranks is `mean` times as large, and d roundings
    average: 31.5 + 10 log10(d) + 20 log10(mean). One tensor of 16 blocks over two decades is uncertain by 2 dB."""
    source = GradientSource(f"anti-correlated {mean}")  # type: ignore[arg-type]
    values = source.draw(8)
    ratio = (values.mean(dim=0).double().square().mean() / values.double().square().mean()).sqrt().item()
    assert ratio == pytest.approx(mean, rel=0.05)
    measured = snr_db(reduce_all_to_all(values), values.double().mean(dim=0))
    assert measured == pytest.approx(31.5 + 10 * math.log10(8) + 20 * math.log10(mean), abs=2.0)
