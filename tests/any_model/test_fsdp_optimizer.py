"""The optimizer on the shards of torch's fully_shard: any number of ranks trains what one rank trains, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from fp8_megatron.any_model import replace_linears
from fp8_megatron.any_model.fsdp import build_sharded_optimizer
from fp8_megatron.formats import LEVELS
from fp8_megatron.quantization.scaled_tensor import ScaledTensor
from tests.harness.ranks import RankPool, on_default_group

Group = torch.distributed.ProcessGroup
VOCABULARY = 50  # uneven over 4 ranks


class TinyModel(torch.nn.Module):
    """An embedding, two blocks of a norm and linear layers with biases, and a head that stays in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, 64)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.LayerNorm(64), torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64)
            )
            for _ in range(2)
        )
        self.head = torch.nn.Linear(64, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def build(opt_level: str, dtype: torch.dtype, **options: Any) -> tuple[TinyModel, Any]:
    """A sharded model and its optimizer."""
    torch.manual_seed(0)
    model = TinyModel().to(dtype)
    replace_linears(model, weight=LEVELS[opt_level].weight)
    for module in (*model.blocks, model):
        fully_shard(module, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no mean
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    return model, build_sharded_optimizer(model, adamw, opt_level)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step % 3)
    tokens = torch.randint(VOCABULARY, (4, 17), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def train_step(model: TinyModel, optimizer: Any, step: int) -> float:
    inputs, targets = batch(step)
    loss = torch.nn.functional.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def whole_weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """The values that every rank computes with, gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
    weights = {
        name: (param.dequantize() if isinstance(param, ScaledTensor) else param.detach().clone())
        for name, param in model.named_parameters()
    }
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return weights


def train(
    group: Group, opt_level: str, dtype: torch.dtype, mesh_shape: tuple[int, ...] = ()
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of six steps, all ranks with the same batches, and the weights after them."""
    shape = mesh_shape or (group.size(),)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    model, optimizer = build(opt_level, dtype, mesh=mesh)
    losses = [train_step(model, optimizer, step) for step in range(6)]
    return losses, whole_weights(model)


@pytest.fixture(scope="module")
def one_rank(ranks: RankPool) -> Any:
    """What one rank trains, by level and dtype."""
    known: dict[Any, Any] = {}

    def result(opt_level: str, dtype: torch.dtype) -> Any:
        if (opt_level, dtype) not in known:
            known[opt_level, dtype] = ranks.run(on_default_group, train, opt_level, dtype, num_ranks=1)[0]
        return known[opt_level, dtype]

    return result


@pytest.mark.parametrize(
    "opt_level, dtype, num_ranks",
    [
        ("O3", torch.bfloat16, 2),
        ("O3", torch.bfloat16, 4),
        ("O3", torch.float32, 2),
        ("O2", torch.bfloat16, 2),
        ("O1", torch.float32, 4),
    ],
)
def test_equals_one_rank(ranks: RankPool, one_rank: Any, opt_level: str, dtype: torch.dtype, num_ranks: int) -> None:
    """Means of two or four equal BF16 gradients are exact, so nothing may differ."""
    losses, weights = one_rank(opt_level, dtype)
    assert losses[3] < 0.75 * losses[0], losses  # the first batch once more
    for other_losses, other_weights in ranks.run(on_default_group, train, opt_level, dtype, num_ranks=num_ranks):
        assert other_losses == losses
        for name, weight in weights.items():
            assert torch.equal(other_weights[name], weight), name


def test_hsdp_equals_one_rank(ranks: RankPool, one_rank: Any) -> None:
    losses, weights = one_rank("O3", torch.bfloat16)
    results = ranks.run(on_default_group, train, "O3", torch.bfloat16, (2, 2), num_ranks=4)
    assert all(
        result[0] == losses and all(map(torch.equal, result[1].values(), weights.values())) for result in results
    )
