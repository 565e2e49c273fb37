"""Sums of what blocks of attention give, in Triton. Each operand is read once, the sum is written once.

A kernel takes up to four summands. More of them are added four at a time, with an FP32 sum between.
"""

# The parameters of a Triton kernel have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..shapes import cdiv

_MOST = 4
_ROWS = 16
_TILE = 2048


@triton.jit
def _weighted(out, log_sum_exp, row, column, head, start, num_rows, heads, mask, total, D: tl.constexpr):
    """exp(Lᵢ - L) · Oᵢ of a tile of rows; 0 above the block's first row."""
    own = row - start
    here = (own >= 0) & (row < num_rows)
    weight = tl.exp(tl.load(log_sum_exp + head * (num_rows - start) + own, mask=here, other=float("-inf")) - total)
    place = (own.to(tl.int64)[:, None] * heads + head) * D + column[None, :]
    value = tl.load(out + place, mask=here[:, None] & mask, other=0.0).to(tl.float32)
    return weight[:, None] * value


@triton.jit
def _log_sum_exp(log_sum_exp, row, head, start, num_rows):
    own = row - start
    return tl.load(
        log_sum_exp + head * (num_rows - start) + own, mask=(own >= 0) & (row < num_rows), other=float("-inf")
    )


@triton.jit
def _merge(
    out_0,
    out_1,
    out_2,
    out_3,
    log_0,
    log_1,
    log_2,
    log_3,
    start_1,
    start_2,
    start_3,
    out,
    log_sum_exp,
    num_rows,
    heads,
    COUNT: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """ROWS rows of one head of `COUNT` blocks → out [num_rows, heads, D] and log_sum_exp FP32 [heads, num_rows].

    Block i has the rows from start_i on: out_i [num_rows - start_i, heads, D] and log_i [heads, num_rows - start_i].
    The first has all rows. `heads` counts those of all sequences.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    column = tl.arange(0, WIDTH)
    mask = (column < D)[None, :]
    own_0 = tl.load(log_0 + head * num_rows + row, mask=row < num_rows, other=0.0)
    largest = own_0
    if COUNT > 1:
        own_1 = _log_sum_exp(log_1, row, head, start_1, num_rows)
        largest = tl.maximum(largest, own_1)
    if COUNT > 2:
        own_2 = _log_sum_exp(log_2, row, head, start_2, num_rows)
        largest = tl.maximum(largest, own_2)
    if COUNT > 3:
        own_3 = _log_sum_exp(log_3, row, head, start_3, num_rows)
        largest = tl.maximum(largest, own_3)
    sums = tl.exp(own_0 - largest)
    if COUNT > 1:
        sums += tl.exp(own_1 - largest)
    if COUNT > 2:
        sums += tl.exp(own_2 - largest)
    if COUNT > 3:
        sums += tl.exp(own_3 - largest)
    total = largest + tl.log(sums)
    merged = _weighted(out_0, log_0, row, column, head, 0, num_rows, heads, mask, total, D)
    if COUNT > 1:
        merged += _weighted(out_1, log_1, row, column, head, start_1, num_rows, heads, mask, total, D)
    if COUNT > 2:
        merged += _weighted(out_2, log_2, row, column, head, start_2, num_rows, heads, mask, total, D)
    if COUNT > 3:
        merged += _weighted(out_3, log_3, row, column, head, start_3, num_rows, heads, mask, total, D)
    place = (row.to(tl.int64)[:, None] * heads + head) * D + column[None, :]
    tl.store(out + place, merged.to(out.dtype.element_ty), mask=(row < num_rows)[:, None] & mask)
    tl.store(log_sum_exp + head * num_rows + row, total, mask=row < num_rows)


def merge_attention(outs: list[Tensor], log_sum_exps: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`reference.merge_attention`, one launch for up to four blocks. Exponentials differ in their last bits."""
    while len(outs) > _MOST:
        first = merge_attention(outs[:_MOST], log_sum_exps[:_MOST], torch.float32)
        outs, log_sum_exps = [first[0], *outs[_MOST:]], [first[1], *log_sum_exps[_MOST:]]
    num_rows, batch, heads, width = outs[0].shape
    assert all(x.is_contiguous() for x in (*outs, *log_sum_exps))
    out = torch.empty(outs[0].shape, dtype=dtype, device=outs[0].device)
    log_sum_exp = torch.empty_like(log_sum_exps[0])
    unused = _MOST - len(outs)
    _merge[(cdiv(num_rows, _ROWS), batch * heads)](
        *outs,
        *[outs[0]] * unused,
        *log_sum_exps,
        *[log_sum_exps[0]] * unused,
        *[num_rows - one.shape[0] for one in outs[1:]],
        *[0] * unused,
        out,
        log_sum_exp,
        num_rows,
        batch * heads,
        len(outs),
        width,
        triton.next_power_of_2(width),
        _ROWS,
        enable_fp_fusion=True,
    )
    return out, log_sum_exp


@triton.jit
def _part(part, place, start, end):
    """A summand's elements from `start` to `end`; 0 elsewhere."""
    return tl.load(part + (place - start), mask=(place >= start) & (place < end), other=0.0).to(tl.float32)


@triton.jit
def _sum(
    part_0,
    part_1,
    part_2,
    part_3,
    start_1,
    start_2,
    start_3,
    end_1,
    end_2,
    end_3,
    total,
    numel,
    COUNT: tl.constexpr,
    TILE: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    values = tl.load(part_0 + place, mask=place < numel).to(tl.float32)
    if COUNT > 1:
        values += _part(part_1, place, start_1, end_1)
    if COUNT > 2:
        values += _part(part_2, place, start_2, end_2)
    if COUNT > 3:
        values += _part(part_3, place, start_3, end_3)
    tl.store(total + place, values.to(total.dtype.element_ty), mask=place < numel)


def sum_partials(parts: list[Tensor], at_end: bool, dtype: torch.dtype) -> Tensor:
    """`reference.sum_partials`, bit for bit; one launch for up to four summands."""
    while len(parts) > _MOST:
        parts = [sum_partials(parts[:_MOST], at_end, torch.float32), *parts[_MOST:]]
    assert all(part.is_contiguous() for part in parts)
    total = torch.empty(parts[0].shape, dtype=dtype, device=parts[0].device)
    numel, unused = total.numel(), _MOST - len(parts)
    sizes = [part.numel() for part in parts[1:]]
    starts = [numel - size if at_end else 0 for size in sizes]
    _sum[(cdiv(numel, _TILE),)](
        *parts,
        *[parts[0]] * unused,
        *starts,
        *[0] * unused,
        *[start + size for start, size in zip(starts, sizes, strict=True)],
        *[0] * unused,
        total,
        numel,
        len(parts),
        _TILE,
        enable_fp_fusion=True,
    )
    return total
