"""The sum over ranks of a gradient reduction in Triton: `reference.accumulate_rows_`.

Every received byte is read once and the accumulator once each way: d · (1 + 4/128) + 4 bytes an element of the shard, 4
more to add (2 and 2 in BF16). Bitwise the reference's: products and sums are rounded apart (no contraction), in the
order of the rows.
"""

# The parameters of a Triton kernel have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .blockwise_triton import block_size

# Four elements a thread: whole lines of every operand for a warp, no exchange between threads, one scale a row.
_TILE = 1024
_NUM_WARPS = 8
# Rows whose loads are in flight together.
_MAX_GROUP = 8


@triton.jit
def _accumulate_rows(
    payload,
    scales,
    accumulator,
    n,
    factor,
    NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
):
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
        total = tl.full([ROWS, BLOCK], -0.0, tl.float32)  # -0 + x is x, for x = -0 too
    for _ in range(NUM_GROUPS):
        for row in tl.static_range(GROUP):
            value = tl.load(payload + row * length + offsets, mask=mask).to(tl.float32)
            scale = tl.load(scales + row * (length // BLOCK) + blocks, mask=mask)
            total += value * (scale * factor)
        payload += GROUP * length
        scales += GROUP * (length // BLOCK)
    tl.store(accumulator + start + offsets, total.to(accumulator.dtype.element_ty), mask=mask)


def accumulate_rows_(payload: Tensor, scales: Tensor, accumulator: Tensor, factor: float, add: bool) -> None:
    """`reference.accumulate_rows_`, one launch.

    Raises:
        ValueError: see `block_size`.
    """
    n = accumulator.numel()
    num_rows = payload.numel() // n
    block = block_size(payload, scales)
    assert payload.is_contiguous() and scales.is_contiguous() and accumulator.is_contiguous()
    group = max(size for size in range(1, _MAX_GROUP + 1) if num_rows % size == 0)
    _accumulate_rows[(triton.cdiv(n, _TILE),)](
        payload,
        scales,
        accumulator,
        n,
        factor,
        num_rows // group,
        group,
        add,
        _TILE // block,
        block,
        n % _TILE == 0,
        num_warps=_NUM_WARPS,
        enable_fp_fusion=False,
    )
