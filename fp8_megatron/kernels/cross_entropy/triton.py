"""Cross-entropy in Triton: the operators of `cross_entropy`.

16-bit logits are read once for the loss, and read and written once for the gradient: 6 bytes per element. A loss
computed in FP32 by separate kernels moves about 30. The FP8 gradient in both layouts takes as many bytes as a 16-bit
one.
"""

# The parameters of a Triton kernel have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from ...dtypes import MAX_FINITE
from ..quantize.grad_output_triton import check_layouts
from ..quantize.triton import encode, reciprocal, store_transposed
from ..shapes import cdiv
from .reference import KEPT, LEAST, PAYLOAD_SCALE, columns_of

_BLOCK = 4096
_NUM_WARPS = 8
_TILE_M = 128
_TILE_K = 64
_TILE_WARPS = 4
_TOKENS = 1024
_LOG2_E = tl.constexpr(1.4426950408889634)
_LOWEST = tl.constexpr(-3.4028234663852886e38)
_PAYLOAD_SCALE, _KEPT, _LEAST = tl.constexpr(PAYLOAD_SCALE), tl.constexpr(KEPT), tl.constexpr(LEAST)


@triton.jit
def _cross_entropy_statistics(logits, labels, largest, total, target, V, first, num_columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * V
    columns = tl.arange(0, BLOCK)
    # Finite: a row that is −inf up to here would give inf − inf.
    running = _LOWEST
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_columns, BLOCK):
        value = tl.load(base + start + columns, mask=start + columns < num_columns, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(running, tl.max(value, axis=0))
        sums = sums * tl.exp2((running - higher) * _LOG2_E) + tl.exp2((value - higher) * _LOG2_E)
        running = higher
    label = tl.load(labels + row) - first
    is_here = (label >= 0) & (label < num_columns)
    tl.store(largest + row, running)
    tl.store(total + row, tl.sum(sums, axis=0))
    tl.store(target + row, tl.load(base + tl.where(is_here, label, 0), mask=is_here, other=0.0).to(tl.float32))


@triton.jit
def _cross_entropy_backward(logits, labels, log_sum_exp, grad, V, first, num_columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pointers = logits + row.to(tl.int64) * V + columns
    mask = columns < V
    value = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    probability = tl.exp2((value - tl.load(log_sum_exp + row)) * _LOG2_E)
    probability = tl.where(columns == tl.load(labels + row) - first, probability - 1.0, probability)
    gradient = tl.where(columns < num_columns, probability * tl.load(grad + row), 0.0)
    tl.store(pointers, gradient.to(logits.dtype.element_ty), mask=mask)


@triton.jit
def _token_scales(log_sum_exp, target, upstream, factors, scales, payload_scale, T, BLOCK: tl.constexpr):
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = tokens < T
    below = tl.load(target + tokens, mask=mask, other=0.0) - tl.load(log_sum_exp + tokens, mask=mask, other=0.0)
    magnitude = tl.maximum(-libdevice.expm1(below), _LEAST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(factors + tokens, tl.div_rn(1.0, magnitude * _KEPT), mask=mask)
    tl.store(scales + tokens, magnitude * tl.load(upstream + tokens, mask=mask, other=0.0), mask=mask)
    if tl.program_id(0) == 0:
        tl.store(payload_scale, _PAYLOAD_SCALE)


@triton.jit
def _quantize_rows(
    logits, labels, log_sum_exp, grad, payload, rows, columns, T, V, first, num_columns, inverse,
    FP_MAX: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Every fourth row of a tile: computes the gradient in FP8 and writes its payload."""
    is_row = rows < T
    mask = is_row & (columns < V)
    offsets = rows.to(tl.int64) * V + columns
    value = tl.load(logits + offsets, mask=mask, other=0.0).to(tl.float32)
    shift = tl.load(log_sum_exp + rows, mask=is_row, other=0.0)
    label = tl.load(labels + rows, mask=is_row, other=-1) - first
    factor = tl.load(grad + rows, mask=is_row, other=0.0)
    probability = tl.exp2((value - shift) * _LOG2_E)
    probability = tl.where(columns == label, probability - 1.0, probability)
    gradient = tl.where(columns < num_columns, probability * factor, 0.0)
    quantized = encode(gradient, inverse, FP_MAX, dtype)
    tl.store(payload + offsets, quantized, mask=mask)
    return quantized


@triton.jit
def _cross_entropy_backward_tiles(
    logits, labels, log_sum_exp, grad, payload, payload_t, scale, T, V, first, num_columns,
    FP_MAX: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    tiles_k = tl.cdiv(V, TILE_K)
    m0 = tl.program_id(0) // tiles_k * TILE_M
    k0 = tl.program_id(0) % tiles_k * TILE_K
    rows = m0 + 4 * tl.arange(0, TILE_M // 4)[:, None]
    columns = k0 + tl.arange(0, TILE_K)[None, :]
    inverse = reciprocal(tl.load(scale))
    dtype: tl.constexpr = payload.dtype.element_ty
    q0 = _quantize_rows(
        logits, labels, log_sum_exp, grad, payload, rows, columns, T, V, first, num_columns, inverse, FP_MAX, dtype
    )  # fmt: skip
    q1 = _quantize_rows(
        logits, labels, log_sum_exp, grad, payload, rows + 1, columns, T, V, first, num_columns, inverse, FP_MAX, dtype
    )  # fmt: skip
    q2 = _quantize_rows(
        logits, labels, log_sum_exp, grad, payload, rows + 2, columns, T, V, first, num_columns, inverse, FP_MAX, dtype
    )  # fmt: skip
    q3 = _quantize_rows(
        logits, labels, log_sum_exp, grad, payload, rows + 3, columns, T, V, first, num_columns, inverse, FP_MAX, dtype
    )  # fmt: skip
    store_transposed(q0, q1, q2, q3, payload_t, m0, k0, T, V, TILE_M, TILE_K)


def cross_entropy_statistics(
    logits: Tensor, labels: Tensor, first: int, num_columns: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.cross_entropy_statistics`: one launch, one program per row."""
    T, V = logits.shape
    largest, total, target = (torch.empty(T, dtype=torch.float32, device=logits.device) for _ in range(3))
    _cross_entropy_statistics[(T,)](
        logits, labels, largest, total, target, V, first, columns_of(logits, num_columns), _BLOCK, num_warps=_NUM_WARPS,
        enable_fp_fusion=True,
    )  # fmt: skip
    return largest, total, target


def cross_entropy_backward_(
    logits: Tensor, labels: Tensor, log_sum_exp: Tensor, grad: Tensor, first: int, num_columns: int | None
) -> None:
    """`reference.cross_entropy_backward_`: one launch."""
    T, V = logits.shape
    _cross_entropy_backward[(T, cdiv(V, _BLOCK))](
        logits, labels, log_sum_exp, grad, V, first, columns_of(logits, num_columns), _BLOCK, num_warps=_NUM_WARPS,
        enable_fp_fusion=True,
    )  # fmt: skip


def token_scales(log_sum_exp: Tensor, target: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.token_scales`: one launch. Its exponential is the GPU's."""
    T = len(upstream)
    factors, scales = (torch.empty(T, dtype=torch.float32, device=upstream.device) for _ in range(2))
    payload_scale = torch.empty(1, dtype=torch.float32, device=upstream.device)
    _token_scales[(cdiv(T, _TOKENS),)](
        log_sum_exp, target, upstream.contiguous(), factors, scales, payload_scale, T, _TOKENS,
        enable_fp_fusion=True,
    )  # fmt: skip
    return factors, scales, payload_scale


def cross_entropy_backward_quantize(
    logits: Tensor,
    labels: Tensor,
    log_sum_exp: Tensor,
    grad: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    first: int,
    num_columns: int | None,
) -> tuple[Tensor, Tensor]:
    """`reference.cross_entropy_backward_quantize`: one launch.

    Raises:
        ValueError: the number of tokens is not a multiple of 4, or of columns not a multiple of 16.
    """
    T, V = logits.shape
    check_layouts(T, V)
    payload = torch.empty((T, V), dtype=dtype, device=logits.device)
    payload_t = torch.empty((V, T), dtype=dtype, device=logits.device)
    _cross_entropy_backward_tiles[(cdiv(T, _TILE_M) * cdiv(V, _TILE_K),)](
        logits, labels, log_sum_exp, grad.contiguous(), payload, payload_t, scale, T, V, first,
        columns_of(logits, num_columns), MAX_FINITE[dtype], _TILE_M, _TILE_K, num_warps=_TILE_WARPS,
        enable_fp_fusion=True,
    )  # fmt: skip
    return payload, payload_t
