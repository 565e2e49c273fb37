"""The sharded optimizer: any number of ranks, bucket size and grouping of updates is the unsharded one, bit for bit.

Every rank is given the same gradient. The mean of d equal E4M3 values is exact in FP32 for d a power of two, so the
sharded run sees exactly the gradients that one rank stores, and its state must be equal in every bit: the cut may not
show in block scales, in the per-tensor scales of FP8 weights or in the step count. Clipping is off for that: the
squares of the norm are added in another order.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fp8_megatron.config.schema import PrecisionConfig
from fp8_megatron.device.group import Group
from fp8_megatron.dtypes import StorageDtype
from fp8_megatron.optimizer.distributed_optimizer import FP8DistributedOptimizer
from fp8_megatron.optimizer.hyperparameters import OptimizerSettings
from fp8_megatron.optimizer.state import SpaceState
from fp8_megatron.planning.memory import model_storage
from fp8_megatron.quantization.scaled_tensor import ScaledTensor
from fp8_megatron.quantization.stats import snr_db
from fp8_megatron.sharding.data_parallel import DataParallelModule, Exchange, finish_gradients
from fp8_megatron.sharding.partition import Slot, StorageClass
from fp8_megatron.sharding.replicas import Replicas, Sharing
from tests.harness.ranks import RankPool, on_default_group
from tests.harness.traffic import counted_traffic

CPU = torch.device("cpu")
#: The second linear weight ends inside a chunk; the matrix and the vector end inside a block.
SHAPES = {"linear": (256, 64), "other_linear": (80, 64), "wide_linear": (64, 640), "matrix": (90, 32), "vector": (90,)}
NUM_STEPS = 4


class Outcome(NamedTuple):
    """State of one rank after the last step."""

    norms: list[float]
    masters: dict[str, Tensor]
    moments: dict[str, Tensor]
    weights: dict[str, Tensor]
    scales: dict[str, float]
    state_numel: int


def gradients(step: int) -> dict[str, Tensor]:
    """Spread over six binades, so that tensors, blocks and clipping have different scales."""
    generator = torch.Generator().manual_seed(100 + step)
    return {
        name: torch.randn(shape, generator=generator) * 2.0 ** (torch.rand(shape, generator=generator) * 6 - 3)
        for name, shape in SHAPES.items()
    }


def whole_first_moment(state: SpaceState, slot: Slot) -> Tensor:
    return state.space.assemble(slot, lambda fragment: state.states["exp_avg"].part(fragment).load())


def sharded(
    module: torch.nn.Module, precision: PrecisionConfig, group: Group, exchange: Exchange, settings: OptimizerSettings
) -> tuple[DataParallelModule, FP8DistributedOptimizer]:
    """The module with its optimizer over the ranks of a group."""
    sharing, storage = Sharing(Replicas.of(group, CPU)), model_storage(precision, num_micro_batches=1)
    model = DataParallelModule(module, sharing_of=lambda _: sharing, storage=storage, exchange=exchange)
    return model, FP8DistributedOptimizer([model], settings, storage, world=group, device=CPU)


def _train(
    group: Group, precision: PrecisionConfig, bucket_numel: int, bad_step: int | None = None, clip_grad: float = 0.0
) -> Outcome:
    generator = torch.Generator().manual_seed(1)
    values = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    module = torch.nn.Module()
    for name, value in values.items():
        is_linear = "linear" in name and precision.precision == "fp8"
        empty = ScaledTensor.quantize(torch.ones_like(value)) if is_linear else value.bfloat16().zero_()
        module.register_parameter(name, torch.nn.Parameter(empty))
    params = dict(module.named_parameters())
    settings = OptimizerSettings(lr=1e-2, clip_grad=clip_grad)
    model, optimizer = sharded(module, precision, group, Exchange(bucket_numel=bucket_numel), settings)
    optimizer.load_weights(values.items())
    norms = []
    for step in range(NUM_STEPS):
        model.reset()
        for name, grad in reversed(gradients(step).items()):
            if step == bad_step and group.rank() == group.size() - 1:
                grad[-1] = torch.nan
            params[name].main_grad.accumulate_(grad.bfloat16())  # type: ignore[attr-defined]
        finish_gradients([model])
        norms.append(optimizer.step().item())
    model.wait_for_weights()
    return Outcome(
        norms,
        {slot.name: state.get_master(slot) for state, slot in optimizer.slots()},
        {slot.name: whole_first_moment(state, slot) for state, slot in optimizer.slots()},
        {
            name: param.dequantize() if isinstance(param, ScaledTensor) else param.detach().float()
            for name, param in params.items()
        },
        {name: param.scale.sum().item() for name, param in params.items() if isinstance(param, ScaledTensor)},
        sum(state.master.payload.numel() for state in optimizer.states),
    )


F = StorageDtype
PRECISIONS = {
    "O3": PrecisionConfig(),
    "O2": PrecisionConfig(opt_level="O2"),
    "O1": PrecisionConfig(opt_level="O1"),
    "weights_bf16": PrecisionConfig(params_dtype=F.BF16, main_params_dtype=F.FP32),
    "bf16": PrecisionConfig(precision="bf16"),
}


def assert_equal(outcome: Outcome, expected: Outcome) -> None:
    # The norm's squares are added in another order: a few FP32 roundings.
    assert outcome.norms == pytest.approx(expected.norms, rel=1e-6, nan_ok=True)
    for kind in ("masters", "moments", "weights"):
        for name, value in getattr(expected, kind).items():
            assert torch.equal(getattr(outcome, kind)[name], value), f"{kind} of {name}"
    assert outcome.scales == expected.scales


@pytest.mark.parametrize("level", list(PRECISIONS))
@pytest.mark.parametrize(("num_ranks", "bucket_numel"), [(2, 1 << 30), (4, 1 << 14)])
def test_sharded_is_unsharded(ranks: RankPool, level: str, num_ranks: int, bucket_numel: int) -> None:
    precision = PRECISIONS[level]
    (single,) = ranks.run(on_default_group, _train, precision, 1 << 30, num_ranks=1)
    for outcome in ranks.run(on_default_group, _train, precision, bucket_numel, num_ranks=num_ranks):
        assert_equal(outcome, single)
        # Even shares, padded to whole chunks and blocks of every rank and bucket.
        assert outcome.state_numel <= single.state_numel / num_ranks + 3 * 4096


def test_a_split_master_is_sharded_too(ranks: RankPool) -> None:
    """Its rounding is drawn by the place in the shard, so the cut shows, but no more than rounding does: 2⁻¹¹ of a
    number at most at each of four steps, 60 dB. Every replica has the same weights, bit for bit."""
    precision = PrecisionConfig(main_params_dtype=F.SPLIT, exp_avg_dtype=F.INT8, exp_avg_sq_dtype=F.UINT8)
    (single,) = ranks.run(on_default_group, _train, precision, 1 << 30, num_ranks=1)
    outcomes = ranks.run(on_default_group, _train, precision, 1 << 14, 1, num_ranks=2)
    for outcome in outcomes:
        assert outcome.norms[0] == pytest.approx(single.norms[0], rel=1e-6)
        for name, weight in outcomes[0].weights.items():
            assert torch.equal(outcome.weights[name], weight)
    for outcome in ranks.run(on_default_group, _train, precision, 1 << 14, num_ranks=2):
        for name in ("linear", "other_linear", "wide_linear"):
            assert snr_db(outcome.masters[name], single.masters[name]) > 45.0, name
            assert snr_db(outcome.weights[name], outcome.masters[name]) > 30.0, name


def test_a_bad_gradient_on_one_rank_skips_the_step_on_all(ranks: RankPool) -> None:
    """Weights of the skipped step are those before it, also where they were gathered anew (BF16 and FP8)."""
    (single,) = ranks.run(on_default_group, _train, PrecisionConfig(), 1 << 30, 1, num_ranks=1)
    outcomes = ranks.run(on_default_group, _train, PrecisionConfig(), 1 << 14, 1, num_ranks=2)
    for outcome in outcomes:
        assert [norm != norm for norm in outcome.norms] == [False, True, False, False]
        assert_equal(outcome, single)


def test_clips_by_the_norm_of_all_shards(ranks: RankPool) -> None:
    """A rank that clipped by its own shard's norm would clip by about 1/√d of it, which the first moment shows. It is
    FP32, so that the last bits of the factor move nothing but its last bits."""
    (single,) = ranks.run(on_default_group, _train, PRECISIONS["bf16"], 1 << 30, None, 1.0, num_ranks=1)
    for outcome in ranks.run(on_default_group, _train, PRECISIONS["bf16"], 1 << 14, None, 1.0, num_ranks=4):
        assert outcome.norms == pytest.approx(single.norms, rel=1e-6)
        for name, moment in single.moments.items():
            torch.testing.assert_close(outcome.moments[name], moment, rtol=1e-5, atol=1e-8)
            assert moment.abs().max() < 0.1  # unclipped it is some hundred times as large


def _statistics(group: Group, precision: PrecisionConfig) -> tuple[float, float, float, int]:
    """The norm of the parameters and the zeros of the gradient, as reported and as counted."""
    generator = torch.Generator().manual_seed(1)
    module = torch.nn.Module()
    values = {"linear": torch.randn(384, 200, generator=generator), "vector": torch.randn(77, generator=generator)}
    for name, value in values.items():
        is_fp8 = name == "linear" and precision.is_fp8
        empty = ScaledTensor.quantize(torch.ones_like(value)) if is_fp8 else value.bfloat16().zero_()
        module.register_parameter(name, torch.nn.Parameter(empty))
    settings = OptimizerSettings(lr=1e-2, clip_grad=0.0)
    model, optimizer = sharded(module, precision, group, Exchange(bucket_numel=1 << 14), settings)
    optimizer.load_weights(values.items())
    model.reset()
    # No value is so small beside its block that FP8 makes it 0.
    grads = {name: torch.rand(value.shape, generator=generator) + 0.1 for name, value in values.items()}
    for name, param in reversed(list(module.named_parameters())):
        grads[name].view(-1)[::3] = 0.0
        grads[name].view(-1)[:5] = -0.0
        param.main_grad.accumulate_(grads[name].bfloat16())  # type: ignore[attr-defined]
    finish_gradients([model])
    optimizer.step()
    model.wait_for_weights()
    masters = torch.cat([state.get_master(slot).reshape(-1) for state, slot in optimizer.slots()])
    zeros = sum(int((grad == 0.0).sum()) for grad in grads.values())
    return optimizer.params_norm().item(), masters.double().norm().item(), optimizer.num_zeros_in_grad().item(), zeros


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("level", ["O3", "O1", "bf16", "split"])
def test_figures_of_the_whole_model(ranks: RankPool, level: str, num_ranks: int) -> None:
    """Padding, shards and signs of zeros do not count; a sum of 77,000 squares in FP32 is right to 10⁻⁶."""
    split = PrecisionConfig(main_params_dtype=F.SPLIT, exp_avg_dtype=F.INT8, exp_avg_sq_dtype=F.UINT8)
    precision = split if level == "split" else PRECISIONS[level]
    for norm, expected_norm, zeros, expected_zeros in ranks.run(
        on_default_group, _statistics, precision, num_ranks=num_ranks
    ):
        assert norm == pytest.approx(expected_norm, rel=2e-6)
        assert zeros == expected_zeros > 20_000


def _gradient_and_weight_traffic(group: Group) -> tuple[dict[str, int], int]:
    weight = torch.nn.Parameter(ScaledTensor.quantize(torch.ones(1024, 512)))
    module = torch.nn.Module()
    module.register_parameter("weight", weight)
    model, optimizer = sharded(module, PrecisionConfig(), group, Exchange(), OptimizerSettings())
    optimizer.load_weights([("weight", torch.randn(1024, 512))])
    model.wait_for_weights()
    with counted_traffic() as traffic:
        model.reset()
        weight.main_grad.accumulate_(torch.randn(1024, 512))  # type: ignore[attr-defined]
        finish_gradients([model])
        optimizer.step()
        model.wait_for_weights()
    (state,) = optimizer.states
    assert state.space.storage is StorageClass.LINEAR
    return dict(traffic), state.space.num_params


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_bytes_on_the_wire(ranks: RankPool, num_ranks: int) -> None:
    """1 byte and 1/32 for a gradient, 1 byte for a weight, each times (d−1)/d: at most 2.05 together; Megatron's
    distributed optimizer sends 6 (FP32 gradients, BF16 weights)."""
    for sent, num_params in ranks.run(on_default_group, _gradient_and_weight_traffic, num_ranks=num_ranks):
        share = num_params * (num_ranks - 1) / num_ranks
        assert sent["reduce_scatter"] == share * (1 + 4 / 128)
        assert sent["all_gather"] == share
        assert sum(sent.values()) <= 2.05 * share
