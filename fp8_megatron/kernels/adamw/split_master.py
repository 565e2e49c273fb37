"""The split master, in plain PyTorch: a master weight that is the FP8 weight and one byte of correction.

The master is a float of 16 bits, E4M11: E4M3 with eight more bits of mantissa. Numbers of a float format are counted by
their bits, so the master's magnitude as an integer, 256 · k + c with c in [-128, 127], splits into the bits k of the
nearest E4M3 number, which is the weight that the model computes with, and a correction c of one byte. (FlashOptim,
arXiv 2602.23349, section 3.1, splits masters so under BF16 weights.) One bit finer than FP16, two bytes in all.

The weight has one scale per tensor, which must be known before a step writes and cannot be taken from what it writes
without a second pass. So it is foretold: Adam's update is bounded, and `next_weight_scales` adds the bound to the amax
of the step before. Scales are powers of two, so that a new scale moves no value (but below E4M3's normal range).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...formats import E4M3, MAX_FINITE
from .. import companding
from ..quantize.blockwise import load_state
from ..reference import scale_from_amax
from ..registration import operator
from .operands import AdamHyper, SplitAdamState
from .reference import adam_update_, update_where_finite

_MANTISSA_BITS, _BIAS = 11, 7
#: How far past the bound of Adam's update with exact moments the foretold scale reaches: moments in 8 bits are rounded.
_UPDATE_MARGIN = 4.0


def split_master(value: Tensor, scale: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """FP32 `value` → E4M3 payload and int8 correction.

    `value` / `scale` is rounded to E4M11, by at most 2⁻¹² of its power of two (2⁻¹⁸ below 2⁻⁶), or twice that with
    noise. The payload is the E4M3 number nearest to the result; of two as near, the larger magnitude.

    Args:
        scale: FP32, broadcasts; magnitudes beyond 448 · scale saturate. A `value` that is not finite gives NaN.
        noise: FP32 in [0, 1), the shape of `value`, for stochastic rounding to E4M11; None rounds to nearest even.
    """
    magnitude = (value.float() * scale.reciprocal()).abs()
    is_nan = ~torch.isfinite(value) | magnitude.isnan()
    magnitude = magnitude.nan_to_num(nan=0.0).clamp_(max=MAX_FINITE[E4M3])
    # The exponent field of E4M11, at least 1: below it numbers keep the distance they have there.
    exponent = ((magnitude.view(torch.int32) >> 23) - (127 - _BIAS)).clamp_(min=1)
    count = magnitude * _power_of_two(_BIAS + _MANTISSA_BITS - exponent)
    count = count.round() if noise is None else count.floor() + (noise < count.frac())
    bits = count.int() + ((exponent - 1) << _MANTISSA_BITS)
    code = (bits + 128) >> 8
    correction = (bits - (code << 8)).to(torch.int8)
    code = torch.where(is_nan, 0x7F, code | (torch.signbit(value).int() << 7))
    return code.to(torch.uint8).view(E4M3), correction


def join_master(payload: Tensor, correction: Tensor, scale: Tensor) -> Tensor:
    """FP32 master weights of what `split_master` gave; exact where `scale` is a power of two."""
    code = payload.view(torch.uint8).int()
    bits = ((code & 0x7F) << 8) + correction.int()
    exponent = bits >> _MANTISSA_BITS
    mantissa = (bits & ((1 << _MANTISSA_BITS) - 1)) + ((exponent > 0).int() << _MANTISSA_BITS)
    magnitude = mantissa.float() * _power_of_two(exponent.clamp(min=1) - (_BIAS + _MANTISSA_BITS))
    value = torch.where(code >= 0x80, -magnitude, magnitude) * scale
    return torch.where((code & 0x7F) == 0x7F, torch.nan, value)


def _power_of_two(exponent: Tensor) -> Tensor:
    """FP32 2ᵉ of int32 exponents in [-126, 127]."""
    return ((exponent + 127) << 23).view(torch.float32)


def next_weight_scales(
    amax: Tensor, *, lr: float, beta1: float, beta2: float, previous: Tensor | None = None
) -> Tensor:
    """Power-of-two scales that the next `adamw_split_step_` can write with, whatever its gradient.

    With β₁² < β₂ the update of Adam is at most ``lr · (1-β₁) / √((1-β₂)(1-β₁²/β₂))`` (Cauchy-Schwarz on the two sums
    over past gradients), 1.17 lr at (0.9, 0.95), 7.3 lr at (0.9, 0.999); weight decay only shrinks. Four times that is
    added to the amax. Too large a scale costs nothing but range at the bottom: the numbers float.

    Args:
        amax: FP32 [num_tensors], largest magnitudes of the master now.
        lr: of the coming step. With L2 decay in the gradient (Adam) the bound holds as well.
        previous: FP32 [num_tensors], kept where `amax` is not finite; None gives NaN there.
    """
    if beta1 > 0.0 and beta1 * beta1 >= beta2:
        raise ValueError(
            f"adam_beta1({beta1})² ≥ adam_beta2({beta2}): Adam's update has no bound that a split master's scale could "
            f"be foretold from; choose a larger adam_beta2, or another main_params_dtype"
        )
    ratio = beta1 * beta1 / beta2 if beta1 > 0.0 else 0.0
    bound = max(1.0, (1.0 - beta1) / math.sqrt((1.0 - beta2) * (1.0 - ratio)))
    scale = scale_from_amax(amax + _UPDATE_MARGIN * lr * bound, E4M3, power_of_two=True)
    return scale if previous is None else torch.where(torch.isfinite(scale), scale, previous)


@operator(
    gpu=".split_triton",
    mutates=["exp_avg", "exp_avg_sq", "weight", "correction", "weight_scales", "chunk_amax"],
)
def adamw_split_step_(
    state: SplitAdamState, hyper: AdamHyper, grad_factor: Tensor, step: Tensor, chunk_amax: Tensor
) -> None:
    """`reference.adamw_step_` with a split master: the weights are read, moved and written in one pass, in place.

    The master is rounded stochastically: an update below half its last bit is not lost, but made now and then. An
    update beyond the bound that the new scales were foretold from is cut off at 448 · scale.

    Args:
        grad_factor, step: as in `reference.adamw_step_`. Where the factor is not finite nothing is written, the scales
            neither.
        chunk_amax: FP32 [n / chunk] receives the largest magnitude of each chunk of the new master.
    """
    weight, correction = state.weight, state.correction

    def update() -> None:
        index = state.chunk_tensor.long()
        shape = (index.numel(), -1)
        old_scale, new_scale = state.weight_scales[index][:, None], state.new_weight_scales[index][:, None]
        p = join_master(weight.view(shape), correction.view(shape), old_scale).view(-1)
        g = load_state(*state.grad) * grad_factor
        p = adam_update_(g, p, state.exp_avg, state.exp_avg_sq, step, hyper)
        noise = companding.rounding_noise(p.numel(), step, companding.MASTER_STREAM)
        payload, rest = split_master(p.view(shape), new_scale, noise.view(shape))
        weight.copy_(payload.view(-1))
        correction.copy_(rest.view(-1))
        torch.amax(join_master(payload, rest, new_scale).abs(), dim=1, out=chunk_amax)
        state.weight_scales.copy_(state.new_weight_scales)

    written = [*state.exp_avg, *state.exp_avg_sq, weight, correction, state.weight_scales, chunk_amax]
    update_where_finite(grad_factor, written, update)
