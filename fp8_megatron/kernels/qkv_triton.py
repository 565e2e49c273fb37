"""Gradients of attention's query, key and value cast to FP8 as the one gradient of the QKV projection, in Triton.

They are read where attention left them, in whatever layout, and written interleaved by group as the projection's rows
are: 4 bytes an element, where concatenating first costs 4 more.
"""

# The parameters of a Triton kernel have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import MAX_FINITE
from . import qkv
from .quantize_triton import (
    MAX_PARTIALS,
    encode,
    larger_magnitude,
    magnitude_bits,
    partial_amaxes,
    quantize_grad_output,
    raise_amax,
    reciprocal,
    store_transposed,
    take_scale,
)

_TILE_M = 128
_TILE_K = 64
_NUM_WARPS = 4


@triton.jit
def _quantize_heads(
    x, payload, payload_t, scale, partials, amax_out, column_sums,
    T, batch, stride_s, stride_b, stride_g, width, group_width, first_column, columns_total, num_partials,
    FP_MAX: tl.constexpr, CURRENT: tl.constexpr, POWER_OF_TWO: tl.constexpr, RECORD_AMAX: tl.constexpr,
    SUM_COLUMNS: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr, MAX_PARTIALS: tl.constexpr,
):  # fmt: skip
    """x [s, b, groups, width] → columns [group · group_width + first_column, + width) of the payload."""
    tiles_a_group = width // TILE_K
    m0 = tl.program_id(0) * TILE_M
    group = tl.program_id(1) // tiles_a_group
    within = tl.program_id(1) % tiles_a_group * TILE_K
    k0 = group * group_width + first_column + within
    source = x + group.to(tl.int64) * stride_g + within
    columns = tl.arange(0, TILE_K)[None, :]
    rows = m0 + 4 * tl.arange(0, TILE_M // 4)[:, None]
    mask = rows < T
    row0 = (rows // batch).to(tl.int64) * stride_s + (rows % batch).to(tl.int64) * stride_b
    row1 = ((rows + 1) // batch).to(tl.int64) * stride_s + ((rows + 1) % batch).to(tl.int64) * stride_b
    row2 = ((rows + 2) // batch).to(tl.int64) * stride_s + ((rows + 2) % batch).to(tl.int64) * stride_b
    row3 = ((rows + 3) // batch).to(tl.int64) * stride_s + ((rows + 3) % batch).to(tl.int64) * stride_b
    x0 = tl.load(source + row0 + columns, mask=mask, other=0.0).to(tl.float32)
    x1 = tl.load(source + row1 + columns, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(source + row2 + columns, mask=mask, other=0.0).to(tl.float32)
    x3 = tl.load(source + row3 + columns, mask=mask, other=0.0).to(tl.float32)
    inverse = reciprocal(take_scale(scale, partials, num_partials, FP_MAX, CURRENT, POWER_OF_TWO, MAX_PARTIALS))
    dtype: tl.constexpr = payload.dtype.element_ty
    q0 = encode(x0, inverse, FP_MAX, dtype)
    q1 = encode(x1, inverse, FP_MAX, dtype)
    q2 = encode(x2, inverse, FP_MAX, dtype)
    q3 = encode(x3, inverse, FP_MAX, dtype)
    target = payload + rows.to(tl.int64) * columns_total + k0 + columns
    tl.store(target, q0, mask=mask)
    tl.store(target + columns_total, q1, mask=mask)
    tl.store(target + 2 * columns_total, q2, mask=mask)
    tl.store(target + 3 * columns_total, q3, mask=mask)
    store_transposed(q0, q1, q2, q3, payload_t, m0, k0, T, columns_total, TILE_M, TILE_K)
    if RECORD_AMAX:
        largest = larger_magnitude(larger_magnitude(larger_magnitude(tl.abs(x0), x1), x2), x3)
        raise_amax(amax_out, tl.max(magnitude_bits(largest)))
    if SUM_COLUMNS:
        sums = tl.sum((x0 + x1) + (x2 + x3), axis=0)
        tl.store(column_sums + tl.program_id(0).to(tl.int64) * columns_total + k0 + tl.arange(0, TILE_K), sums)


def quantize_qkv_grad(
    grads: list[Tensor],
    dtype: torch.dtype,
    scale: Tensor | None,
    power_of_two: bool,
    amax_out: Tensor | None,
    column_sums: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`qkv.quantize_qkv_grad`: a launch for each of query, key and value (and as many for amaxes, under current
    scaling). Heads that are not a multiple of 64 wide are concatenated first.

    Raises:
        ValueError: a number of tokens that is not a multiple of 4.
    """
    if any(grad.shape[3] % _TILE_K for grad in grads):
        return quantize_grad_output(qkv.interleaved(grads), dtype, scale, power_of_two, amax_out)
    grads = [_dense(grad) for grad in grads]
    seq, batch, groups, _ = grads[0].shape
    T, group_width = seq * batch, sum(grad.shape[3] for grad in grads)
    if T % 4:
        raise ValueError(f"a transposed FP8 payload needs M={T} to be a multiple of 4 (the FP8 GEMM: of 16)")
    total, device = groups * group_width, grads[0].device
    payload = torch.empty((T, total), dtype=dtype, device=device)
    payload_t = torch.empty((total, T), dtype=dtype, device=device)
    current = scale is None
    taken = torch.empty(1 if current else 0, dtype=torch.float32, device=device)
    used = taken if scale is None else scale
    partials, num_partials = _partial_amaxes(grads) if current else (used, 0)
    tiles_m = triton.cdiv(T, _TILE_M)
    sums = torch.empty((tiles_m, total) if column_sums else (1, 0), dtype=torch.float32, device=device)
    first_column = 0
    for grad in grads:
        width = grad.shape[3]
        _quantize_heads[(tiles_m, groups * (width // _TILE_K))](
            grad, payload, payload_t, used, partials, used if amax_out is None else amax_out, sums,
            T, batch, grad.stride(0), grad.stride(1), grad.stride(2), width, group_width, first_column, total,
            num_partials, MAX_FINITE[dtype], current, power_of_two, amax_out is not None, column_sums,
            _TILE_M, _TILE_K, MAX_PARTIALS, num_warps=_NUM_WARPS,
        )  # fmt: skip
        first_column += width
    return payload, payload_t, sums.sum(dim=0), taken


def _dense(grad: Tensor) -> Tensor:
    """`grad` itself if its heads are contiguous and it fills its memory, in whatever order, else a copy."""
    by_stride = sorted(range(4), key=grad.stride, reverse=True)
    return grad if grad.stride(3) == 1 and grad.permute(by_stride).is_contiguous() else grad.contiguous()


def _partial_amaxes(grads: list[Tensor]) -> tuple[Tensor, int]:
    parts = [
        partial_amaxes(grad.as_strided((grad.numel(),), (1,)), most=MAX_PARTIALS // len(grads))[0] for grad in grads
    ]
    partials = torch.cat(parts)
    return partials, partials.numel()
