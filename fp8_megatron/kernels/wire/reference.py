"""The specification of the sums of rows received from other ranks, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...dtypes import FP8_DTYPES
from ..quantize.blockwise import dequantize_blockwise
from ..registration import operator


def sum_of_rows(rows: Tensor) -> Tensor:
    """The sum [...] of `rows` [d, ...] in FP32, in row order, rounded once to the rows' dtype."""
    total = rows[0].float()
    for row in rows[1:]:
        total = total + row.float()
    return total.to(rows.dtype)


def _check_accumulation(
    payload: Tensor,
    scales: Tensor | None,
    accumulator: Tensor,
    own_row: int,
    own_payload: Tensor | None,
    own_scales: Tensor | None,
    addend: Tensor | None,
) -> None:
    n = accumulator.numel()
    assert accumulator.dtype in (torch.float32, torch.bfloat16), accumulator.dtype
    assert (payload.dtype in FP8_DTYPES) == (scales is not None), payload.dtype
    assert payload.numel() % n == 0, (payload.shape, n)
    assert scales is None or n % (payload.numel() // scales.numel()) == 0, (payload.shape, scales.shape, n)
    if own_payload is not None:
        assert 0 <= own_row < payload.numel() // n and own_payload.shape == (n,), (own_row, own_payload.shape, n)
        assert own_payload.dtype == payload.dtype and (own_scales is None) == (scales is None), own_payload.dtype
    if addend is not None:
        assert addend.shape == (n,) and addend.dtype == accumulator.dtype and addend.is_contiguous(), addend.shape


@operator(gpu=".triton", mutates=["accumulator"], check=_check_accumulation)
def accumulate_rows_(
    payload: Tensor,
    scales: Tensor | None,
    accumulator: Tensor,
    *,
    factor: float,
    add: bool,
    own_row: int = -1,
    own_payload: Tensor | None = None,
    own_scales: Tensor | None = None,
    addend: Tensor | None = None,
) -> None:
    """``accumulator (+)= Σ_r payload_r · (scales_r · factor)`` in FP32, one row after another, in place.

    A BF16 accumulator is rounded once, at the end. With an addend, it is rounded before and after the addition.

    Args:
        payload: flat FP8 [d · n], the d rows one after another; or BF16 or FP32, without scales.
        scales: FP32 [d · n / block], the block scales of each row.
        accumulator: FP32 or BF16 [n], n a multiple of the block. Its old values are dropped unless `add`.
        factor: rounded to FP32; multiplies the scales, or the values if there are no scales.
        own_row: index of a row that lies elsewhere, in `own_payload` [n] and `own_scales` [n / block]; -1 if none does.
        addend: [n] in the accumulator's dtype, added to the rounded sum, like an addition after a reduction.
    """
    num_rows = payload.numel() // accumulator.numel()
    every_scale = [None] * num_rows if scales is None else list(scales.view(num_rows, -1))
    rows = list(zip(payload.view(num_rows, -1), every_scale, strict=True))
    if own_payload is not None:
        rows[own_row] = (own_payload, own_scales)
    total = accumulator.float() if add else None
    for values, row_scales in rows:
        value = values.float() * factor if row_scales is None else dequantize_blockwise(values, row_scales * factor)
        total = value if total is None else total + value
    assert total is not None
    accumulator.copy_(total)
    if addend is not None:
        accumulator += addend
