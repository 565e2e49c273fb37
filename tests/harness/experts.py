"""A tiny model of experts alone, on any number of expert-parallel ranks and replicas of them.

Each expert multiplies its own tokens, so a rank that holds some of the experts computes what one rank computes for
them. Gradients differ by a factor that is a power of two, which changes no mantissa.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8_megatron.checkpoint.run_state import Resumable
from fp8_megatron.config.schema import Config
from fp8_megatron.formats.tensorwise import roles
from fp8_megatron.mcore.runtime import runtime
from fp8_megatron.mcore.topology import Topology, initialized
from fp8_megatron.optimizer.distributed_optimizer import FP8DistributedOptimizer
from fp8_megatron.optimizer.hyperparameters import OptimizerSettings
from fp8_megatron.planning.memory import model_storage
from fp8_megatron.quantization.scaled_tensor import ScaledTensor
from fp8_megatron.sharding.data_parallel import DataParallelModule, Exchange, finish_gradients

CPU = torch.device("cpu")
NUM_EXPERTS, HIDDEN, FFN, TOKENS = 8, 64, 64, 32
SHAPES = {
    "decoder.layers.0.mlp.experts.linear_fc1.weight": (NUM_EXPERTS, FFN, HIDDEN),
    "decoder.layers.0.mlp.experts.linear_fc2.weight": (NUM_EXPERTS, HIDDEN, FFN),
}
#: Without clipping: the squares of the norm are added in another order on other ranks.
SETTINGS = OptimizerSettings(lr=1e-2, clip_grad=0.0)


class Multiply(torch.autograd.Function):
    """x [E, T, K] · weight [E, N, K]ᵀ of an FP8 layer, an expert after another; its gradient goes to `main_grad`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        assert isinstance(weight, ScaledTensor)
        ctx.save_for_backward(x)
        ctx.weight = weight
        return torch.stack([one @ matrix.t() for one, matrix in zip(x, _operand(weight), strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        pairs = list(zip(grads[0], x, strict=True))
        matrices = _operand(ctx.weight, transposed=True)  # before the gradient, which may update the weight
        ctx.weight.main_grad.accumulate_(torch.stack([grad.t() @ one for grad, one in pairs]).bfloat16())
        return torch.stack([grad @ matrix.t() for grad, matrix in zip(grads[0], matrices, strict=True)]), None


def _operand(weight: ScaledTensor, *, transposed: bool = False) -> Tensor:
    """What a GEMM reads of the weight, in FP32."""
    operand = weight.gemm_operand(roles(False).weight, transposed=transposed)
    assert operand.scale.shape == (len(weight),)
    return operand.payload.float() * operand.scale.view(-1, 1, 1)


class Experts(torch.nn.Module):
    """Two matrices an expert, of the experts that this rank holds."""

    def __init__(self, held: int, *, is_fp8: bool) -> None:
        super().__init__()
        self.is_fp8 = is_fp8
        for index, (_, *matrix) in enumerate(SHAPES.values()):
            empty = torch.ones(held, *matrix)
            param = torch.nn.Parameter(ScaledTensor.quantize(empty) if is_fp8 else empty.bfloat16())
            param.counts_matrices = True  # type: ignore[attr-defined]
            self.register_parameter(f"weight{index}", param)

    def forward(self, x: Tensor) -> Tensor:
        """[E, T, HIDDEN] → [E, T, HIDDEN]."""
        for index, weight in enumerate(self.parameters()):
            x = x if index == 0 else x.relu()
            if self.is_fp8:
                x = Multiply.apply(x, weight)
            else:
                x = torch.stack([one @ matrix.t() for one, matrix in zip(x, weight.float(), strict=True)])
        return x


@dataclass(frozen=True)
class ExpertRun:
    """A rank's model of experts with its optimizer."""

    config: Config
    topology: Topology
    module: Experts
    model: DataParallelModule
    optimizer: FP8DistributedOptimizer

    def train(self, first: int, num_steps: int, *, same_tokens: bool = False) -> None:
        """Steps from `first` on; `same_tokens` gives all replicas of an expert the same tokens."""
        for step in range(first, first + num_steps):
            self._step(step, same_tokens)

    def _step(self, number: int, same_tokens: bool) -> None:
        generator = torch.Generator().manual_seed(number)
        replicas = self.topology.replicas_of_matrices
        x, target = torch.randn(
            2, NUM_EXPERTS, TOKENS * (1 if same_tokens else replicas.size), HIDDEN, generator=generator
        )
        held, own = NUM_EXPERTS // self.topology.ep.size(), 0 if same_tokens else replicas.rank
        first = self.topology.ep.rank() * held
        mine = (slice(first, first + held), slice(own * TOKENS, (own + 1) * TOKENS))
        self.model.reset()
        (self.module(x[mine]) - target[mine]).square().sum(dim=2).mean().backward()
        finish_gradients([self.model])
        self.optimizer.step()
        self.model.wait_for_weights()

    def state(self) -> dict[str, Tensor]:
        """Masters, the rule's states, weights and the scales of their casts, of this rank's experts."""
        self.model.wait_for_weights()
        found = {}
        for state, slot in self.optimizer.slots():
            for kind in ("master", *state.states):
                found[f"{kind} {slot.name}"] = state.space.assemble(
                    slot, lambda part, own=(state, kind, slot): own[0].part(*own[1:], part).load()
                )
            param = slot.param
            found[f"weight {slot.name}"] = param.dequantize() if isinstance(param, ScaledTensor) else param.float()
            if isinstance(param, ScaledTensor) and param.cast_scale is not None:
                found[f"cast scale {slot.name}"] = param.cast_scale.scale.clone()
        return found

    @property
    def resumable(self) -> Resumable:
        """What a checkpoint saves and restores."""
        return Resumable(self.config, self.optimizer, [], self.topology, CPU, 1, 1)


def initial_value(name: str) -> Tensor:
    """Experts of very different sizes: under one scale the small ones would lose their bits."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    size = 2.0 ** -torch.arange(NUM_EXPERTS).view(-1, 1, 1)
    return torch.randn(SHAPES[name], generator=generator) / HIDDEN**0.5 * size


@contextmanager
def expert_run(config: Config, bucket_numel: int = 1 << 30) -> Iterator[ExpertRun]:
    """The model with its initial values; on every rank of `ranks.RankPool`."""
    with runtime(CPU), initialized(config.parallel, 1, CPU) as topology:
        module = Experts(NUM_EXPERTS // topology.ep.size(), is_fp8=config.precision.is_fp8)
        named = dict(zip(SHAPES, module.parameters(), strict=True))
        storage = model_storage(config.precision, num_micro_batches=1)
        model = DataParallelModule(
            module,
            named,
            sharing_of=topology.sharing_of,
            region_of=topology.region_of,
            storage=storage,
            exchange=Exchange(bucket_numel=bucket_numel),
        )
        optimizer = FP8DistributedOptimizer([model], SETTINGS, storage, world=topology.world, device=CPU)
        values = ((name, topology.region_of(param).part_of(initial_value(name))) for name, param in named.items())
        optimizer.load_weights(values)
        yield ExpertRun(config, topology, module, model, optimizer)
