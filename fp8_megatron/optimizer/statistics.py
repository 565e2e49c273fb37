"""Figures of the whole model that a run may report: the norm of its parameters, zeros in its gradients, and updates of
whole matrices."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..device.group import Group
from ..sharding.gradient import GradBuffer
from .matrix_state import ROLES, MatrixSpaceState
from .state import SpaceState

#: Elements whose zeros are counted at once. The comparison takes a byte each.
_PIECE = 1 << 24


def params_norm(states: Iterable[SpaceState], world: Group | None, device: torch.device) -> Tensor:
    """L2 norm of all master weights of the model, FP32 [1] on the device; each parameter counts once.

    Called by every rank of `world`, the ranks that hold the model between them. Nothing waits for the device.
    """
    total = torch.zeros(1, dtype=torch.float64, device=device)
    for state in states:
        if state.space.sharing.counts_in_norm:
            total += state.squared_norm()
    return _summed(total, world).sqrt().float()


def num_zeros(buffers: Iterable[GradBuffer], world: Group | None, device: torch.device) -> Tensor:
    """Elements of the model's averaged gradients that are 0, FP32 [1] on the device; each parameter counts once.

    Called by every rank of `world` between a step and the next one's backward. An FP8 gradient that was too small for
    its block's scale is 0 too. Nothing waits for the device.
    """
    total = torch.zeros(1, dtype=torch.float64, device=device)
    for buffer in buffers:
        space = buffer.space
        if space.sharing.counts_in_norm:
            # Padding is 0 and no parameter, so what is not 0 is counted. Replicas count their shards.
            total += space.num_params / space.num_shards
            for piece in buffer.payload.split(_PIECE):
                bits = piece.view(torch.uint8) & 0x7F if piece.itemsize == 1 else piece
                total -= torch.count_nonzero(bits)
    return _summed(total, world).float()


def update_figures(states: Iterable[SpaceState], world: Group | None, device: torch.device) -> dict[str, Tensor]:
    """Of the updates that were measured, which are zeroed, FP32 [1] each on the device: ``update_rms_<role>``, the root
    mean square of an update's elements without the learning rate, and ``orthogonality_error``, the mean over matrices
    of `newton_schulz.polar_factor`'s errors. NaN where there was none.

    Called by every rank of `world`. Nothing waits for the device.
    """
    total = torch.zeros(len(ROLES) + 2, 2, dtype=torch.float64, device=device)
    for state in states:
        if isinstance(state, MatrixSpaceState) and state.measures:
            if state.space.sharing.counts_in_norm:
                total += state.measured
            state.measured.zero_()
    sums, counts = _summed(total, world).unbind(1)
    means = sums / counts
    figures = {f"update_rms_{role}": means[index].sqrt() for index, role in enumerate(ROLES)}
    return {name: value.float().view(1) for name, value in {**figures, "orthogonality_error": means[-1]}.items()}


def _summed(total: Tensor, world: Group | None) -> Tensor:
    if world is not None and world.size() > 1:
        torch.distributed.all_reduce(total, group=world)
    return total
