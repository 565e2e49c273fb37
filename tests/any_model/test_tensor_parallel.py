"""torch's tensor parallelism beside FP8 layers: an error with the fix, in every order of calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import fp8_megatron
from fp8_megatron.any_model.optimizer import FP8Optimizer
from fp8_megatron.device.group import Group
from fp8_megatron.errors import UserError
from tests.harness.ranks import RankPool, on_default_group

INSTEAD = r"leave parallelize_module \(distribute_tensor\) out"


def build() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32), torch.nn.LayerNorm(32)
    )


def cut(model: torch.nn.Module, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def initialized(model: torch.nn.Sequential) -> FP8Optimizer:
    return fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters()))[1]


def behind_initialize(model: torch.nn.Sequential, mesh: DeviceMesh) -> None:
    initialized(model)
    with pytest.raises(UserError, match=rf"0: .*{INSTEAD}"):
        cut(model, mesh)


def behind_replace_linears(model: torch.nn.Sequential, mesh: DeviceMesh) -> None:
    fp8_megatron.replace_linears(model)
    with pytest.raises(UserError, match=rf"0: .*{INSTEAD}"):
        cut(model, mesh)


def before_initialize(model: torch.nn.Sequential, mesh: DeviceMesh) -> None:
    cut(model, mesh)
    with pytest.raises(UserError, match=rf"0\.weight is a DTensor: .*{INSTEAD}"):
        initialized(model)


def before_replace_linears(model: torch.nn.Sequential, mesh: DeviceMesh) -> None:
    cut(model, mesh)
    with pytest.raises(UserError, match=rf"0\.weight is a DTensor already: .*{INSTEAD}"):
        fp8_megatron.replace_linears(model)


def of_a_norm_behind_initialize(model: torch.nn.Sequential, mesh: DeviceMesh) -> None:
    optimizer = initialized(model)
    parallelize_module(model, mesh, {"3": SequenceParallel()})
    model[:3](torch.randn(16, 32)).sum().backward()
    with pytest.raises(UserError, match=rf"3\.weight: it is a DTensor since initialize\. .*{INSTEAD}"):
        optimizer.step()


def run(group: Group, case: Callable[[torch.nn.Sequential, DeviceMesh], None]) -> None:
    case(build(), init_device_mesh("cpu", (group.size(),)))


@pytest.mark.parametrize(
    "case",
    [behind_initialize, behind_replace_linears, before_initialize, before_replace_linears, of_a_norm_behind_initialize],
)
def test_tensor_parallelism_is_an_error_with_the_fix(ranks: RankPool, case: Callable[..., None]) -> None:
    ranks.run(on_default_group, run, case, num_ranks=2)
