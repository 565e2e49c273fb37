"""MS-AMP's FSDP over torch's ``fully_shard``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from ..nn.linear import remember

#: FSDP1's policy: (module=, recurse=, nonwrapped_numel=) → whether to look below a module, or to wrap it.
Policy = Callable[..., bool]


class FP8FullyShardedDataParallel:
    """``fully_shard`` with FSDP1's call: returns the model itself, sharded.

    A rank keeps and gathers one byte of each FP8 weight, and its gradients are reduced in FP8. Modules that the policy
    wraps are gathered one by one.

    Args:
        module: after `FsdpReplacer.replace`.
        process_group: the ranks; all ranks without.
        auto_wrap_policy: FSDP1's; without one the whole model is gathered at once.
        use_orig_params: True or False; parameters are always the module's own.

    Raises:
        ValueError: another argument of FSDP1.
    """

    def __new__(  # type: ignore[misc]
        cls,
        module: torch.nn.Module,
        process_group: dist.ProcessGroup | None = None,
        *,
        auto_wrap_policy: Policy | None = None,
        use_orig_params: bool = True,
        **unknown: Any,
    ) -> torch.nn.Module:
        del use_orig_params
        if unknown:
            raise ValueError(
                f"FP8FullyShardedDataParallel({', '.join(unknown)}): only process_group, auto_wrap_policy and "
                f"use_orig_params are taken; call torch's fully_shard for the rest"
            )
        device = next(module.parameters()).device.type
        if process_group is None:
            mesh = init_device_mesh(device, (dist.get_world_size(),))
        else:
            mesh = DeviceMesh.from_group(process_group, device)
        if auto_wrap_policy is not None:
            _shard_children(module, auto_wrap_policy, mesh)
        fully_shard(module, mesh=mesh)
        for part in module.modules():
            if isinstance(part, FSDPModule) and dist.get_backend(mesh.get_group()) == "gloo":
                part.set_force_sum_reduction_for_comms(True)  # gloo has no mean
        remember(module)
        return module


def _shard_children(module: torch.nn.Module, policy: Policy, mesh: DeviceMesh) -> int:
    """Shard what the policy wraps below `module`, from the bottom up; how many elements that were."""
    wrapped = 0
    for child in module.children():
        numel = sum(parameter.numel() for parameter in child.parameters())
        if not numel:
            continue
        looks_below = policy(module=child, recurse=True, nonwrapped_numel=numel)
        inside = _shard_children(child, policy, mesh) if looks_below else 0
        if policy(module=child, recurse=False, nonwrapped_numel=numel - inside):
            fully_shard(child, mesh=mesh)
            inside = numel
        wrapped += inside
    return wrapped
