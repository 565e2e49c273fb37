"""The split master, in plain PyTorch: a master weight stored as the FP8 weight and one byte of correction.

The master is a 16-bit float, E4M11: E4M3 with eight more bits of mantissa. The bits of a float format count its
numbers. The master's magnitude as an integer is therefore 256 · k + c with c in [-128, 127]. k are the bits of the
nearest E4M3 number, which is the weight that the model computes with; c is a correction of one byte. (FlashOptim,
arXiv 2602.23349, section 3.1, splits masters in this way under BF16 weights.) The master takes two bytes in all and is
one bit finer than FP16.

The weight has one scale per tensor. The scale must be known before a step writes, and taking it from the written values
would need a second pass. It is therefore predicted: Adam's update is bounded, and `next_weight_scales` adds the bound
to the amax of the previous step. Scales are powers of two, so a new scale changes no value, except below E4M3's normal
range.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ...dtypes import E4M3, MAX_FINITE
from ..quantize.blockwise import load_state
from ..reference import scale_from_amax
from ..registration import operator
from ..rounding import E4M11, Places, master_noise, round_sum_to_grid, rounding_bits
from .reference import AdamHyper, SplitAdamState, adam_change_, check_moments, shrunk_too, update_where_finite

_MANTISSA_BITS, _BIAS = 11, 7
#: Factor on the bound of Adam's update for exact moments, because moments in 8 bits are rounded.
_UPDATE_MARGIN = 4.0


def split_master(value: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """FP32 `value` → E4M3 payload and int8 correction.

    `value` / `scale` is rounded to the nearest E4M11 number, even on a tie: by at most 2⁻¹² of its power of two, 2⁻¹⁸
    below 2⁻⁶. The payload is the E4M3 number nearest to the result; a tie goes to the larger magnitude.

    Args:
        scale: FP32, broadcasts; magnitudes beyond 448 · scale saturate. A `value` that is not finite gives NaN.
    """
    magnitude = (value.float() * scale.reciprocal()).abs()
    is_nan = ~torch.isfinite(value) | magnitude.isnan()
    magnitude = magnitude.nan_to_num(nan=0.0).clamp_(max=MAX_FINITE[E4M3])
    # The exponent field of E4M11, at least 1: below it, numbers have the same spacing as at 1.
    exponent = ((magnitude.view(torch.int32) >> 23) - (127 - _BIAS)).clamp_(min=1)
    count = (magnitude * _power_of_two(_BIAS + _MANTISSA_BITS - exponent)).round()
    bits = count.int() + ((exponent - 1) << _MANTISSA_BITS)
    code = (bits + 128) >> 8
    correction = (bits - (code << 8)).to(torch.int8)
    code = torch.where(is_nan, 0x7F, code | (torch.signbit(value).int() << 7))
    return code.to(torch.uint8).view(E4M3), correction


def join_master(payload: Tensor, correction: Tensor, scale: Tensor) -> Tensor:
    """FP32 master weights from the result of `split_master`; exact if `scale` is a power of two."""
    if not payload.is_cpu:
        return _join(payload, correction) * scale
    # A CPU finds a master in a seventh of the time that it computes one.
    place = payload.view(torch.uint8).int().mul_(256).add_(correction.view(torch.uint8))
    return _all_masters().index_select(0, place.reshape(-1)).view(place.shape) * scale


@cache
def _all_masters() -> Tensor:
    """FP32 [65,536]: the masters of all pairs, by 256 · code of the payload + correction as uint8."""
    codes, corrections = torch.arange(256, dtype=torch.uint8)[:, None], torch.arange(256, dtype=torch.uint8)
    return _join(codes.view(E4M3), corrections.view(torch.int8)).flatten()


def _join(payload: Tensor, correction: Tensor) -> Tensor:
    """Masters of scale 1."""
    code = payload.view(torch.uint8).int()
    bits = ((code & 0x7F) << 8) + correction.int()
    exponent = bits >> _MANTISSA_BITS
    mantissa = (bits & ((1 << _MANTISSA_BITS) - 1)) + ((exponent > 0).int() << _MANTISSA_BITS)
    magnitude = mantissa.float() * _power_of_two(exponent.clamp(min=1) - (_BIAS + _MANTISSA_BITS))
    value = torch.where(code >= 0x80, -magnitude, magnitude)
    return torch.where((code & 0x7F) == 0x7F, torch.nan, value)


def _power_of_two(exponent: Tensor) -> Tensor:
    """FP32 2ᵉ of int32 exponents in [-126, 127]."""
    return ((exponent + 127) << 23).view(torch.float32)


def next_weight_scales(
    amax: Tensor, *, lr: float, beta1: float, beta2: float, previous: Tensor | None = None
) -> Tensor:
    """Power-of-two scales that the next `adamw_split_step_` can write with, whatever its gradient.

    With β₁² < β₂ the update of Adam has a bound (`AdamHyper.update_bound`); weight decay only shrinks. Four times the
    bound is added to the amax. A scale that is too large only costs range at the bottom, because the numbers are
    floats.

    Args:
        amax: FP32 [num_tensors], largest magnitudes of the current master.
        lr: the next step's. With L2 decay in the gradient (Adam) the bound also holds.
        previous: FP32 [num_tensors], kept if `amax` is not finite; None gives NaN there.
    """
    if beta1 > 0.0 and beta1 * beta1 >= beta2:
        raise ValueError(
            f"adam_beta1({beta1})² ≥ adam_beta2({beta2}): Adam's update has no bound that a split master's scale could "
            f"be foretold from; choose a larger adam_beta2, or another main_params_dtype"
        )
    bound = AdamHyper(lr, beta1, beta2, eps=0.0, weight_decay=0.0, decoupled=True).update_bound
    scale = scale_from_amax(amax + _UPDATE_MARGIN * lr * bound, E4M3, power_of_two=True)
    return scale if previous is None else torch.where(torch.isfinite(scale), scale, previous)


def _check_split_state(state: SplitAdamState) -> None:
    check_moments(state.exp_avg, state.exp_avg_sq)
    assert state.weight.dtype == E4M3 and state.correction.dtype == torch.int8, (state.weight, state.correction)
    assert state.weight_scales.is_contiguous() and state.new_weight_scales.is_contiguous(), state.weight_scales.stride()


@operator(
    gpu=".split_triton",
    mutates=["exp_avg", "exp_avg_sq", "weight", "correction", "weight_scales", "chunk_amax"],
    check=_check_split_state,
)
def adamw_split_step_(
    state: SplitAdamState, hyper: AdamHyper, *, grad_factor: Tensor, step: Tensor, chunk_amax: Tensor
) -> None:
    """`reference.adamw_step_` with a split master: the weights are read, moved and written in one pass, in place.

    The master is rounded stochastically, so an update below half its last bit is not lost but applied with some
    probability. An update beyond the bound that the new scales were predicted from saturates at 448 · scale.

    Args:
        grad_factor, step: as in `reference.adamw_step_`. If the factor is not finite, nothing is written, including the
            scales.
        chunk_amax: FP32 [n / chunk] receives the largest magnitude of each chunk of the new master.
    """
    master = SplitMaster(
        state.weight, state.correction, state.weight_scales, state.new_weight_scales, state.chunk_tensor, state.places
    )

    def update() -> None:
        g = load_state(*state.grad) * grad_factor
        bits = rounding_bits(g.numel(), step, state.places)

        def change(p: Tensor) -> Tensor:
            return shrunk_too(adam_change_(g, p, state.exp_avg, state.exp_avg_sq, step, hyper, bits), p, hyper)

        move_split_master_(master, change, bits, chunk_amax)
        state.weight_scales.copy_(state.new_weight_scales)

    written = [*state.exp_avg, *state.exp_avg_sq, *master[:2], state.weight_scales, chunk_amax]
    update_where_finite(grad_factor, written, update)


class SplitMaster(NamedTuple):
    """Flat split masters [n] that a step moves.

    Attributes:
        weight, correction: E4M3 and int8.
        scales, new_scales: FP32 [matrices], with which they are stored and are to be.
        chunk_matrix: int32 [n / chunk], the matrix of each chunk.
        places: as in `reference.AdamState`.
    """

    weight: Tensor
    correction: Tensor
    scales: Tensor
    new_scales: Tensor
    chunk_matrix: Tensor
    places: Places


def move_split_master_(
    master: SplitMaster, change: Callable[[Tensor], Tensor], bits: Tensor, chunk_amax: Tensor
) -> None:
    """Add `change` of the masters to them, rounded stochastically with the `bits` of `rounding_bits`."""
    index = master.chunk_matrix.long()
    shape = (index.numel(), -1)
    old_scale, new_scale = master.scales[index][:, None], master.new_scales[index][:, None]
    p = join_master(master.weight.view(shape), master.correction.view(shape), old_scale).view(-1)
    added, noise = change(p).view(shape), master_noise(bits).view(shape)
    payload, rest = split_master(round_sum_to_grid(p.view(shape), added, noise, E4M11, new_scale), new_scale)
    master.weight.copy_(payload.view(-1))
    master.correction.copy_(rest.view(-1))
    torch.amax(join_master(payload, rest, new_scale).abs(), dim=1, out=chunk_amax)
