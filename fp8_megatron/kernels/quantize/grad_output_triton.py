"""Output gradients cast to FP8 in both layouts, with a bias's gradient from the same read, in Triton.

One kernel serves a plain gradient and the three gradients of a QKV projection. It reads the three in any layout and
writes them interleaved by group. This moves 4 bytes per element; concatenating first would cost 4 more.
"""

# The parameters of a Triton kernel have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...dtypes import MAX_FINITE
from ..launch import MOST_SHAPES, PreparedLaunch
from ..shapes import cdiv, empty
from .triton import (
    MAX_PARTIALS,
    add_cast,
    add_clamped,
    encode,
    larger_magnitude,
    magnitude_bits,
    may_clamp,
    no_values,
    num_clamped,
    partial_amaxes,
    raise_amax,
    reciprocal,
    recorded,
    room_for_scale,
    store_transposed,
    sum_of_blocks,
    sum_of_programs,
    take_scale,
)

_TILE_M = 128
_TILE_K = 64
_NUM_WARPS = 4


@triton.jit
def _load_rows(x, rows, columns, mask, batch, stride_s, stride_b):
    offsets = (rows // batch).to(tl.int64) * stride_s + (rows % batch).to(tl.int64) * stride_b
    return tl.load(x + offsets + columns, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def quantize_grad_tiles(
    x, payload, payload_t, scale, partials, amax_out, column_sums,
    T, batch, stride_s, stride_b, stride_g, width, group_width, first_column, columns_total, num_partials,
    FP_MAX: tl.constexpr, CURRENT: tl.constexpr, POWER_OF_TWO: tl.constexpr, RECORD: tl.constexpr,
    SUM_COLUMNS: tl.constexpr, TRANSPOSED: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
    MAX_PARTIALS: tl.constexpr,
):  # fmt: skip
    """x [s, b, groups, width] → columns [group · group_width + first_column, + width) of the payload."""
    tiles_a_group = tl.cdiv(width, TILE_K)
    group = tl.program_id(0) // tiles_a_group
    within = tl.program_id(0) % tiles_a_group * TILE_K
    block = tl.num_programs(1) - 1 - tl.program_id(1)  # from the end: what the amax pass read last is still in L2
    end = group * group_width + first_column + width
    k0 = end - width + within
    columns = tl.arange(0, TILE_K)[None, :]
    source = x + group.to(tl.int64) * stride_g + within
    inverse = reciprocal(take_scale(scale, partials, num_partials, FP_MAX, CURRENT, POWER_OF_TWO, MAX_PARTIALS))
    dtype: tl.constexpr = payload.dtype.element_ty
    m0 = block * TILE_M
    rows = m0 + 4 * tl.arange(0, TILE_M // 4)[:, None]
    mask = (rows < T) & (within + columns < width)
    x0 = _load_rows(source, rows, columns, mask, batch, stride_s, stride_b)
    x1 = _load_rows(source, rows + 1, columns, mask, batch, stride_s, stride_b)
    x2 = _load_rows(source, rows + 2, columns, mask, batch, stride_s, stride_b)
    x3 = _load_rows(source, rows + 3, columns, mask, batch, stride_s, stride_b)
    q0 = encode(x0, inverse, FP_MAX, dtype)
    q1 = encode(x1, inverse, FP_MAX, dtype)
    q2 = encode(x2, inverse, FP_MAX, dtype)
    q3 = encode(x3, inverse, FP_MAX, dtype)
    # Taken before the stores, so that no FP32 values stay in registers.
    largest = larger_magnitude(larger_magnitude(larger_magnitude(tl.abs(x0), x1), x2), x3)
    sums = (x0 + x1) + (x2 + x3)
    target = payload + rows.to(tl.int64) * columns_total + k0 + columns
    tl.store(target, q0, mask=mask)
    tl.store(target + columns_total, q1, mask=mask)
    tl.store(target + 2 * columns_total, q2, mask=mask)
    tl.store(target + 3 * columns_total, q3, mask=mask)
    if TRANSPOSED:
        store_transposed(q0, q1, q2, q3, payload_t, m0, k0, T, end, TILE_M, TILE_K)
    if RECORD:
        bits = tl.max(magnitude_bits(largest))
        raise_amax(amax_out, bits)
        if RECORD > 1:
            if may_clamp(bits, inverse, FP_MAX):  # read again: healthy tiles keep no values for this
                count = tl.zeros([1], tl.int32)
                for row in range(0, 4):
                    again = _load_rows(source, rows + row, columns, mask, batch, stride_s, stride_b)
                    count += num_clamped(again, inverse, FP_MAX)
                add_clamped(amax_out, tl.sum(count))
            if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
                add_cast(amax_out, T, tl.num_programs(0) // tiles_a_group * width)
    if SUM_COLUMNS:
        pointers = column_sums + block.to(tl.int64) * columns_total + k0 + tl.arange(0, TILE_K)
        tl.store(pointers, tl.sum(sums, axis=0), mask=within + tl.arange(0, TILE_K) < width)


def quantize_grad_output(
    x: Tensor,
    dtype: torch.dtype,
    scale: Tensor | None,
    power_of_two: bool,
    amax_out: Tensor | None,
    transposed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`reference.quantize_grad_output`: the cast, and one small launch that adds up the programs' column sums.

    Raises:
        ValueError: M is not a multiple of 4, or K not of 16.
    """
    x = x.contiguous()
    current = scale is None
    taken = room_for_scale(current, x.device)
    used = taken if scale is None else scale
    partials, num_partials = partial_amaxes(x) if current else (used, 0)
    # As `_quantize_grads` of one gradient; what that needs for three would take the host as long as two launches.
    T, width = x.shape
    device = x.device
    payload = empty(T, width, dtype, device)
    payload_t = empty(width, T, dtype, device) if transposed else no_values(dtype, device)
    sums = empty(cdiv(T, _TILE_M), width, torch.float32, device)
    check_layouts(T, width)
    launch = _launch(
        (T, 1, width, width, width, width, width, 0, width),
        (num_partials, MAX_FINITE[dtype], current, power_of_two, recorded(amax_out), True, transposed),
    )
    launch(x, payload, payload_t, used, partials, used if amax_out is None else amax_out, sums)
    return payload, payload_t, sum_of_blocks(sums), taken


@lru_cache(maxsize=MOST_SHAPES)
def _launch(sizes: tuple[int, ...], cast: tuple[Any, ...]) -> PreparedLaunch:
    """`quantize_grad_tiles` of one gradient, with the kernel's numbers in order: sizes, then what the cast does."""
    T, *_, width, group_width, _, total = sizes
    return PreparedLaunch(
        quantize_grad_tiles,
        (total // group_width * cdiv(width, _TILE_K), cdiv(T, _TILE_M)),
        *(*sizes, *cast, _TILE_M, _TILE_K, MAX_PARTIALS),
        num_warps=_NUM_WARPS,
        enable_fp_fusion=True,
    )


def quantize_qkv_grad(
    grads: list[Tensor],
    dtype: torch.dtype,
    scale: Tensor | None,
    power_of_two: bool,
    amax_out: Tensor | None,
    column_sums: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`reference.quantize_qkv_grad`: a launch for each of query, key and value; under current scaling, three more for
    their amaxes.

    Raises:
        ValueError: the number of tokens is not a multiple of 4, or a width not a multiple of 16.
    """
    return _quantize_grads(grads, dtype, scale, power_of_two, amax_out, column_sums=column_sums)


def _quantize_grads(
    grads: list[Tensor],
    dtype: torch.dtype,
    scale: Tensor | None,
    power_of_two: bool,
    amax_out: Tensor | None,
    *,
    column_sums: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grads = [dense(grad) for grad in grads]
    seq, batch, groups, _ = grads[0].shape
    T, group_width = seq * batch, sum(grad.shape[3] for grad in grads)
    check_layouts(T, *(grad.shape[3] for grad in grads))
    total, device = groups * group_width, grads[0].device
    payload = empty(T, total, dtype, device)
    payload_t = empty(total, T, dtype, device)
    current = scale is None
    taken = room_for_scale(current, device)
    used = taken if scale is None else scale
    partials, num_partials = _partial_amaxes(grads) if current else (used, 0)
    blocks = cdiv(T, _TILE_M)
    sums = torch.empty((1, blocks, total) if column_sums else (1, 1, 0), dtype=torch.float32, device=device)
    first_column = 0
    for grad in grads:
        width = grad.shape[3]
        launch = _launch(
            (T, batch, *grad.stride()[:3], width, group_width, first_column, total),
            (num_partials, MAX_FINITE[dtype], current, power_of_two, recorded(amax_out), column_sums, True),
        )
        launch(grad, payload, payload_t, used, partials, used if amax_out is None else amax_out, sums)
        first_column += width
    return payload, payload_t, sum_of_programs(sums)[0], taken


def check_layouts(num_tokens: int, *widths: int) -> None:
    """Refuse sizes that the FP8 GEMM also refuses: ptxas 12.8 miscompiles the narrower stores that they need.

    Raises:
        ValueError: the size is refused; the text has the number.
    """
    if num_tokens % 4:
        raise ValueError(f"a transposed FP8 payload needs M={num_tokens} to be a multiple of 4 (the FP8 GEMM: of 16)")
    for width in widths:
        if width % 16:
            raise ValueError(f"an FP8 payload of {width} columns: the FP8 GEMM needs a multiple of 16")


def dense(grad: Tensor) -> Tensor:
    """`grad` itself if its heads are contiguous and it fills its memory, in any order of dimensions; else a copy."""
    return grad if _is_dense(grad.shape, grad.stride()) else grad.contiguous()


@cache
def _is_dense(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    grad = torch.empty_strided(shape, strides, device="meta")
    by_stride = sorted(range(4), key=grad.stride, reverse=True)
    return grad.stride(3) == 1 and grad.permute(by_stride).is_contiguous()


def _partial_amaxes(grads: list[Tensor]) -> tuple[Tensor, int]:
    parts = [
        partial_amaxes(grad.as_strided((grad.numel(),), (1,)), most=MAX_PARTIALS // len(grads))[0] for grad in grads
    ]
    partials = torch.cat(parts)
    return partials, partials.numel()
