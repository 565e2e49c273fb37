"""The specification of what Muon's step does with each element, in plain PyTorch.

The step makes whole matrices of directions orthogonal between its two halves: `momentum_step_` gives the directions,
`orthogonal_step_` or `orthogonal_split_step_` moves masters by what was made of them. State is stored and rounded as in
`adamw.reference`, with the same random bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...dtypes import COMPANDED_DTYPES, E4M3
from ..adamw.reference import FlatState, is_rounded, move_master_, store_moment_, update_where_finite
from ..adamw.split_master import SplitMaster, move_split_master_
from ..quantize.blockwise import load_state
from ..registration import operator
from ..rounding import Places, exp_avg_bits, rounding_bits


class MomentumState(NamedTuple):
    """What the first half reads and updates, flat [n] each, in its own storage dtype. The gradient is only read.

    Attributes:
        places: where the elements lie in the whole model, for stochastic rounding; only read.
    """

    grad: FlatState
    momentum: FlatState
    places: Places = Places()


def _check_momentum(state: MomentumState, direction: Tensor) -> None:
    assert state.momentum.payload.dtype != torch.uint8, state.momentum.payload.dtype  # it has no sign
    assert direction.is_contiguous(), direction.stride()


@operator(gpu=".triton", mutates=["momentum", "direction"], check=_check_momentum)
def momentum_step_(
    state: MomentumState, direction: Tensor, *, beta: float, nesterov: bool, grad_factor: Tensor, step: Tensor
) -> None:
    """m ← beta · m + (1 − beta) · g in place, and the direction: m, or beta · m + (1 − beta) · g of the new m.

    The direction uses the momentum before it is rounded to storage.

    Args:
        direction: flat [n], in any float dtype; written.
        grad_factor, step: as in `adamw.reference.adamw_step_`. If the factor is not finite, nothing is written.
    """

    def update() -> None:
        g = load_state(*state.grad) * grad_factor
        m = beta * load_state(*state.momentum) + (1.0 - beta) * g
        bits = rounding_bits(g.numel(), step, state.places) if is_rounded(state.momentum) else None
        store_moment_(m, state.momentum, bits, exp_avg_bits)
        direction.copy_(beta * m + (1.0 - beta) * g if nesterov else m)

    update_where_finite(grad_factor, [*state.momentum, direction], update)


def _check_master(update: Tensor, master: FlatState) -> None:
    assert update.is_contiguous() and update.numel() == master.payload.numel(), (update.shape, master.payload.shape)
    assert master.payload.dtype not in COMPANDED_DTYPES, master.payload.dtype


@operator(gpu=".triton", mutates=["master", "weight", "chunk_amax"], check=_check_master)
def orthogonal_step_(
    update: Tensor,
    master: FlatState,
    places: Places,
    *,
    lr: float,
    weight_decay: float,
    grad_factor: Tensor,
    step: Tensor,
    weight: Tensor | None = None,
    chunk_amax: Tensor | None = None,
) -> None:
    """p ← p − lr · (update + weight_decay · p) over flat storage, in place.

    Args:
        update: flat [n], in any float dtype.
        grad_factor: FP32 [1]. If it is not finite, nothing is written; the update is not multiplied by it.
        places, step, weight, chunk_amax: as in `adamw.reference.adamw_step_`.
    """

    def move() -> None:
        p = load_state(*master)
        bits = rounding_bits(p.numel(), step, places) if is_rounded(master) else None
        move_master_(p, _change(update, p, lr, weight_decay), master, bits, weight, chunk_amax)

    update_where_finite(grad_factor, [*master, weight, chunk_amax], move)


def _check_split_master(update: Tensor, master: SplitMaster) -> None:
    assert update.is_contiguous() and master.weight.dtype == E4M3 and master.correction.dtype == torch.int8, master
    assert master.scales.is_contiguous() and master.new_scales.is_contiguous(), master.scales.stride()


@operator(gpu=".triton", mutates=["weight", "correction", "chunk_amax"], check=_check_split_master)
def orthogonal_split_step_(
    update: Tensor,
    master: SplitMaster,
    *,
    lr: float,
    weight_decay: float,
    grad_factor: Tensor,
    step: Tensor,
    chunk_amax: Tensor,
) -> None:
    """`orthogonal_step_` with split masters, which are written with their new scales. The caller adopts these, behind
    the last part that is read with the old ones.

    Args:
        chunk_amax: FP32 [n / chunk] receives the largest magnitude of each chunk of the new master.
    """

    def move() -> None:
        bits = rounding_bits(update.numel(), step, master.places)
        move_split_master_(master, lambda p: _change(update, p, lr, weight_decay), bits, chunk_amax)

    update_where_finite(grad_factor, [master.weight, master.correction, chunk_amax], move)


def _change(update: Tensor, p: Tensor, lr: float, weight_decay: float) -> Tensor:
    return -lr * (update.float() + weight_decay * p)
