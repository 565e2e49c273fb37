"""Models under `initialize` and ``fully_shard``, for tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from fp8_megatron.quantization.scaled_tensor import ScaledTensor


def master_of(param: Tensor) -> Tensor:
    """A parameter's value, of an FP8 weight its master's (a copy on the CPU)."""
    return (param.master_value() if isinstance(param, ScaledTensor) else param.detach()).to("cpu", copy=True)


def masters(model: torch.nn.Module) -> dict[str, Tensor]:
    """`master_of` all parameters."""
    return {name: master_of(param) for name, param in model.named_parameters()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Check that both have the same bits."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def cpu_mesh() -> DeviceMesh:
    """All ranks. Without it FSDP2 takes GPUs where there are any."""
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),))


def shard(*modules: torch.nn.Module, **options: Any) -> None:
    """``fully_shard`` of each, the model last. gloo has no mean, so ranks divide sums."""
    options.setdefault("mesh", cpu_mesh())
    for module in modules:
        fully_shard(module, **options)
    for module in modules[-1].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
