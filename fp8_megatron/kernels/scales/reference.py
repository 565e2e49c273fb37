"""The specification of amax histories, of what a step's casts record, and of underflow counts (values that a cast makes
zero), in plain PyTorch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...dtypes import FP8_DTYPES
from ..reference import round_up_to_power_of_two
from ..registration import operator
from ..shapes import fp32

#: From this many elements on, only every 16th block of 128 is counted, or every 16th row (`WeightGrad.sample`).
#: Counting all reads GPT-7B's gradients again.
SAMPLED_FROM = 2**20
SAMPLE_BLOCK, SAMPLE_EVERY = 128, 16


#: Places of a slot's record: the amax of what was cast in the step, how many elements were clamped, and how many were
#: cast (`quantize.reference.record_`). A record is FP32 [4], aligned; the fourth is not used.
AMAX, SATURATED, CAST = range(3)
RECORD_SIZE = 4
#: A report begins with the first non-finite slot, the largest saturated fraction of a slot, and that slot.
REPORT_HEAD = 3
#: Then come sums over the slots of each role: saturated and cast elements, and saturated tensors.
REPORT_SUMS = 3


def _check_records(
    record: Tensor,
    written: Tensor,
    scales: Tensor,
    clamped_above: Tensor,
    role: Tensor,
    order: Tensor,
    square_sum: Tensor,
    streak: Tensor,
) -> None:
    n = record.shape[0]
    assert record.shape == (n, RECORD_SIZE) and written.shape[::2] == scales.shape, (written.shape, scales.shape)
    assert clamped_above.shape == role.shape == order.shape == (n,), order.shape
    assert square_sum.shape == streak.shape == (1,), (square_sum.shape, streak.shape)


@operator(
    gpu=".triton",
    fake=lambda record, num_roles: (fp32(record, len(record)), fp32(record, REPORT_HEAD + REPORT_SUMS * num_roles)),
    mutates=["square_sum", "streak"],
    check=_check_records,
)
def examine_records_(
    record: Tensor,
    written: Tensor,
    scales: Tensor,
    clamped_above: Tensor,
    role: Tensor,
    order: Tensor,
    square_sum: Tensor,
    streak: Tensor,
    *,
    num_roles: int,
    most_saturated: float,
    recurs_within: int,
) -> tuple[Tensor, Tensor]:
    """Examine a step's records before its gradient norm is reduced.

    Args:
        record: FP32 [n, 4], see `AMAX` and the others.
        written: FP32 [n, places, stride]: other amaxes of the same slots in ``[..., 0]``.
        scales: FP32 [n, stride], this step's scales in column 0.
        clamped_above: FP32 [n], the payload magnitude above which a cast clamps instead of rounding.
        role: int32 [n], 0 … `num_roles` − 1. order: int32 [n], 1 … n: which of several slots is reported.
        square_sum: FP32 [1], to which a number that skips the step is added. NaN if an amax is not finite, or if a
            slot's saturated fraction is above `most_saturated` for the first time: then the step's amaxes are dropped.
            inf the second time within `recurs_within` steps: then the amaxes are kept, and the next scales fit. Nothing
            from the third time on: whatever the amaxes, the step counts.
        streak: FP32 [1], updated. Steps for which too large a fraction counts as another time, and as many more behind
            the first time; 0: none.

    Returns:
        FP32 [n], the amaxes of both kinds; inf where one is not finite. FP32 [3 + 3 · num_roles], the report: `order`
        of the first slot that is not finite (0: none), the largest saturated fraction, `order` of its slot (0: none);
        then for each role saturated and cast elements and the number of saturated tensors.
    """
    amax = torch.maximum(record[:, AMAX], written[:, :, 0].amax(dim=1))
    is_finite = torch.isfinite(amax)
    amax = torch.where(is_finite, amax, math.inf)
    beyond = len(order) + 1
    first = torch.where(is_finite, beyond, order).amin()
    fraction = record[:, SATURATED] / record[:, CAST].clamp_min(1.0)
    worst = fraction.amax()
    worst_order = torch.where((fraction == worst) & (worst > 0), order, beyond).amin()
    head = torch.stack(
        [torch.where(first == beyond, 0, first), worst, torch.where(worst_order == beyond, 0, worst_order)]
    )
    saturated = (amax * scales[:, 0].reciprocal()) > clamped_above
    columns = torch.stack([record[:, SATURATED], record[:, CAST], saturated.float()])
    sums = [torch.where(role == index, columns, 0.0).sum(dim=1) for index in range(num_roles)]
    if bool(first != beyond):
        square_sum += math.nan
    elif bool(worst > most_saturated):
        if bool(streak <= 0):
            square_sum += math.nan
        elif bool(streak > recurs_within):
            square_sum += math.inf
        streak.fill_(recurs_within if bool(streak > 0) else 2 * recurs_within)
    elif bool(streak > 0):
        streak -= 1
        if bool(streak == recurs_within):
            streak.zero_()
    return amax, torch.cat([head.float(), *sums])


def _check_history(
    amax: Tensor, record: Tensor, written: Tensor, history: Tensor, fp_max: Tensor, previous: Tensor
) -> None:
    n = history.shape[1]
    assert amax.shape == fp_max.shape == (n,) and record.shape == (n, RECORD_SIZE), (amax.shape, record.shape, n)
    assert written.shape[::2] == previous.shape, (written.shape, previous.shape)


@operator(
    gpu=".triton",
    fake=lambda previous: (torch.empty_like(previous), torch.empty_like(previous)),
    mutates=["record", "written", "history"],
    check=_check_history,
)
def update_amax_history_(
    amax: Tensor,
    record: Tensor,
    written: Tensor,
    history: Tensor,
    fp_max: Tensor,
    previous: Tensor,
    square_sum: Tensor,
    *,
    keeps_largest: bool,
    power_of_two: bool,
) -> tuple[Tensor, Tensor]:
    """Push a step's amaxes into the history, and return the next step's scales (delayed scaling).

    If an amax is 0 or not finite, its scale stays that of `previous`. A step whose sum of squares is NaN saw values
    that are not finite or far too large. The other amaxes follow from them, so history and scales stay as they are.

    Args:
        amax: FP32 [n], the step's amaxes.
        record: FP32 [n, 4] and written: FP32 [n, places, stride], both set to 0.
        history: FP32 [length, n], the latest first; the oldest row is dropped.
        fp_max: FP32 [n], the payload magnitude that an amax is mapped to.
        previous: FP32 [n, stride], the last scales in column 0.
        square_sum: FP32 [1], as `examine_records_` left it, summed over ranks.
        keeps_largest: scales come from the largest finite amax of the history; otherwise from the step's amax.
        power_of_two: scales are rounded up to powers of two.

    Returns:
        Scales and their reciprocals, FP32 [n, stride] with the values in column 0.
    """
    pushed = torch.cat([amax[None], history[:-1]])
    counted = torch.where(torch.isfinite(pushed), pushed, 0.0).amax(dim=0) if keeps_largest else amax
    scale = (counted / fp_max).clamp_min(torch.finfo(torch.float32).tiny)  # its reciprocal is finite
    if power_of_two:
        scale = round_up_to_power_of_two(scale)
    takes = ~square_sum.isnan()
    history.copy_(torch.where(takes, pushed, history))
    scale = torch.where(torch.isfinite(counted) & (counted > 0) & takes, scale, previous[:, 0])
    record.zero_()
    written.zero_()
    scales, inverses = torch.zeros_like(previous), torch.zeros_like(previous)
    scales[:, 0], inverses[:, 0] = scale, scale.reciprocal()
    return scales, inverses


def sampling(numel: int, is_sample: bool) -> tuple[int, int]:
    """How many blocks of `SAMPLE_BLOCK` elements of a flat tensor are counted, and the distance between them in blocks.

    If the whole tensor is counted, its last block may be partial. A sample has no partial block.
    """
    if is_sample or numel < SAMPLED_FROM:
        return -(-numel // SAMPLE_BLOCK), 1
    return -(-(numel // SAMPLE_BLOCK) // SAMPLE_EVERY), SAMPLE_EVERY


def _check_counts(value: Tensor, payload: Tensor, counts: Tensor) -> None:
    assert value.ndim == 1 and payload.shape == value.shape and payload.dtype in FP8_DTYPES, (value, payload)
    assert counts.dtype == torch.int64 and counts.shape == (2,), (counts.dtype, counts.shape)


@operator(gpu=".triton", mutates=["counts"], check=_check_counts)
def count_underflow_(value: Tensor, payload: Tensor, counts: Tensor, *, is_sample: bool = False) -> None:
    """Add to `counts` the number of non-zero elements of `value`, and how many of them are zero in `payload`. No host
    sync.

    From `SAMPLED_FROM` elements on, both count an even sample: blocks 0, 16, 32, … (see `sampling`).

    Args:
        value: flat [n], any float dtype; payload: FP8 [n].
        counts: int64 [2].
        is_sample: they are a sample already: all elements are counted.
    """
    codes = payload.view(torch.uint8)
    if not is_sample and value.numel() >= SAMPLED_FROM:
        whole = value.numel() // SAMPLE_BLOCK * SAMPLE_BLOCK
        value, codes = (x[:whole].view(-1, SAMPLE_BLOCK)[::SAMPLE_EVERY] for x in (value, codes))
    nonzero = value != 0
    is_zero = codes.bitwise_and(0x7F) == 0
    counts += torch.stack([nonzero.sum(), (nonzero & is_zero).sum()])
