"""FP8 reduce-scatter under torch's fully_shard: bytes on the wire, and precision against a float64 mean."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp8_megatron.any_model.fsdp_reduce import FP8ReduceScatter, Run, reduce_in_fp8, reduce_in_own_dtype
from fp8_megatron.nn.module import FP8Linear
from fp8_megatron.quantization.stats import snr_db
from tests.any_model.test_fsdp_optimizer import build, train_step
from tests.harness.fp8_models import shard
from tests.harness.ranks import RankPool, on_default_group
from tests.harness.traffic import counted_traffic

Group = torch.distributed.ProcessGroup
#: A rank's part: FP8 weights that end inside a block, a norm, more FP8 weights, a bias.
RUNS = (Run(0, 300, True), Run(300, 350, False), Run(350, 862, True), Run(862, 866, False))
MEAN, SUM = torch.distributed.ReduceOp.AVG, torch.distributed.ReduceOp.SUM


def gradients(rank: int, ranks: int, dtype: torch.dtype) -> Tensor:
    """Gaussian values, each run a decade apart from the one before it."""
    values = torch.randn(ranks, 866, generator=torch.Generator().manual_seed(rank))
    for index, run in enumerate(RUNS):
        values[:, run.start : run.stop] *= 10.0**-index
    return values.to(dtype).view(-1)


def reduced(group: Group, dtype: torch.dtype, is_sum: bool) -> tuple[Tensor, int]:
    """This rank's result, and the bytes that it sent."""
    output = torch.empty(866, dtype=dtype)
    with counted_traffic() as traffic:
        FP8ReduceScatter(RUNS)(output, gradients(group.rank(), group.size(), dtype), group, SUM if is_sum else MEAN)
    return output, traffic.total()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("is_sum", [False, True], ids=["mean", "sum"])
def test_precision_of_each_run(ranks: RankPool, dtype: torch.dtype, is_sum: bool) -> None:
    results = ranks.run(on_default_group, reduced, dtype, is_sum, num_ranks=4)
    expected = sum(gradients(rank, 4, dtype).double() for rank in range(4)).view(4, 866) / (1 if is_sum else 4)
    for rank, (output, sent) in enumerate(results):
        for run in RUNS:
            snr = snr_db(output[run.start : run.stop].double(), expected[rank, run.start : run.stop])
            # E4M3 keeps 31.5 dB of a sum of gaussians. 300 roundings leave 0.7 dB of doubt. Others are rounded to
            # BF16 or FP16 at the end: 50 dB, less 4 dB for the four elements of the last run.
            assert snr > (30.0 if run.is_fp8 else 46.0), (run, snr)
        itemsize = 2 if dtype == torch.bfloat16 else 4
        # 384 + 512 elements of FP8 with 7 scales; 128 + 128 of the others, for each of the other three ranks.
        assert sent == 3 * (896 + 4 * 7 + 256 * itemsize)


def sent_by_a_backward(group: Group) -> list[int]:
    """Bytes that the reduction of one layer's gradients sends: in FP8, and as torch does."""
    sent = []
    for choose in (reduce_in_fp8, reduce_in_own_dtype):
        layer = FP8Linear(64, 128, bias=False)
        shard(layer)
        reduce_in_fp8(layer)
        choose(layer)
        with counted_traffic() as traffic:
            layer(torch.randn(32, 64).bfloat16()).backward(torch.randn(32, 128).bfloat16())
        sent.append(traffic["reduce_scatter"])
        assert layer.weight.grad.to_local().dtype == torch.bfloat16
    return sent


def test_one_byte_a_gradient_is_sent(ranks: RankPool) -> None:
    elements = 64 * 128 // 2
    for in_fp8, as_torch in ranks.run(on_default_group, sent_by_a_backward, num_ranks=2):
        assert in_fp8 == elements + 4 * elements // 128
        assert as_torch == 0  # not through our collectives


def losses(group: Group, exact: bool) -> list[float]:
    model, optimizer = build("O3", torch.bfloat16, exact=exact)
    return [train_step(model, optimizer, step) for step in range(12)]


def test_trains_as_with_exact_gradients(ranks: RankPool) -> None:
    """Twelve steps whose loss falls from 4.1 to below 1; gradients with 31 dB make no visible difference."""
    exact = ranks.run(on_default_group, losses, True, num_ranks=2)[0]
    in_fp8 = ranks.run(on_default_group, losses, False, num_ranks=2)[0]
    assert in_fp8 != exact
    assert in_fp8 == pytest.approx(exact, rel=0.02, abs=0.02)


def divided(group: Group, is_sum: bool) -> Tensor:
    """A gradient with a divide factor of 3, by a sum that is divided or by a sum of multiples, as over NCCL."""
    torch.manual_seed(0)
    layer = FP8Linear(64, 128, bias=False)
    shard(layer)
    reduce_in_fp8(layer)
    layer.set_gradient_divide_factor(3.0)
    layer.set_force_sum_reduction_for_comms(is_sum)
    layer(torch.randn(32, 64).bfloat16()).backward(torch.randn(32, 128).bfloat16())
    gradient: Tensor = layer.weight.grad.to_local()  # type: ignore[union-attr]
    return gradient


def test_a_divide_factor(ranks: RankPool) -> None:
    as_sums, multiplied = (ranks.run(on_default_group, divided, is_sum, num_ranks=2) for is_sum in (True, False))
    for expected, gradient in zip(as_sums, multiplied, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=2**-7, atol=0.0)  # BF16 rounds twice in the first
