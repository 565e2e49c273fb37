"""FP8 weights at rest under torch's fully_shard: the bits of one rank, one byte a weight, in every form of FSDP2."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from fp8_megatron.nn.module import FP8Linear
from fp8_megatron.quantization.scaled_tensor import ScaledTensor
from tests.harness.fp8_models import shard
from tests.harness.ranks import RankPool, on_default_group

Group = torch.distributed.ProcessGroup


class Block(torch.nn.Module):
    """A norm and two FP8 linear layers with a residual branch; 48 rows are uneven over 5 ranks, 80 over 3."""

    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(48)
        self.up, self.down = FP8Linear(48, 80), FP8Linear(80, 48)
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        return x + (checkpoint(self._mlp, x, use_reentrant=False) if self.recomputes else self._mlp(x))

    def _mlp(self, x: Tensor) -> Tensor:
        return self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def build(recomputes: bool = False) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(Block(recomputes), Block(recomputes), torch.nn.Linear(48, 16)).bfloat16()


def tensors_of(seed: int) -> tuple[Tensor, Tensor]:
    """An input [32, 48] and a cotangent [32, 16]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(32, 48, generator=generator).bfloat16(), torch.randn(32, 16, generator=generator).bfloat16()


def same_as_one_rank(group: Group, options: dict[str, Any]) -> None:
    """Outputs equal one rank's bit for bit, and gradients are the mean of what every rank would have alone."""
    mesh_shape, micro_batches = options.pop("mesh_shape", ()), options.pop("micro_batches", 1)
    model = build(options.pop("recomputes", False))
    alone = copy.deepcopy(model)
    shape = mesh_shape or (group.size(),)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    shard(*model, model, mesh=mesh, **options)
    for step in range(micro_batches):
        model.set_requires_gradient_sync(step == micro_batches - 1)
        x, cotangent = tensors_of(group.size() * step + group.rank())
        y = model(x)
        assert torch.equal(y, alone(x))
        y.backward(cotangent)
    sums = [torch.zeros(param.shape) for param in alone.parameters()]
    magnitudes = [torch.zeros(param.shape) for param in alone.parameters()]
    for number in range(group.size() * micro_batches):
        x, cotangent = tensors_of(number)
        alone.zero_grad()
        alone(x).backward(cotangent)
        for param, total, magnitude in zip(alone.parameters(), sums, magnitudes, strict=True):
            total += param.grad
            magnitude += param.grad.abs()
    for (name, param), total, magnitude in zip(model.named_parameters(), sums, magnitudes, strict=True):
        assert isinstance(param, DTensor) and isinstance(param.grad, DTensor)
        error = (param.grad.full_tensor().float() * group.size() - total).abs()
        # FSDP2 rounds each of n sums to BF16, by at most 2⁻⁸ of a sum; no sum is larger than the magnitudes' sum.
        assert (error <= group.size() * micro_batches * 2**-8 * magnitude).all(), (name, error.max())


@pytest.mark.parametrize(
    ("options", "num_ranks"),
    [
        ({}, 2),
        ({}, 3),
        ({}, 4),
        ({"reshard_after_forward": False}, 2),
        ({"micro_batches": 3}, 2),
        ({"recomputes": True}, 2),
        ({"mesh_shape": (2, 2)}, 4),
    ],
    ids=str,
)
def test_same_as_one_rank(ranks: RankPool, options: dict[str, Any], num_ranks: int) -> None:
    ranks.run(on_default_group, same_as_one_rank, options, num_ranks=num_ranks)


class CountingAllGather:
    """torch's all-gather, which adds up the bytes that a rank sends."""

    def __init__(self) -> None:
        self.nbytes = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Group, async_op: bool = False) -> Any:
        self.nbytes += input_tensor.nbytes
        return torch.distributed.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


def gathered_and_held(group: Group) -> tuple[int, int, int]:
    """Bytes that this rank sends of one FP8 layer's weight, that it stores of it, and that remain after a forward."""
    layer = FP8Linear(64, 128, bias=False)
    shard(layer, reshard_after_forward=True)
    comm = CountingAllGather()
    layer.set_custom_all_gather(comm)
    with torch.no_grad():
        layer(torch.randn(16, 64).bfloat16())
    sent = comm.nbytes
    layer.unshard()
    whole = layer.weight.payload
    layer.reshard()
    local = layer.weight.to_local()
    assert isinstance(local, ScaledTensor)
    return sent, local.payload.untyped_storage().nbytes(), whole.untyped_storage().nbytes()


def test_one_byte_a_weight_is_gathered_and_stored(ranks: RankPool) -> None:
    results = ranks.run(on_default_group, gathered_and_held, num_ranks=4)
    assert results == [(64 * 128 // 4, 64 * 128 // 4, 0)] * 4


def mixed_precision(group: Group) -> None:
    """FP32 parameters around FP8 weights, computed in BF16, reduced in FP32."""
    torch.manual_seed(0)
    linear = FP8Linear(64, 128)
    linear.weight = torch.nn.Parameter(ScaledTensor.quantize(torch.randn(128, 64), dtype=torch.float32))
    model = torch.nn.Sequential(torch.nn.LayerNorm(64), linear.float())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard(model, mp_policy=policy)
    y = model(torch.randn(32, 64))
    assert y.dtype == torch.bfloat16
    y.backward(torch.randn(32, 128).bfloat16())
    assert {param.grad.dtype for param in model.parameters()} == {torch.float32}
    model.unshard()
    assert linear.weight.dtype == torch.bfloat16


def test_mixed_precision_policy(ranks: RankPool) -> None:
    ranks.run(on_default_group, mixed_precision, num_ranks=2)


def from_meta_by_assignment(group: Group) -> dict[str, Tensor]:
    """The same layers, given values by ``load_state_dict(assign=True)``, as torch's FSDP2 example does."""
    with torch.device("meta"):
        model = torch.nn.Sequential(FP8Linear(64, 48), FP8Linear(48, 64, bias=False))
    shard(model)
    generator, found = torch.Generator().manual_seed(5), {}
    for name, empty in model.state_dict().items():
        whole = torch.randn(empty.shape, generator=generator)
        found[name] = torch.nn.Parameter(distribute_tensor(whole, empty.device_mesh, empty.placements))
    model.load_state_dict(found, assign=True)
    model(torch.randn(8, 64)).sum().backward()
    assert model[0].weight.grad is not None
    model.unshard()
    return {
        name: param.dequantize() if isinstance(param, ScaledTensor) else param.detach().clone()
        for name, param in model.named_parameters()
    }


def test_meta_device_then_assigned_values(ranks: RankPool) -> None:
    first, second = ranks.run(on_default_group, from_meta_by_assignment, num_ranks=2)
    generator = torch.Generator().manual_seed(5)
    for name, shape in {"0.weight": (48, 64), "0.bias": (48,), "1.weight": (64, 48)}.items():
        assert torch.equal(first[name], second[name])
        value = torch.randn(shape, generator=generator)
        assert ((first[name] - value).abs() <= value.abs() * 2**-4 + 2**-9 * 2**-6).all(), name
