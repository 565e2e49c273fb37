"""The specification of the fused Adam(W) step over flat storage, in plain PyTorch, and of FP8 weights derived from it.

The step over a split master is `split_master`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...formats import COMPANDED_DTYPES
from .. import companding
from ..quantize.blockwise import load_state, store_state_
from ..reference import encode
from ..registration import operator
from .operands import AdamHyper, AdamState, FlatState


@operator(gpu=".triton", mutates=["exp_avg", "exp_avg_sq", "master", "weight", "chunk_amax"])
def adamw_step_(
    state: AdamState,
    hyper: AdamHyper,
    grad_factor: Tensor,
    step: Tensor,
    weight: Tensor | None,
    chunk_amax: Tensor | None,
) -> None:
    """One Adam(W) step over flat storage, in place. It is computed in FP32; each operand has its own storage dtype.

    AdamW (Loshchilov & Hutter, arXiv 1711.05101, Algorithm 2; `AdamHyper.decoupled`), or Adam with the L2 term in the
    gradient, which enters both moments. The update uses the moments before they are rounded to storage. Moments in int8
    and uint8 are rounded stochastically, by a hash of (element of this flat storage, `step`).

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
        p = adam_update_(g, load_state(*master), state.exp_avg, state.exp_avg_sq, step, hyper)
        store_state_(p, *master)
        stored = load_state(*master)
        if weight is not None:
            weight.copy_(stored)
        if chunk_amax is not None:
            torch.amax(stored.abs().view(chunk_amax.numel(), -1), dim=1, out=chunk_amax)

    update_where_finite(grad_factor, [*state.exp_avg, *state.exp_avg_sq, *master, weight, chunk_amax], update)


def adam_update_(
    g: Tensor, p: Tensor, exp_avg: FlatState, exp_avg_sq: FlatState, step: Tensor, hyper: AdamHyper
) -> Tensor:
    """The new FP32 parameters [n] from the scaled gradient `g` and the old ones `p`; moments are updated in place."""
    lr, beta1, beta2, eps, weight_decay, decoupled = hyper
    if decoupled:
        p = p * (1.0 - lr * weight_decay)
    else:
        g = g + weight_decay * p
    m = beta1 * load_state(*exp_avg) + (1.0 - beta1) * g
    v = beta2 * load_state(*exp_avg_sq) + (1.0 - beta2) * g * g
    # In FP64, so that every device rounds the same numbers to FP32.
    bias_correction1 = -torch.expm1((step * _log(beta1)).double()).float()
    bias_correction2 = -torch.expm1((step * _log(beta2)).double()).float()
    _store_moment_(m, exp_avg, step, companding.EXP_AVG_STREAM)
    _store_moment_(v, exp_avg_sq, step, companding.EXP_AVG_SQ_STREAM)
    return p - (lr / bias_correction1) * m / (companding.square_root(v / bias_correction2) + eps)


def _store_moment_(value: Tensor, moment: FlatState, step: Tensor, stream: int) -> None:
    companded = moment.payload.dtype in COMPANDED_DTYPES
    noise = companding.rounding_noise(value.numel(), step, stream) if companded else None
    store_state_(value, *moment, noise)


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
