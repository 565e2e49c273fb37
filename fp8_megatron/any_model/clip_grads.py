"""The norm of gradients in flat storage, and clipping to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..device.group import Group
from .gradients import ParamGrad, ReadableGradBuffer


@torch.no_grad()
def clip_grad_norm_(parameters: torch.nn.Module | Tensor | Iterable[Tensor], max_norm: float) -> Tensor:
    """Clip the gradients of a model, or of some parameters, to a joint L2 norm; returns the norm before, FP32 [].

    One pass over the gradients in their own storage, without waiting for the device. A factor on FP8 gradients changes
    their scales alone. Over replicas the norm is that of the mean gradient, and all replicas call this. Parameters that
    the FP8 optimizer does not hold are clipped as torch does. A norm that is not finite makes all gradients NaN; the
    optimizer then skips its step.

    Args:
        parameters: a module, a parameter, or parameters; those without a gradient are left out, and one that is given
            twice (tied weights) counts once.
    """
    if isinstance(parameters, torch.nn.Module):
        parameters = parameters.parameters()
    params = [parameters] if isinstance(parameters, Tensor) else list(dict.fromkeys(parameters))
    params = [param for param in params if param.grad is not None]
    if not params:
        return torch.zeros(())
    if hasattr(params[0], "full_tensor"):  # under FSDP2 gradients are torch's, in shards
        sharded_norm: Any = torch.nn.utils.clip_grad_norm_(params, max_norm)
        return sharded_norm.full_tensor()
    whole, single, plain = _sorted_by_storage(params)
    squares = [grad.squared_norm() for grad in single]
    squares += [grad.float().square().sum().reshape(1) for grad in plain]
    squares += _squared_norms(whole)
    norm = torch.cat([square.to(params[0].device) for square in squares]).sum().sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for buffer in whole:
        buffer.scale_(factor)
    for own in single:
        own.scale_(factor)
    for own in (*single, *(grad for buffer in whole for grad in buffer.gradients)):
        own.scale_others_(factor)
    for grad in plain:
        grad.mul_(factor.to(grad.device))
    return norm


def _squared_norms(buffers: Sequence[ReadableGradBuffer]) -> list[Tensor]:
    """Σ x² of the gradients of buffers, in summands FP32 [1]; called by every replica."""
    shared: dict[Group, list[Tensor]] = {}
    squares = []
    for buffer in buffers:
        group = buffer.space.replicas.group
        square = buffer.squared_norm()
        if group is None or buffer.space.num_shards == 1:
            squares.append(square)
        else:
            shared.setdefault(group, []).append(square)
    for group, parts in shared.items():
        total = torch.cat(parts).sum().reshape(1)
        torch.distributed.all_reduce(total, group=group)
        squares.append(total)
    return squares


def _sorted_by_storage(params: Sequence[Tensor]) -> tuple[list[ReadableGradBuffer], list[ParamGrad], list[Tensor]]:
    """Buffers whose gradients are all meant, single gradients of others, and gradients in no buffer."""
    wanted: dict[ReadableGradBuffer, list[ParamGrad]] = {}
    plain: list[Tensor] = []
    for param in params:
        own = getattr(param, "main_grad", None)
        if isinstance(own, ParamGrad):
            wanted.setdefault(own.buffer, []).append(own)
        elif param.grad is not None:
            plain.append(param.grad)
    whole, single = [], []
    for buffer, grads in wanted.items():
        if sum(buffer.settle()) == len(grads):
            whole.append(buffer)
        else:
            single += grads
    return whole, single, plain
