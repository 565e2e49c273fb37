"""The operators of `reference` in Triton, one launch each, bit for bit: the end of a step under delayed scaling, and
counts of values that a cast made zero."""

# The parameters of a Triton kernel have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..quantize.triton import magnitude_bits, reciprocal
from ..shapes import cdiv, next_power_of_2
from .reference import RECORD_SIZE, REPORT_HEAD, REPORT_SUMS, SAMPLE_BLOCK, sampling

_SMALLEST_NORMAL = tl.constexpr(1.1754943508222875e-38)
_INF_BITS = tl.constexpr(0x7F800000)
#: Amaxes of the history that a program holds.
_ELEMENTS = 4096
_MOST_SLOTS = 64
_NUM_WARPS = 4
#: Slots that the one program of `examine_records_` takes at a time.
_EXAMINED = 1024


@triton.jit
def _fraction(record, slots, inside, SIZE: tl.constexpr):
    """Saturated fraction of each slot."""
    saturated = tl.load(record + slots * SIZE + 1, mask=inside, other=0.0)
    cast = tl.load(record + slots * SIZE + 2, mask=inside, other=1.0)
    return tl.div_rn(saturated, tl.maximum(cast, 1.0))


@triton.jit
def _examine_records(
    record, written, scales, clamped_above, role, order, square_sum, streak, amax, report, n, most_saturated,
    WITHIN: tl.constexpr, NUM_ROLES: tl.constexpr, PLACES: tl.constexpr, STRIDE: tl.constexpr, SIZE: tl.constexpr,
    HEAD: tl.constexpr, SUMS: tl.constexpr, SLOTS: tl.constexpr, ROLES: tl.constexpr,
):  # fmt: skip
    """One program, because a rank has a few thousand slots at most."""
    beyond = n + 1
    first = beyond
    worst = 0.0
    roles = tl.arange(0, ROLES)
    saturated_sum = tl.zeros([ROLES], tl.float32)
    cast_sum = tl.zeros([ROLES], tl.float32)
    tensors_sum = tl.zeros([ROLES], tl.float32)
    for start in range(0, n, SLOTS):
        slots = start + tl.arange(0, SLOTS)
        inside = slots < n
        bits = magnitude_bits(tl.load(record + slots * SIZE, mask=inside, other=0.0))
        for place in tl.static_range(PLACES):
            value = tl.load(written + (slots * PLACES + place) * STRIDE, mask=inside, other=0.0)
            bits = tl.maximum(bits, magnitude_bits(value))
        bits = tl.minimum(bits, _INF_BITS)
        tl.store(amax + slots, bits.to(tl.float32, bitcast=True), mask=inside)
        place = tl.load(order + slots, mask=inside, other=0)
        first = tl.minimum(first, tl.min(tl.where((bits == _INF_BITS) & inside, place, beyond)))
        worst = tl.maximum(worst, tl.max(_fraction(record, slots, inside, SIZE)))
        inverse = reciprocal(tl.load(scales + slots * STRIDE, mask=inside, other=1.0))
        limit = tl.load(clamped_above + slots, mask=inside, other=float("inf"))
        tensors = ((bits.to(tl.float32, bitcast=True) * inverse > limit) & inside).to(tl.float32)
        saturated = tl.load(record + slots * SIZE + 1, mask=inside, other=0.0)
        cast = tl.load(record + slots * SIZE + 2, mask=inside, other=0.0)
        has_role = (tl.load(role + slots, mask=inside, other=-1)[None, :] == roles[:, None]).to(tl.float32)
        saturated_sum += tl.sum(has_role * saturated[None, :], axis=1)
        cast_sum += tl.sum(has_role * cast[None, :], axis=1)
        tensors_sum += tl.sum(has_role * tensors[None, :], axis=1)
    worst_order = beyond
    if worst > 0.0:
        for start in range(0, n, SLOTS):
            slots = start + tl.arange(0, SLOTS)
            inside = slots < n
            place = tl.load(order + slots, mask=inside, other=0)
            is_worst = (_fraction(record, slots, inside, SIZE) == worst) & inside
            worst_order = tl.minimum(worst_order, tl.min(tl.where(is_worst, place, beyond)))
    tl.store(report, tl.where(first == beyond, 0, first).to(tl.float32))
    tl.store(report + 1, worst)
    tl.store(report + 2, tl.where(worst_order == beyond, 0, worst_order).to(tl.float32))
    sums = report + HEAD + roles * SUMS
    tl.store(sums, saturated_sum, mask=roles < NUM_ROLES)
    tl.store(sums + 1, cast_sum, mask=roles < NUM_ROLES)
    tl.store(sums + 2, tensors_sum, mask=roles < NUM_ROLES)
    if first < beyond:
        tl.store(square_sum, float("nan"))
    else:
        before = tl.load(streak)
        if worst > most_saturated:
            skip = tl.where(before > 0.0, tl.where(before > WITHIN, float("inf"), 0.0), float("nan"))
            tl.store(square_sum, tl.load(square_sum) + skip)
            tl.store(streak, tl.where(before > 0.0, WITHIN, 2.0 * WITHIN))
        else:
            after = tl.maximum(before - 1.0, 0.0)
            tl.store(streak, tl.where(after == WITHIN, 0.0, after))


def examine_records_(
    record: Tensor,
    written: Tensor,
    scales: Tensor,
    clamped_above: Tensor,
    role: Tensor,
    order: Tensor,
    square_sum: Tensor,
    streak: Tensor,
    num_roles: int,
    most_saturated: float,
    recurs_within: int,
) -> tuple[Tensor, Tensor]:
    """`reference.examine_records_`, one launch."""
    n, places, stride = written.shape
    assert all(x.is_contiguous() for x in (record, written, scales, clamped_above, role, order))
    amax = torch.empty(n, dtype=torch.float32, device=record.device)
    report = torch.empty(REPORT_HEAD + REPORT_SUMS * num_roles, dtype=torch.float32, device=record.device)
    _examine_records[(1,)](
        record, written, scales, clamped_above, role, order, square_sum, streak, amax, report, n, most_saturated,
        recurs_within, num_roles, places, stride, RECORD_SIZE, REPORT_HEAD, REPORT_SUMS,
        min(_EXAMINED, next_power_of_2(n)), next_power_of_2(num_roles), num_warps=_NUM_WARPS,
        enable_fp_fusion=True,
    )  # fmt: skip
    return amax, report


@triton.jit
def _update_amax_history(
    amax, record, written, history, fp_max, previous, square_sum, scales, inverses, n,
    LENGTH: tl.constexpr, PLACES: tl.constexpr, STRIDE: tl.constexpr, SIZE: tl.constexpr,
    KEEPS_LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """`reference.update_amax_history_` of `SLOTS` of the n slots; scales and inverses FP32 [n, STRIDE].

    LENGTH is the history's, rounded up to the power of two ROWS. record [n, SIZE] and written [n, PLACES, STRIDE].
    """
    slots = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    inside = slots < n
    newest = magnitude_bits(tl.load(amax + slots, mask=inside, other=0.0))
    rows = tl.arange(0, ROWS)[:, None]
    offsets = rows * n + slots[None, :]
    here = (rows < LENGTH) & inside[None, :]
    kept = (rows < LENGTH - 1) & inside[None, :]
    held = magnitude_bits(tl.load(history + offsets, mask=here, other=0.0))
    takes = inside & (magnitude_bits(tl.load(square_sum)) <= _INF_BITS)
    tl.debug_barrier()  # every thread has read the values that others overwrite next
    tl.store(history + n + offsets, held.to(tl.float32, bitcast=True), mask=kept & takes[None, :])
    tl.store(history + slots, newest.to(tl.float32, bitcast=True), mask=takes)
    counted = newest
    if KEEPS_LARGEST:
        finite = tl.max(tl.where(kept & (held < _INF_BITS), held, 0), axis=0)
        counted = tl.maximum(tl.where(newest < _INF_BITS, newest, 0), finite)
    scale = tl.div_rn(counted.to(tl.float32, bitcast=True), tl.load(fp_max + slots, mask=inside, other=1.0))
    scale = tl.maximum(scale, _SMALLEST_NORMAL)
    if POWER_OF_TWO:
        bits = scale.to(tl.int32, bitcast=True)
        scale = ((bits + 0x007FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    is_usable = (counted > 0) & (counted < _INF_BITS) & takes
    scale = tl.where(is_usable, scale, tl.load(previous + slots * STRIDE, mask=inside, other=1.0))
    tl.store(scales + slots * STRIDE, scale, mask=inside)
    tl.store(inverses + slots * STRIDE, reciprocal(scale), mask=inside)
    nothing = tl.zeros([SLOTS], tl.float32)
    for pad in tl.static_range(1, STRIDE):
        tl.store(scales + slots * STRIDE + pad, nothing, mask=inside)
        tl.store(inverses + slots * STRIDE + pad, nothing, mask=inside)
    for place in tl.static_range(SIZE):
        tl.store(record + slots * SIZE + place, nothing, mask=inside)
    for place in tl.static_range(PLACES):
        for pad in tl.static_range(STRIDE):
            tl.store(written + (slots * PLACES + place) * STRIDE + pad, nothing, mask=inside)


def update_amax_history_(
    amax: Tensor,
    record: Tensor,
    written: Tensor,
    history: Tensor,
    fp_max: Tensor,
    previous: Tensor,
    square_sum: Tensor,
    keeps_largest: bool,
    power_of_two: bool,
) -> tuple[Tensor, Tensor]:
    """`reference.update_amax_history_`, one launch."""
    length, n = history.shape
    _, places, stride = written.shape
    assert all(tensor.is_contiguous() for tensor in (amax, record, written, history, fp_max, previous))
    scales, inverses = torch.empty_like(previous), torch.empty_like(previous)
    rows = next_power_of_2(length)
    slots = max(1, min(_MOST_SLOTS, _ELEMENTS // rows))
    _update_amax_history[(cdiv(n, slots),)](
        amax, record, written, history, fp_max, previous, square_sum, scales, inverses,
        n, length, places, stride, RECORD_SIZE, keeps_largest, power_of_two, rows, slots,
        num_warps=_NUM_WARPS,
        enable_fp_fusion=True,
    )  # fmt: skip
    return scales, inverses


_BLOCKS = 64
_COUNT_WARPS = 8


@triton.jit
def _count_underflow(
    value, payload, counts, n, num_blocks, DISTANCE: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr
):
    index = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    offsets = index.to(tl.int64) * (DISTANCE * BLOCK) + tl.arange(0, BLOCK)[None, :]
    mask = (index < num_blocks) & (offsets < n)
    nonzero = tl.load(value + offsets, mask=mask, other=0.0) != 0
    is_zero = (tl.load(payload + offsets, mask=mask, other=0) & 0x7F) == 0
    tl.atomic_add(counts, tl.sum(tl.sum(nonzero.to(tl.int32), 1), 0).to(tl.int64))
    tl.atomic_add(counts + 1, tl.sum(tl.sum((nonzero & is_zero).to(tl.int32), 1), 0).to(tl.int64))


def count_underflow_(value: Tensor, payload: Tensor, counts: Tensor, is_sample: bool) -> None:
    """`reference.count_underflow_`."""
    assert value.is_contiguous() and payload.is_contiguous()
    num_blocks, distance = sampling(value.numel(), is_sample)
    _count_underflow[(cdiv(num_blocks, _BLOCKS),)](
        value,
        payload.view(torch.uint8),
        counts,
        value.numel(),
        num_blocks,
        distance,
        _BLOCKS,
        SAMPLE_BLOCK,
        num_warps=_COUNT_WARPS,
        enable_fp_fusion=True,
    )
