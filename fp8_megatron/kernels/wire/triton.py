"""The sum over ranks of a gradient reduction in Triton: `reference.accumulate_rows_`.

Every received byte is read once; the accumulator is written once and, to add, read once. Per element of the shard this
is d · (1 + 4/128) + 4 bytes, and 4 more to add (2 and 2 with a BF16 accumulator); BF16 rows take d · 2. Bitwise equal
to the reference: products and sums are rounded separately (no contraction), in row order.
"""

# The parameters of a Triton kernel have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...dtypes import GRAD_BLOCK
from ..quantize.blockwise_triton import block_size
from ..shapes import cdiv

# Four elements per thread: a warp takes whole lines of every operand, threads exchange nothing, a row has one scale.
_TILE = 1024
_NUM_WARPS = 8
# Rows whose loads are in flight together.
_MAX_GROUP = 8


@triton.jit(do_not_specialize=["own_row"])
def _accumulate_rows(
    payload,
    scales,
    accumulator,
    own_payload,
    own_scales,
    addend,
    own_row,
    n,
    factor,
    NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_OWN: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
):
    """`reference.accumulate_rows_` of ROWS blocks of BLOCK elements, of n, over NUM_GROUPS · GROUP rows in order."""
    start = tl.program_id(0).to(tl.int64) * (ROWS * BLOCK)
    blocks = tl.arange(0, ROWS)[:, None]
    offsets = blocks * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = None
    if not EVEN:
        mask = start + blocks * BLOCK < n
    length = tl.cast(n, tl.int64)
    payload += start
    scales += start // BLOCK
    if ADD:
        total = tl.load(accumulator + start + offsets, mask=mask).to(tl.float32)
    else:
        total = tl.zeros([ROWS, BLOCK], tl.float32) * -1.0  # -0 + x is x, for x = -0 too (tl.full(-0.0) is +0)
    for index in range(NUM_GROUPS):
        for row in tl.static_range(GROUP):
            row_payload = payload + row * length
            row_scales = scales + row * (length // BLOCK)
            if HAS_OWN:  # noqa: SIM102 (known when compiled; the inner one is not)
                if index * GROUP + row == own_row:
                    row_payload = own_payload + start
                    row_scales = own_scales + start // BLOCK
            value = tl.load(row_payload + offsets, mask=mask).to(tl.float32)
            if HAS_SCALES:
                total += value * (tl.load(row_scales + blocks, mask=mask) * factor)
            else:
                total += value * factor
        payload += GROUP * length
        scales += GROUP * (length // BLOCK)
    if HAS_ADDEND:
        rounded = total.to(accumulator.dtype.element_ty).to(tl.float32)
        total = rounded + tl.load(addend + start + offsets, mask=mask).to(tl.float32)
    tl.store(accumulator + start + offsets, total.to(accumulator.dtype.element_ty), mask=mask)


def accumulate_rows_(
    payload: Tensor,
    scales: Tensor | None,
    accumulator: Tensor,
    factor: float,
    add: bool,
    own_row: int,
    own_payload: Tensor | None,
    own_scales: Tensor | None,
    addend: Tensor | None,
) -> None:
    """`reference.accumulate_rows_`, one launch.

    Raises:
        ValueError: see `block_size`.
    """
    n = accumulator.numel()
    num_rows = payload.numel() // n
    block = GRAD_BLOCK if scales is None else block_size(payload, scales)
    assert payload.is_contiguous() and accumulator.is_contiguous() and (scales is None or scales.is_contiguous())
    assert n % block == 0, (n, block)
    group = max(size for size in range(1, _MAX_GROUP + 1) if num_rows % size == 0)
    _accumulate_rows[(cdiv(n, _TILE),)](
        payload,
        accumulator if scales is None else scales,
        accumulator,
        payload if own_payload is None else own_payload,
        accumulator if own_scales is None else own_scales,
        accumulator if addend is None else addend,
        own_row,
        n,
        factor,
        num_rows // group,
        group,
        add,
        _TILE // block,
        block,
        n % _TILE == 0,
        own_payload is not None,
        scales is not None,
        addend is not None,
        num_warps=_NUM_WARPS,
        enable_fp_fusion=False,
    )
