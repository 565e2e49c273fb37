"""The weights of a layer's experts [E, N, K]: any cut over replicas and over expert-parallel ranks has the same bits.

Each expert multiplies its own tokens, so a rank that holds some of the experts computes what one rank computes for
them. Gradients differ by a factor that is a power of two, which changes no mantissa: every element of masters, moments
and weights must have the same bits under any layout, those of stochastic rounding included. Clipping is off, because
the squares of the norm are added in another order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8_megatron.config.schema import PrecisionConfig
from fp8_megatron.device.group import Group
from fp8_megatron.dtypes import StorageDtype
from fp8_megatron.formats.tensorwise import roles
from fp8_megatron.optimizer.distributed_optimizer import FP8DistributedOptimizer
from fp8_megatron.optimizer.hyperparameters import OptimizerSettings
from fp8_megatron.planning.memory import model_storage
from fp8_megatron.quantization.scaled_tensor import ScaledTensor
from fp8_megatron.sharding.data_parallel import DataParallelModule, Exchange, finish_gradients
from fp8_megatron.sharding.region import Region
from fp8_megatron.sharding.replicas import Replicas, Sharing
from tests.harness.ranks import RankPool, on_default_group

CPU = torch.device("cpu")
F = StorageDtype
NUM_EXPERTS, HIDDEN, FFN, TOKENS, NUM_STEPS = 8, 64, 64, 32, 5
SHAPES = {
    "decoder.layers.0.mlp.experts.linear_fc1.weight": (NUM_EXPERTS, FFN, HIDDEN),
    "decoder.layers.0.mlp.experts.linear_fc2.weight": (NUM_EXPERTS, HIDDEN, FFN),
}
SETTINGS = OptimizerSettings(lr=1e-2, clip_grad=0.0)
PRECISIONS = {
    "O3": PrecisionConfig(),
    "O2": PrecisionConfig(opt_level="O2"),
    "O1": PrecisionConfig(opt_level="O1"),
    "5_bytes": PrecisionConfig(main_params_dtype=F.SPLIT),
    "4_bytes": PrecisionConfig(main_params_dtype=F.SPLIT, exp_avg_dtype=F.INT8, exp_avg_sq_dtype=F.UINT8),
    "bf16": PrecisionConfig(precision="bf16"),
}


@dataclass(frozen=True)
class Layout:
    """Expert-parallel ranks, and replicas of each; `same` gives all replicas the same tokens."""

    experts: int = 1
    replicas: int = 1
    same: bool = False

    @property
    def num_ranks(self) -> int:
        return self.experts * self.replicas


class Multiply(torch.autograd.Function):
    """x [E, T, K] · weight [E, N, K]ᵀ of an FP8 layer, an expert after another, whose gradient goes to `main_grad`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        assert isinstance(weight, ScaledTensor)
        operand = weight.gemm_operand(roles(False).weight)
        value = operand.payload.float() * operand.scale.view(-1, 1, 1)
        ctx.save_for_backward(x)
        ctx.weight = weight
        return torch.stack([one @ matrix.t() for one, matrix in zip(x, value, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        operand = ctx.weight.gemm_operand(roles(False).weight, transposed=True)
        value = operand.payload.float() * operand.scale.view(-1, 1, 1)
        pairs = list(zip(grads[0], x, strict=True))
        ctx.weight.main_grad.accumulate_(torch.stack([grad.t() @ one for grad, one in pairs]).bfloat16())
        return torch.stack([grad @ matrix.t() for grad, matrix in zip(grads[0], value, strict=True)]), None


class Experts(torch.nn.Module):
    """Two matrices an expert, of the experts that this rank holds."""

    def __init__(self, held: int, *, is_fp8: bool) -> None:
        super().__init__()
        self.is_fp8 = is_fp8
        for index, (_, *matrix) in enumerate(SHAPES.values()):
            empty = torch.ones(held, *matrix)
            value = ScaledTensor.quantize(empty) if is_fp8 else empty.bfloat16()
            self.register_parameter(f"weight{index}", torch.nn.Parameter(value))

    def forward(self, x: Tensor) -> Tensor:
        """[E, T, HIDDEN] → [E, T, HIDDEN]."""
        for index, weight in enumerate(self.parameters()):
            x = x if index == 0 else x.relu()
            if self.is_fp8:
                x = Multiply.apply(x, weight)
            else:
                x = torch.stack([one @ matrix.t() for one, matrix in zip(x, weight.float(), strict=True)])
        return x


@dataclass
class Trained:
    """A rank's model and optimizer, and where its part of the experts lies."""

    module: Experts
    model: DataParallelModule
    optimizer: FP8DistributedOptimizer
    regions: dict[torch.nn.Parameter, Region]

    def step(self, number: int, layout: Layout, rank: int) -> None:
        """One step of this rank's tokens."""
        generator = torch.Generator().manual_seed(number)
        halves = 1 if layout.same else layout.replicas
        x, target = torch.randn(2, NUM_EXPERTS, halves * TOKENS, HIDDEN, generator=generator)
        replica = 0 if layout.same else rank % layout.replicas
        held = slice(rank // layout.replicas * self.held, (rank // layout.replicas + 1) * self.held)
        mine = (held, slice(replica * TOKENS, (replica + 1) * TOKENS))
        self.model.reset()
        loss = (self.module(x[mine]) - target[mine]).square().sum(dim=2).mean()
        loss.backward()
        finish_gradients([self.model])
        self.optimizer.step()
        self.model.wait_for_weights()

    @property
    def held(self) -> int:
        return next(self.module.parameters()).shape[0]

    def state(self) -> dict[str, Tensor]:
        """Masters, moments and weights of this rank's experts, whole."""
        found = {}
        for state, slot in self.optimizer.slots():
            found[f"master {slot.name}"] = state.get_master(slot)
            for name, stored in state.states.items():
                found[f"{name} {slot.name}"] = state.space.assemble(
                    slot, lambda part, own=stored: own.part(part).load()
                )
            param = slot.param
            found[f"weight {slot.name}"] = param.dequantize() if isinstance(param, ScaledTensor) else param.float()
            if isinstance(param, ScaledTensor) and param.cast_scale is not None:
                found[f"cast scale {slot.name}"] = param.cast_scale.scale.clone()
        return found


def initial_value(name: str) -> Tensor:
    """Experts of very different sizes: under one scale the small ones would lose their bits."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    size = 2.0 ** -torch.arange(NUM_EXPERTS).view(-1, 1, 1)
    return torch.randn(SHAPES[name], generator=generator) / HIDDEN**0.5 * size


def built(world: Group, layout: Layout, precision: PrecisionConfig, bucket_numel: int = 1 << 30) -> Trained:
    groups = [
        torch.distributed.new_group(list(range(first, first + layout.replicas)))
        for first in range(0, layout.num_ranks, layout.replicas)
    ]
    expert_rank = world.rank() // layout.replicas
    replicas = Replicas.of(groups[expert_rank] if layout.replicas > 1 else None, CPU)
    sharing = Sharing(replicas, grad_factor=1 / layout.experts)
    module = Experts(NUM_EXPERTS // layout.experts, is_fp8=precision.is_fp8)
    named = dict(zip(SHAPES, module.parameters(), strict=True))
    regions = {
        param: Region(tuple(param.shape), experts=(expert_rank, layout.experts)) for param in module.parameters()
    }
    storage = model_storage(precision, num_micro_batches=1)
    model = DataParallelModule(
        module,
        named,
        sharing_of=lambda _: sharing,
        region_of=regions.__getitem__,
        storage=storage,
        exchange=Exchange(bucket_numel=bucket_numel),
    )
    optimizer = FP8DistributedOptimizer([model], SETTINGS, storage, world=world, device=CPU)
    optimizer.load_weights((name, regions[param].part_of(initial_value(name))) for name, param in named.items())
    return Trained(module, model, optimizer, regions)


def _train(world: Group, layout: Layout, precision: PrecisionConfig, bucket_numel: int) -> dict[str, Tensor]:
    trained = built(world, layout, precision, bucket_numel)
    before = trained.state()
    for step in range(NUM_STEPS):
        trained.step(step, layout, world.rank())
    after = trained.state()
    assert all((after[key] != before[key]).float().mean() > 0.5 for key in after if key.startswith("master"))
    return after


def run(ranks: RankPool, layout: Layout, level: str, bucket_numel: int = 1 << 30) -> dict[str, Tensor]:
    """The state of all experts after training, put together from the expert-parallel ranks."""
    args = (layout, PRECISIONS[level], bucket_numel)
    outcomes = ranks.run(on_default_group, _train, *args, num_ranks=layout.num_ranks)
    for rank, outcome in enumerate(outcomes):
        for key, value in outcomes[rank // layout.replicas * layout.replicas].items():
            assert torch.equal(outcome[key], value), f"replicas differ in {key}"
    return {key: torch.cat([outcome[key] for outcome in outcomes[:: layout.replicas]]) for key in outcomes[0]}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert value.isfinite().all() and value.any(), key
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize("level", PRECISIONS)
def test_any_cut_over_replicas_is_one_rank(ranks: RankPool, level: str) -> None:
    """The mean of equal gradients is exact. Buckets are smaller than a parameter, and whole."""
    expected = run(ranks, Layout(), level)
    assert_equal(run(ranks, Layout(replicas=2, same=True), level), expected)
    assert_equal(run(ranks, Layout(replicas=4, same=True), level, bucket_numel=1 << 14), expected)


@pytest.mark.parametrize("level", PRECISIONS)
def test_any_expert_parallel_size_is_one_rank(ranks: RankPool, level: str) -> None:
    expected = run(ranks, Layout(), level)
    for experts in (2, 4):
        assert_equal(run(ranks, Layout(experts), level), expected)
    # Replicas of the experts, each with its own tokens.
    assert_equal(run(ranks, Layout(2, 2), level), run(ranks, Layout(1, 2), level))


def test_each_expert_has_its_own_scale() -> None:
    value = initial_value("decoder.layers.0.mlp.experts.linear_fc1.weight")
    weight = ScaledTensor.quantize(value)
    for index, matrix in enumerate(value):
        alone = ScaledTensor.quantize(matrix)
        assert torch.equal(weight.scale[index : index + 1], alone.scale)
        assert torch.equal(weight.dequantize()[index], alone.dequantize())
    some = weight[2:4]
    assert isinstance(some, ScaledTensor) and torch.equal(some.dequantize(), weight.dequantize()[2:4])
    with torch.no_grad():
        some.copy_(value[:2])
    expected = torch.cat([value[:2], value[:2], value[4:]])
    assert torch.equal(weight.dequantize(), ScaledTensor.quantize(expected).dequantize())
    restored = torch.nn.Parameter(ScaledTensor.quantize(torch.ones_like(value)))
    restored.data.copy_(weight)
    assert torch.equal(restored.dequantize(), weight.dequantize())


def test_experts_that_are_no_whole_chunks_are_refused() -> None:
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(ScaledTensor.quantize(torch.ones(4, 48, 64)))
    with pytest.raises(ValueError, match="48 × 64"):
        DataParallelModule(module, storage=model_storage(PrecisionConfig(), num_micro_batches=1))
