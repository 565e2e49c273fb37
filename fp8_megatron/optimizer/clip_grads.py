"""The global gradient norm, over FP8 and 16-bit gradients alike, without a host synchronisation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..device.group import Group
from ..quantization.amax_history import AmaxHistory, SquareSum
from ..sharding.gradient import GradBuffer


def global_grad_norm(
    buffers: Iterable[GradBuffer],
    world: Group | None,
    device: torch.device,
    histories: Sequence[AmaxHistory] = (),
    loss: Tensor | None = None,
) -> Tensor:
    """L2 norm of all gradients of the model, FP32 [1] on the device; each parameter counts once.

    Called by every rank of `world` after gradients were averaged over replicas. Each rank holds a different part of the
    model, so one all-reduce (SUM) gives the norm. It is NaN or inf if any gradient is. Finite gradients do not show two
    faults, and the norm is NaN then too: a cast with a delayed scale clamps an inf, and a target whose logit is -inf
    has the loss inf.

    Args:
        world: the ranks that hold the model between them; None for one rank without a process group.
        histories: delayed scales of this rank's casts, to be examined (`AmaxHistory.examine`).
        loss: FP32 [1], this rank's part of the step's loss; None: not looked at.
    """
    # 0 · x is NaN where x is not finite.
    total = SquareSum(torch.zeros(1, device=device) if loss is None else loss * 0.0)
    for buffer in buffers:
        sharing = buffer.space.sharing
        if sharing.counts_in_norm:
            square = buffer.squared_norm()
            total.add_(square if sharing.grad_factor == 1.0 else square * sharing.grad_factor**2)
    for history in histories:
        history.examine(total)
    if world is not None and world.size() > 1:
        torch.distributed.all_reduce(total, group=world)
    return total.sqrt()


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients are multiplied by, FP32 [1]: min(1, max_norm / norm), 1 if max_norm is 0, NaN for a bad norm.

    With NaN the optimizer step writes nothing (`ops.adamw_step_`).
    """
    factor = torch.ones_like(norm) if max_norm <= 0 else (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return torch.where(torch.isfinite(norm), factor, torch.full_like(norm, torch.nan))
