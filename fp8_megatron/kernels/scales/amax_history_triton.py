"""The end of a step under delayed scaling in one launch: `reference.update_amax_history_` in Triton, bit for bit."""

# The parameters of a Triton kernel have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..quantize.triton import magnitude_bits, reciprocal
from ..sizes import cdiv, next_power_of_2

_SMALLEST_NORMAL = tl.constexpr(1.1754943508222875e-38)
_INF_BITS = tl.constexpr(0x7F800000)
#: Amaxes of the history that a program holds.
_ELEMENTS = 4096
_MOST_SLOTS = 64
_NUM_WARPS = 4


@triton.jit
def _update_amax_history(
    amax, written, history, fp_max, previous, scales, inverses, n,
    LENGTH: tl.constexpr, PLACES: tl.constexpr, STRIDE: tl.constexpr, KEEPS_LARGEST: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    slots = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    inside = slots < n
    newest = magnitude_bits(tl.load(amax + slots, mask=inside, other=0.0))
    for place in tl.static_range(PLACES):
        value = tl.load(written + (slots * PLACES + place) * STRIDE, mask=inside, other=0.0)
        newest = tl.maximum(newest, magnitude_bits(value))
    rows = tl.arange(0, ROWS)[:, None]
    offsets = rows * n + slots[None, :]
    kept = (rows < LENGTH - 1) & inside[None, :]
    older = magnitude_bits(tl.load(history + offsets, mask=kept, other=0.0))
    tl.debug_barrier()  # every thread has read the values that others overwrite next
    tl.store(history + n + offsets, older.to(tl.float32, bitcast=True), mask=kept)
    tl.store(history + slots, newest.to(tl.float32, bitcast=True), mask=inside)
    counted = newest
    if KEEPS_LARGEST:
        finite = tl.max(tl.where(older < _INF_BITS, older, 0), axis=0)
        counted = tl.maximum(tl.where(newest < _INF_BITS, newest, 0), finite)
    scale = tl.div_rn(counted.to(tl.float32, bitcast=True), tl.load(fp_max + slots, mask=inside, other=1.0))
    if POWER_OF_TWO:
        bits = tl.maximum(scale, _SMALLEST_NORMAL).to(tl.int32, bitcast=True)
        scale = ((bits + 0x007FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    is_usable = (counted > 0) & (counted < _INF_BITS)
    scale = tl.where(is_usable, scale, tl.load(previous + slots * STRIDE, mask=inside, other=1.0))
    tl.store(scales + slots * STRIDE, scale, mask=inside)
    tl.store(inverses + slots * STRIDE, reciprocal(scale), mask=inside)
    nothing = tl.zeros([SLOTS], tl.float32)
    for pad in tl.static_range(1, STRIDE):
        tl.store(scales + slots * STRIDE + pad, nothing, mask=inside)
        tl.store(inverses + slots * STRIDE + pad, nothing, mask=inside)
    tl.store(amax + slots, nothing, mask=inside)
    for place in tl.static_range(PLACES):
        for pad in tl.static_range(STRIDE):
            tl.store(written + (slots * PLACES + place) * STRIDE + pad, nothing, mask=inside)


def update_amax_history_(
    amax: Tensor,
    written: Tensor,
    history: Tensor,
    fp_max: Tensor,
    previous: Tensor,
    keeps_largest: bool,
    power_of_two: bool,
) -> tuple[Tensor, Tensor]:
    """`reference.update_amax_history_`, one launch."""
    length, n = history.shape
    _, places, stride = written.shape
    assert all(tensor.is_contiguous() for tensor in (amax, written, history, fp_max, previous))
    scales, inverses = torch.empty_like(previous), torch.empty_like(previous)
    rows = next_power_of_2(max(length - 1, 1))
    slots = max(1, min(_MOST_SLOTS, _ELEMENTS // rows))
    _update_amax_history[(cdiv(n, slots),)](
        amax, written, history, fp_max, previous, scales, inverses, n,
        length, places, stride, keeps_largest, power_of_two, rows, slots, num_warps=_NUM_WARPS,
    )  # fmt: skip
    return scales, inverses
