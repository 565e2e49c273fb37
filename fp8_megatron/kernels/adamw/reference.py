"""The specification of the fused Adam(W) step over flat storage, in plain PyTorch, and of FP8 weights derived from it.

The step over a split master is `split_master`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...dtypes import COMPANDED_DTYPES
from .. import companding
from ..quantize.blockwise import load_state, store_state_
from ..reference import encode, scale_from_amax
from ..registration import operator
from ..rounding import (
    GRIDS,
    Places,
    exp_avg_bits,
    exp_avg_sq_bits,
    master_noise,
    round_sum_to_grid,
    round_to_grid,
    rounding_bits,
    uniform,
)


class FlatState(NamedTuple):
    """A flat tensor as it is stored.

    Attributes:
        payload: [n], in any storage dtype.
        scales: FP32 [n / block], the block scales; None for a dtype without scales.
    """

    payload: Tensor
    scales: Tensor | None = None


class AdamState(NamedTuple):
    """The state that a step of Adam reads and updates, flat [n] each, in its own storage dtype. The gradient is only
    read.

    Attributes:
        places: where the elements lie in the whole model, for stochastic rounding; only read.
    """

    grad: FlatState
    exp_avg: FlatState
    exp_avg_sq: FlatState
    master: FlatState
    places: Places = Places()


class SplitAdamState(NamedTuple):
    """`AdamState` with a split master (see `split_master`).

    Attributes:
        weight: flat E4M3 [n]. correction: flat int8 [n].
        weight_scales: FP32 [num_tensors], the scales of the stored `weight`; overwritten with `new_weight_scales`.
        new_weight_scales: FP32 [num_tensors], the scales that the step writes `weight` with; only read.
        chunk_tensor: int32 [n / chunk], the tensor of each chunk.
        places: as in `AdamState`.
    """

    grad: FlatState
    exp_avg: FlatState
    exp_avg_sq: FlatState
    weight: Tensor
    correction: Tensor
    weight_scales: Tensor
    new_weight_scales: Tensor
    chunk_tensor: Tensor
    places: Places = Places()


class AdamHyper(NamedTuple):
    """The numbers of a step.

    Attributes:
        decoupled: weight decay is separate from the gradient (AdamW); otherwise it is the gradient's L2 term (Adam).
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool

    @property
    def update_bound(self) -> float:
        """The largest update of Adam with exact moments, in learning rates, whatever the gradients.

        ``(1-β₁) / √((1-β₂)(1-β₁²/β₂))``, by Cauchy-Schwarz on the two sums over past gradients: 1.17 at (0.9, 0.95),
        7.3 at (0.9, 0.999). Infinite if β₁² ≥ β₂.
        """
        if self.beta1 == 0.0:
            return max(1.0, 1.0 / math.sqrt(1.0 - self.beta2))
        if self.beta1 * self.beta1 >= self.beta2:
            return math.inf
        return max(
            1.0, (1.0 - self.beta1) / math.sqrt((1.0 - self.beta2) * (1.0 - self.beta1 * self.beta1 / self.beta2))
        )

    @property
    def largest_change(self) -> float:
        """The largest update beside rounded moments."""
        return self.lr * self.update_bound if self.update_bound < math.inf else math.inf


def check_moments(exp_avg: FlatState, exp_avg_sq: FlatState) -> None:
    """Check that each companded dtype holds the moment it is for: uint8 has no sign, int8 wastes half of its codes on
    values below zero."""
    dtypes = exp_avg.payload.dtype, exp_avg_sq.payload.dtype
    assert dtypes[0] != torch.uint8 and dtypes[1] != torch.int8, dtypes


def _check_state(state: AdamState) -> None:
    check_moments(state.exp_avg, state.exp_avg_sq)
    assert state.master.payload.dtype not in COMPANDED_DTYPES, state.master.payload.dtype


@operator(gpu=".triton", mutates=["exp_avg", "exp_avg_sq", "master", "weight", "chunk_amax"], check=_check_state)
def adamw_step_(
    state: AdamState,
    hyper: AdamHyper,
    *,
    grad_factor: Tensor,
    step: Tensor,
    weight: Tensor | None = None,
    chunk_amax: Tensor | None = None,
) -> None:
    """One Adam(W) step over flat storage, in place. It is computed in FP32; each operand has its own storage dtype.

    AdamW (Loshchilov & Hutter, arXiv 1711.05101, Algorithm 2; `AdamHyper.decoupled`), or Adam with the L2 term in the
    gradient, which enters both moments. The update uses the moments before they are rounded to storage. State of fewer
    than 32 bits is rounded stochastically, by a hash of (parameter, place of the element in it, `step`): see
    `rounding`. Beside such moments an update is at most `AdamHyper.update_bound` learning rates.

    Args:
        grad_factor: FP32 [1], multiplies the gradient (clipping, averaging). If it is not finite, nothing is written:
            the step is skipped on the device, without host synchronisation.
        step: FP32 [1], the number of this step counted from 1 over steps that were not skipped.
        weight: flat [n] 16- or 32-bit copy that receives the new value as the master stores it, or None (FP8 weights
            are derived afterwards with `chunk_amax`; with no separate master, the master is the weight).
        chunk_amax: FP32 [n / chunk] receives the largest magnitude of each chunk of the new master, or None.
    """
    master = state.master

    def update() -> None:
        g = load_state(*state.grad) * grad_factor
        bits = (
            rounding_bits(g.numel(), step, state.places)
            if is_rounded(state.exp_avg, state.exp_avg_sq, master)
            else None
        )
        p = load_state(*master)
        change = adam_change_(g, p, state.exp_avg, state.exp_avg_sq, step, hyper, bits)
        if master.payload.dtype is torch.float32:
            decay = 1.0 - hyper.lr * hyper.weight_decay if hyper.decoupled else 1.0
            master.payload.copy_(p * decay - change)
        else:
            store_master_(p, shrunk_too(change, p, hyper), master, bits)
        _read_master_(master, weight, chunk_amax)

    update_where_finite(grad_factor, [*state.exp_avg, *state.exp_avg_sq, *master, weight, chunk_amax], update)


def adam_change_(
    g: Tensor,
    p: Tensor,
    exp_avg: FlatState,
    exp_avg_sq: FlatState,
    step: Tensor,
    hyper: AdamHyper,
    bits: Tensor | None,
) -> Tensor:
    """What Adam subtracts from the parameters `p`, FP32 [n], without decoupled decay; moments are updated in place.

    Args:
        g: the scaled gradient.
        bits: of `rounding_bits`; None if no moment is rounded.
    """
    if not hyper.decoupled:
        g = g + hyper.weight_decay * p
    m = hyper.beta1 * load_state(*exp_avg) + (1.0 - hyper.beta1) * g
    v = hyper.beta2 * load_state(*exp_avg_sq) + (1.0 - hyper.beta2) * g * g
    # In FP64, so that every device rounds the same numbers to FP32.
    bias_correction1 = -torch.expm1((step * _log(hyper.beta1)).double()).float()
    bias_correction2 = -torch.expm1((step * _log(hyper.beta2)).double()).float()
    store_moment_(m, exp_avg, bits, exp_avg_bits)
    store_moment_(v, exp_avg_sq, bits, exp_avg_sq_bits)
    change = (hyper.lr / bias_correction1) * m / (companding.square_root(v / bias_correction2) + hyper.eps)
    return change.clamp_(-hyper.largest_change, hyper.largest_change) if is_rounded(exp_avg, exp_avg_sq) else change


def shrunk_too(change: Tensor, p: Tensor, hyper: AdamHyper) -> Tensor:
    """What the step adds to `p`, FP32 [n]: decoupled decay and Adam's change, without `p` itself."""
    return -(hyper.lr * hyper.weight_decay * p + change) if hyper.decoupled else -change


def is_rounded(*stored: FlatState) -> bool:
    """Whether any of these is stored in fewer than 32 bits."""
    return any(operand.payload.dtype is not torch.float32 for operand in stored)


def store_moment_(value: Tensor, moment: FlatState, bits: Tensor | None, take: Callable[[Tensor, int], Tensor]) -> None:
    """Round [n] stochastically into storage.

    In a block that is not all zeros, second moments become at least the smallest number. First moments below the
    smallest number become 0: that number, drawn now and then, would be far too large beside the root of a tiny second
    moment.
    """
    payload, scales = moment
    if payload.dtype is torch.float32:
        payload.copy_(value)
        return
    assert bits is not None
    if payload.dtype in COMPANDED_DTYPES:
        store_state_(value, payload, scales, uniform(take(bits, 23)))
        return
    grid = GRIDS[payload.dtype]
    noise = take(bits, grid.dropped_bits)
    if scales is None:
        payload.copy_(round_to_grid(value, noise, grid))
        return
    blocks = value.view(scales.numel(), -1)
    amax = blocks.abs().amax(dim=1, keepdim=True)
    scale = scale_from_amax(amax, payload.dtype, power_of_two=True)
    scales.copy_(scale.view(-1))
    inverse, noise = scale.reciprocal(), noise.view_as(blocks)
    if take is exp_avg_sq_bits:
        rounded = round_to_grid(blocks, noise, grid, inverse, torch.where(amax > 0.0, grid.smallest, 0.0))
    else:
        rounded = round_to_grid(blocks, noise, grid, inverse)
        rounded = torch.where((blocks * inverse).abs() < grid.smallest, 0.0, rounded)
    payload.copy_(rounded.view(-1))


def store_master_(p: Tensor, change: Tensor, master: FlatState, bits: Tensor | None) -> None:
    """``p + change`` [n], rounded stochastically into storage."""
    assert bits is not None
    payload, scales = master
    noise, grid = master_noise(bits), GRIDS[payload.dtype]
    if scales is None:
        payload.copy_(round_sum_to_grid(p, change, noise, grid))
        return
    shape = (scales.numel(), -1)
    p, change, noise = p.view(shape), change.view(shape), noise.view(shape)
    amax = (p + change).abs().amax(dim=1, keepdim=True)
    # The exact sum is below the float after the rounded one. With its scale no sum is rounded beyond the largest code.
    after = torch.where(amax == 0.0, amax, (amax.view(torch.int32) + 1).view(torch.float32))
    scale = scale_from_amax(after, payload.dtype, power_of_two=True)
    scales.copy_(scale.view(-1))
    stored = round_sum_to_grid(p, change, noise, grid, scale)
    payload.copy_((stored * scale.reciprocal()).view(-1))


def move_master_(
    p: Tensor,
    change: Tensor,
    master: FlatState,
    bits: Tensor | None,
    weight: Tensor | None,
    chunk_amax: Tensor | None,
) -> None:
    """Store ``p + change`` [n], and write `weight` and `chunk_amax` as `adamw_step_` does."""
    if master.payload.dtype is torch.float32:
        master.payload.copy_(p + change)
    else:
        store_master_(p, change, master, bits)
    _read_master_(master, weight, chunk_amax)


def _read_master_(master: FlatState, weight: Tensor | None, chunk_amax: Tensor | None) -> None:
    stored = load_state(*master)
    if weight is not None:
        weight.copy_(stored)
    if chunk_amax is not None:
        torch.amax(stored.abs().view(chunk_amax.numel(), -1), dim=1, out=chunk_amax)


def update_where_finite(factor: Tensor, written: Sequence[Tensor | None], update: Callable[[], None]) -> None:
    """Run `update`, which writes the tensors `written`. If `factor` [1] is not finite, they keep their values.

    On a GPU the host does not wait: the update always runs, and the GPU undoes it (from one copy of `written`).
    """
    if factor.device.type == "cpu":
        if bool(torch.isfinite(factor)):
            update()
        return
    tensors = [tensor for tensor in written if tensor is not None]
    before = [tensor.clone() for tensor in tensors]
    update()
    keep_new = torch.isfinite(factor)
    for tensor, old in zip(tensors, before, strict=True):
        as_bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize]
        new_bits = tensor.view(as_bits)
        new_bits.copy_(torch.where(keep_new, new_bits, old.view(as_bits)))


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0.0 else -math.inf


@operator(gpu=".triton", mutates=["payload"])
def derive_fp8_weights_(
    master: Tensor, master_scales: Tensor | None, payload: Tensor, weight_scales: Tensor, chunk_tensor: Tensor
) -> None:
    """FP8 weights from their master: ``payload = cast(master / scale of its tensor)``, in place.

    Args:
        master: flat [n] with block scales or None. payload: flat E4M3 [n].
        weight_scales: FP32 [num_tensors], one a tensor. chunk_tensor: int32 [n / chunk], the tensor of each chunk.
    """
    scale = weight_scales[chunk_tensor.long()][:, None]
    value = load_state(master, master_scales).view(chunk_tensor.numel(), -1)
    payload.copy_(encode(value, scale, payload.dtype).view(-1))
