"""LayerNorm and RMSNorm fused with their cast to FP8, and their backward, in Triton: the operators of `norm`.

A program takes whole rows into registers, so a launch reads x once. Bytes per element of a 16-bit x: forward 3 (5 under
current scaling, which reads x once more for the amax), backward 6 (8 with a residual gradient), and 3 for the
transposed payload. Sums over a row have another order than in the specification, so payloads can differ at rounding
boundaries.
"""

# The parameters of a Triton kernel have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...dtypes import MAX_FINITE
from ..quantize.grad_output_triton import check_layouts
from ..quantize.triton import (
    MAX_PARTIALS,
    add_cast,
    add_clamped,
    encode,
    larger_magnitude,
    load_inside,
    magnitude_bits,
    may_clamp,
    no_values,
    num_clamped,
    partials_to_amax,
    raise_amax,
    reciprocal,
    recorded,
    room_for_scale,
    store_transposed,
    sum_of_programs,
    take_scale,
)
from ..shapes import cdiv, next_power_of_2

# Measured on an H200 at rows of 1024 and 4096.
_NUM_WARPS = 4
#: Elements of x that a program holds at a time.
_ELEMENTS = 8192
#: Programs that stay and take one row after another, the next ones loaded ahead.
_FORWARD_ELEMENTS = 4096
STAGES = 3
#: Backward: rows of this length and longer are added up as they come, shorter ones when all are done.
_FLAT_FROM = 4096
_FLAT_ELEMENTS, _BACKWARD_ELEMENTS = 8192, 4096
_FLAT_PROGRAMS_PER_MULTIPROCESSOR, _BACKWARD_PROGRAMS_PER_MULTIPROCESSOR = 1, 2
_TILE_M = 128
_TILE_K = 64


@triton.jit
def normalize(value, w, b, mask, K, eps, RMS: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr):
    """(y, mean, rstd) of some rows, FP32."""
    if RMS:
        mean = tl.zeros([value.shape[0]], tl.float32)
        centred = value
    else:
        mean = tl.sum(value, axis=1) / K
        centred = value - mean[:, None]
        if not EVEN:
            centred = tl.where(mask, centred, 0.0)
    rstd = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(centred * centred, axis=1) / K + eps))
    y = centred * rstd[:, None] * w.to(tl.float32)
    if HAS_BIAS:
        y += b.to(tl.float32)
    return y, mean, rstd


@triton.jit
def _norm_amax(
    x, weight, bias, partials, T, K, eps,
    RMS: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK)[None, :]
    w = load_inside(weight + columns, columns < K, False)
    b = w
    if HAS_BIAS:
        b = load_inside(bias + columns, columns < K, False)
    largest = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(tl.program_id(0) * ROWS, T, tl.num_programs(0) * ROWS):
        rows = start + tl.arange(0, ROWS)[:, None]
        mask = (rows < T) & (columns < K)
        value = load_inside(x + rows.to(tl.int64) * K + columns, mask, False).to(tl.float32)
        y, _, _ = normalize(value, w, b, mask, K, eps, RMS, HAS_BIAS, False)
        largest = larger_magnitude(largest, tl.where(mask, y, 0.0))
    tl.store(partials + tl.program_id(0), tl.max(magnitude_bits(largest)))


@triton.jit
def _norm_quantize(
    x, weight, bias, payload, scale, partials, amax_out, mean_out, rstd_out, T, K, eps, num_partials,
    FP_MAX: tl.constexpr, CURRENT: tl.constexpr, POWER_OF_TWO: tl.constexpr, RECORD: tl.constexpr,
    RMS: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr, MAX_PARTIALS: tl.constexpr,
):  # fmt: skip
    """`reference.norm_quantize`: x [T, K] → payload [T, K], mean_out (unless `RMS`) and rstd_out FP32 [T]."""
    columns = tl.max_contiguous(tl.arange(0, BLOCK), 8)[None, :]
    lane = tl.arange(0, ROWS)
    offsets = lane[:, None] * K + columns
    w = load_inside(weight + columns, columns < K, EVEN)
    b = w
    if HAS_BIAS:
        b = load_inside(bias + columns, columns < K, EVEN)
    inverse = reciprocal(take_scale(scale, partials, num_partials, FP_MAX, CURRENT, POWER_OF_TWO, MAX_PARTIALS))
    largest = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.range(tl.program_id(0) * ROWS, T, tl.num_programs(0) * ROWS, num_stages=STAGES):
        base = tl.cast(start, tl.int64) * K
        rows = start + lane
        mask = None
        if not EVEN:
            mask = (rows < T)[:, None] & (columns < K)
        value = load_inside(x + base + offsets, mask, EVEN).to(tl.float32)
        y, mean, rstd = normalize(value, w, b, mask, K, eps, RMS, HAS_BIAS, EVEN)
        if not RMS:
            tl.store(mean_out + rows, mean, mask=rows < T)
        tl.store(rstd_out + rows, rstd, mask=rows < T)
        tl.store(payload + base + offsets, encode(y, inverse, FP_MAX, payload.dtype.element_ty), mask=mask)
        if RECORD:
            if EVEN:
                largest = larger_magnitude(largest, y)
            else:
                largest = larger_magnitude(largest, tl.where(mask, y, 0.0))
    if RECORD:
        bits = tl.max(magnitude_bits(largest))
        raise_amax(amax_out, bits)
        if RECORD > 1:
            if may_clamp(bits, inverse, FP_MAX):  # computed again: healthy rows pay nothing for the count
                count = tl.zeros([1], tl.int32)
                for start in range(tl.program_id(0) * ROWS, T, tl.num_programs(0) * ROWS):
                    inside = ((start + lane) < T)[:, None] & (columns < K)
                    again = load_inside(x + tl.cast(start, tl.int64) * K + offsets, inside, False).to(tl.float32)
                    y, _, _ = normalize(again, w, b, inside, K, eps, RMS, HAS_BIAS, False)
                    count += num_clamped(tl.where(inside, y, 0.0), inverse, FP_MAX)
                add_clamped(amax_out, tl.sum(count))
            if tl.program_id(0) == 0:
                add_cast(amax_out, T, K)


@triton.jit
def _encode_rows(
    x, w, b, mean, rstd, inverse, rows, columns, mask, T, K,
    FP_MAX: tl.constexpr, RMS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    value = tl.load(x + rows.to(tl.int64) * K + columns, mask=mask, other=0.0).to(tl.float32)
    if not RMS:
        value -= tl.load(mean + rows, mask=rows < T, other=0.0)
    value = value * tl.load(rstd + rows, mask=rows < T, other=0.0) * w + b
    return encode(value, inverse, FP_MAX, dtype)


@triton.jit
def _norm_requantize_tiles(
    x, weight, bias, mean, rstd, scale, payload_t, T, K,
    FP_MAX: tl.constexpr, RMS: tl.constexpr, HAS_BIAS: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    tiles_k = tl.cdiv(K, TILE_K)
    m0 = tl.program_id(0) // tiles_k * TILE_M
    k0 = tl.program_id(0) % tiles_k * TILE_K
    rows = m0 + 4 * tl.arange(0, TILE_M // 4)[:, None]
    columns = k0 + tl.arange(0, TILE_K)[None, :]
    mask = (rows < T) & (columns < K)
    inverse = reciprocal(tl.load(scale))
    w = tl.load(weight + columns, mask=columns < K, other=0.0).to(tl.float32)
    b = 0.0
    if HAS_BIAS:
        b = tl.load(bias + columns, mask=columns < K, other=0.0).to(tl.float32)
    dtype: tl.constexpr = payload_t.dtype.element_ty
    q0 = _encode_rows(x, w, b, mean, rstd, inverse, rows, columns, mask, T, K, FP_MAX, RMS, dtype)
    q1 = _encode_rows(x, w, b, mean, rstd, inverse, rows + 1, columns, mask, T, K, FP_MAX, RMS, dtype)
    q2 = _encode_rows(x, w, b, mean, rstd, inverse, rows + 2, columns, mask, T, K, FP_MAX, RMS, dtype)
    q3 = _encode_rows(x, w, b, mean, rstd, inverse, rows + 3, columns, mask, T, K, FP_MAX, RMS, dtype)
    store_transposed(q0, q1, q2, q3, payload_t, m0, k0, T, K, TILE_M, TILE_K)


@triton.jit
def _scaled_rows(
    x, w, bias, mean, rstd, row_scales, rows, columns, mask, T, K, RMS: tl.constexpr, HAS_BIAS: tl.constexpr
):  # fmt: skip
    """`reference._scaled` of some rows of a tile, bit for bit where products are not fused with sums; 0 outside."""
    value = tl.load(x + rows.to(tl.int64) * K + columns, mask=mask, other=0.0).to(tl.float32)
    if not RMS:
        value -= _load_rows_at(mean, rows, T)
    by_row = _load_rows_at(row_scales, rows, T)
    value = value * (_load_rows_at(rstd, rows, T) * by_row) * w
    if HAS_BIAS:
        value += by_row * tl.load(bias + columns, mask=columns < K, other=0.0).to(tl.float32)
    return value


@triton.jit
def _norm_amax_scaled(
    x, weight, bias, mean, rstd, row_scales, partials, T, K,
    RMS: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK)[None, :]
    w = load_inside(weight + columns, columns < K, False).to(tl.float32)
    largest = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(tl.program_id(0) * ROWS, T, tl.num_programs(0) * ROWS):
        rows = start + tl.arange(0, ROWS)[:, None]
        mask = (rows < T) & (columns < K)
        value = _scaled_rows(x, w, bias, mean, rstd, row_scales, rows, columns, mask, T, K, RMS, HAS_BIAS)
        largest = larger_magnitude(largest, tl.where(mask, value, 0.0))
    tl.store(partials + tl.program_id(0), tl.max(magnitude_bits(largest)))


@triton.jit
def _norm_quantize_scaled_tiles(
    x, weight, bias, mean, rstd, row_scales, scale, partials, payload_t, T, K, num_partials,
    FP_MAX: tl.constexpr, CURRENT: tl.constexpr, POWER_OF_TWO: tl.constexpr, RMS: tl.constexpr,
    HAS_BIAS: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr, MAX_PARTIALS: tl.constexpr,
):  # fmt: skip
    tiles_k = tl.cdiv(K, TILE_K)
    m0 = tl.program_id(0) // tiles_k * TILE_M
    k0 = tl.program_id(0) % tiles_k * TILE_K
    rows = m0 + 4 * tl.arange(0, TILE_M // 4)[:, None]
    columns = k0 + tl.arange(0, TILE_K)[None, :]
    mask = (rows < T) & (columns < K)
    w = tl.load(weight + columns, mask=columns < K, other=0.0).to(tl.float32)
    inverse = reciprocal(take_scale(scale, partials, num_partials, FP_MAX, CURRENT, POWER_OF_TWO, MAX_PARTIALS))
    dtype: tl.constexpr = payload_t.dtype.element_ty
    v0 = _scaled_rows(x, w, bias, mean, rstd, row_scales, rows, columns, mask, T, K, RMS, HAS_BIAS)
    v1 = _scaled_rows(x, w, bias, mean, rstd, row_scales, rows + 1, columns, mask, T, K, RMS, HAS_BIAS)
    v2 = _scaled_rows(x, w, bias, mean, rstd, row_scales, rows + 2, columns, mask, T, K, RMS, HAS_BIAS)
    v3 = _scaled_rows(x, w, bias, mean, rstd, row_scales, rows + 3, columns, mask, T, K, RMS, HAS_BIAS)
    q0 = encode(v0, inverse, FP_MAX, dtype)
    q1 = encode(v1, inverse, FP_MAX, dtype)
    q2 = encode(v2, inverse, FP_MAX, dtype)
    q3 = encode(v3, inverse, FP_MAX, dtype)
    store_transposed(q0, q1, q2, q3, payload_t, m0, k0, T, K, TILE_M, TILE_K)


@triton.jit
def _norm_quantize_scaled_rows(
    x, weight, bias, mean, rstd, row_scales, scale, partials, payload, T, K, num_partials,
    FP_MAX: tl.constexpr, CURRENT: tl.constexpr, POWER_OF_TWO: tl.constexpr, RMS: tl.constexpr,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, MAX_PARTIALS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    mask = (rows < T) & (columns < K)
    w = tl.load(weight + columns, mask=columns < K, other=0.0).to(tl.float32)
    inverse = reciprocal(take_scale(scale, partials, num_partials, FP_MAX, CURRENT, POWER_OF_TWO, MAX_PARTIALS))
    value = _scaled_rows(x, w, bias, mean, rstd, row_scales, rows, columns, mask, T, K, RMS, HAS_BIAS)
    q = encode(value, inverse, FP_MAX, payload.dtype.element_ty)
    tl.store(payload + rows.to(tl.int64) * K + columns, q, mask=mask)


@triton.jit
def _add_pairs(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _norm_backward(
    grad, residual_grad, x, weight, mean, rstd, grad_x, grad_weight, grad_bias, T, K,
    RMS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, EVEN: tl.constexpr, FLAT: tl.constexpr,
    NUM_PARTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """grad [NUM_PARTS, T, K], whose parts are added up, and x [T, K] → grad_x [T, K], grad_weight and grad_bias FP32
    [programs, K].

    Both means of a row cross threads together. With `FLAT`, rows are summed as they come; otherwise they are kept
    separate until the end, because their sum may cross warps."""
    columns = tl.arange(0, BLOCK)[None, :]
    lane = tl.arange(0, ROWS)[:, None]
    offsets = lane * K + columns
    w = load_inside(weight + columns, columns < K, EVEN)
    SUM_ROWS: tl.constexpr = 1 if FLAT else ROWS
    sum_weight = tl.zeros([SUM_ROWS, BLOCK], tl.float32)
    sum_bias = tl.zeros([SUM_ROWS, BLOCK], tl.float32)
    step = tl.num_programs(0) * ROWS
    begin = tl.program_id(0) * ROWS
    # Loaded an iteration ahead: they are too small for the copies that run ahead of the rest.
    next_inverse = _load_rows_at(rstd, begin + lane, T)
    next_mean = next_inverse
    if not RMS:
        next_mean = _load_rows_at(mean, begin + lane, T)
    for start in tl.range(begin, T, step, num_stages=STAGES):
        inverse = next_inverse
        row_mean = next_mean
        next_inverse = _load_rows_at(rstd, start + step + lane, T)
        if not RMS:
            next_mean = _load_rows_at(mean, start + step + lane, T)
        base = tl.cast(start, tl.int64) * K
        mask = None
        if not EVEN:
            mask = (start + lane < T) & (columns < K)
        g = load_inside(grad + base + offsets, mask, EVEN).to(tl.float32)
        for part in tl.static_range(1, NUM_PARTS):
            g += load_inside(grad + part * tl.cast(T, tl.int64) * K + base + offsets, mask, EVEN).to(tl.float32)
        if NUM_PARTS > 1:
            g = g.to(grad.dtype.element_ty).to(tl.float32)
        normalized = load_inside(x + base + offsets, mask, EVEN).to(tl.float32)
        residual = 0.0
        if HAS_RESIDUAL:
            residual = load_inside(residual_grad + base + offsets, mask, EVEN)
        if not RMS:
            normalized -= row_mean
        normalized *= inverse
        if not EVEN:
            normalized = tl.where(mask, normalized, 0.0)
        if FLAT:
            sum_weight += tl.sum(g * normalized, axis=0, keep_dims=True)
            if HAS_BIAS:
                sum_bias += tl.sum(g, axis=0, keep_dims=True)
        else:
            sum_weight += g * normalized
            if HAS_BIAS:
                sum_bias += g
        weighted = g * w.to(tl.float32)
        if RMS:
            value = weighted - normalized * (tl.sum(normalized * weighted, axis=1) / K)[:, None]
        else:
            along, across = tl.reduce((normalized * weighted, weighted), 1, _add_pairs)
            value = weighted - normalized * (along / K)[:, None]
            value -= (across / K)[:, None]
        value *= inverse
        if HAS_RESIDUAL:
            value += tl.cast(residual, tl.float32)
        tl.store(grad_x + base + offsets, value.to(grad_x.dtype.element_ty), mask=mask)
    column = tl.arange(0, BLOCK)
    partial = tl.program_id(0).to(tl.int64) * K + column
    tl.store(grad_weight + partial, tl.sum(sum_weight, axis=0), mask=column < K)
    if HAS_BIAS:
        tl.store(grad_bias + partial, tl.sum(sum_bias, axis=0), mask=column < K)


@triton.jit
def _load_rows_at(values, rows, T):
    return tl.load(values + rows, mask=rows < T, other=0.0)


@cache
def num_multiprocessors(index: int) -> int:
    """Of GPU `index`."""
    return torch.cuda.get_device_properties(index).multi_processor_count


def _block(K: int, elements: int) -> tuple[int, int]:
    """Rows that a program takes at a time, and the columns it covers."""
    block = next_power_of_2(K)
    return max(1, elements // block), block


def _partial_amaxes(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, rms: bool) -> tuple[Tensor, int]:
    T, K = x.shape
    rows, block = _block(K, _ELEMENTS)
    num_partials = min(cdiv(T, rows), MAX_PARTIALS)
    partials = torch.empty(num_partials, dtype=torch.int32, device=x.device)
    has_bias = bias is not None
    _norm_amax[(num_partials,)](
        x, weight, bias if has_bias else weight, partials, T, K, eps, rms, has_bias, rows, block,
        num_warps=_NUM_WARPS, enable_fp_fusion=True,
    )  # fmt: skip
    return partials, num_partials


def norm_amax(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, rms: bool) -> Tensor:
    """`reference.norm_amax`: FP32 [1]."""
    return partials_to_amax(*_partial_amaxes(x.contiguous(), weight, bias, eps, rms))


def forward_shape(T: int, K: int) -> tuple[int, int, bool, int, int]:
    """How programs take whole rows: rows at a time, the columns they cover, whether all lie inside, programs of a
    multiprocessor, and warps."""
    rows, block = _block(K, _FORWARD_ELEMENTS)
    is_even = block == K and T % rows == 0
    # As many as a multiprocessor has registers for: any further programs would run after the others, not beside them.
    programs = 1 if block > _FORWARD_ELEMENTS else 3 if is_even else 2
    return rows, block, is_even, programs, 4 if block <= _FORWARD_ELEMENTS else 16


def norm_quantize(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    eps: float,
    rms: bool,
    scale: Tensor | None,
    power_of_two: bool,
    amax_out: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`reference.norm_quantize`: one launch with a given scale, two under current scaling."""
    x = x.contiguous()
    T, K = x.shape
    rows, block, is_even, a_multiprocessor, num_warps = forward_shape(T, K)
    most = a_multiprocessor * num_multiprocessors(x.device.index)
    payload = torch.empty((T, K), dtype=dtype, device=x.device)
    rstd = torch.empty(T, dtype=torch.float32, device=x.device)
    mean = no_values(torch.float32, x.device) if rms else torch.empty_like(rstd)
    current, has_bias = scale is None, bias is not None
    taken = room_for_scale(current, x.device)
    partials, num_partials = _partial_amaxes(x, weight, bias, eps, rms) if current else (rstd, 0)
    used = taken if scale is None else scale
    _norm_quantize[(min(cdiv(T, rows), most),)](
        x, weight, bias if has_bias else weight, payload, used, partials, used if amax_out is None else amax_out,
        mean, rstd, T, K, eps, num_partials, MAX_FINITE[dtype], current, power_of_two, recorded(amax_out), rms,
        has_bias, is_even, rows, block, STAGES, MAX_PARTIALS, num_warps=num_warps,
        enable_fp_fusion=True,
    )  # fmt: skip
    return payload, taken, mean, rstd


@triton.jit
def _norm_requantize_rows(
    x, weight, bias, mean, rstd, scale, payload, T, K,
    FP_MAX: tl.constexpr, RMS: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    mask = (rows < T) & (columns < K)
    w = tl.load(weight + columns, mask=columns < K, other=0.0).to(tl.float32)
    b = 0.0
    if HAS_BIAS:
        b = tl.load(bias + columns, mask=columns < K, other=0.0).to(tl.float32)
    inverse = reciprocal(tl.load(scale))
    q = _encode_rows(x, w, b, mean, rstd, inverse, rows, columns, mask, T, K, FP_MAX, RMS, payload.dtype.element_ty)
    tl.store(payload + rows.to(tl.int64) * K + columns, q, mask=mask)


def norm_requantize(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    transposed: bool,
) -> Tensor:
    """`reference.norm_requantize`: one launch.

    Raises:
        ValueError: `transposed`, and the number of rows is not a multiple of 4, or of columns not a multiple of 16.
    """
    x = x.contiguous()
    T, K = x.shape
    has_bias = bias is not None
    arguments = (x, weight, bias if has_bias else weight, mean, rstd, scale)
    flags = (MAX_FINITE[dtype], mean.numel() == 0, has_bias)
    if not transposed:
        rows, block = _block(K, _ELEMENTS)
        payload = torch.empty((T, K), dtype=dtype, device=x.device)
        _norm_requantize_rows[(cdiv(T, rows),)](
            *arguments, payload, T, K, *flags, rows, block, num_warps=_NUM_WARPS, enable_fp_fusion=True
        )
        return payload
    check_layouts(T, K)
    payload_t = torch.empty((K, T), dtype=dtype, device=x.device)
    _norm_requantize_tiles[(cdiv(T, _TILE_M) * cdiv(K, _TILE_K),)](
        *arguments, payload_t, T, K, *flags, _TILE_M, _TILE_K, num_warps=_NUM_WARPS, enable_fp_fusion=True
    )
    return payload_t


def _scaled_partials(
    x: Tensor, weight: Tensor, bias: Tensor | None, mean: Tensor, rstd: Tensor, row_scales: Tensor
) -> tuple[Tensor, int]:
    T, K = x.shape
    rows, block = _block(K, _ELEMENTS)
    num_partials = min(cdiv(T, rows), MAX_PARTIALS)
    partials = torch.empty(num_partials, dtype=torch.int32, device=x.device)
    _norm_amax_scaled[(num_partials,)](
        x, weight, weight if bias is None else bias, mean, rstd, row_scales, partials, T, K,
        mean.numel() == 0, bias is not None, rows, block, num_warps=_NUM_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return partials, num_partials


def norm_amax_scaled(
    x: Tensor, weight: Tensor, bias: Tensor | None, mean: Tensor, rstd: Tensor, row_scales: Tensor
) -> Tensor:
    """`reference.norm_amax_scaled`, bit for bit: FP32 [1]."""
    return partials_to_amax(*_scaled_partials(x.contiguous(), weight, bias, mean, rstd, row_scales.contiguous()))


def norm_quantize_scaled(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    row_scales: Tensor,
    dtype: torch.dtype,
    scale: Tensor | None,
    power_of_two: bool,
    transposed: bool,
) -> tuple[Tensor, Tensor]:
    """`reference.norm_quantize_scaled`, bit for bit: one launch with a given scale, two under current scaling.

    Raises:
        ValueError: `transposed`, and the number of rows is not a multiple of 4, or of columns not a multiple of 16.
    """
    x, row_scales = x.contiguous(), row_scales.contiguous()
    T, K = x.shape
    if transposed:
        check_layouts(T, K)
    operands = (x, weight, weight if bias is None else bias, mean, rstd, row_scales)
    current = scale is None
    taken = room_for_scale(current, x.device)
    used = taken if scale is None else scale
    partials, num_partials = _scaled_partials(x, weight, bias, mean, rstd, row_scales) if current else (used, 0)
    flags = (MAX_FINITE[dtype], current, power_of_two, mean.numel() == 0, bias is not None)
    if not transposed:
        rows, block = _block(K, _ELEMENTS)
        payload = torch.empty((T, K), dtype=dtype, device=x.device)
        _norm_quantize_scaled_rows[(cdiv(T, rows),)](
            *operands, used, partials, payload, T, K, num_partials, *flags, rows, block, MAX_PARTIALS,
            num_warps=_NUM_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
        return payload, taken
    payload_t = torch.empty((K, T), dtype=dtype, device=x.device)
    _norm_quantize_scaled_tiles[(cdiv(T, _TILE_M) * cdiv(K, _TILE_K),)](
        *operands, used, partials, payload_t, T, K, num_partials, *flags, _TILE_M, _TILE_K, MAX_PARTIALS,
        num_warps=_NUM_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return payload_t, taken


def norm_backward(
    grad: Tensor,
    residual_grad: Tensor | None,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    has_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.norm_backward`: one launch, and a second that adds up the programs' sums for weight and bias."""
    x, grad = x.contiguous(), grad.contiguous()
    T, K = x.shape
    is_flat = next_power_of_2(K) >= _FLAT_FROM
    rows, block = _block(K, _FLAT_ELEMENTS if is_flat else _BACKWARD_ELEMENTS)
    a_multiprocessor = _FLAT_PROGRAMS_PER_MULTIPROCESSOR if is_flat else _BACKWARD_PROGRAMS_PER_MULTIPROCESSOR
    programs = min(cdiv(T, rows), a_multiprocessor * num_multiprocessors(x.device.index))
    grad_x = torch.empty_like(x)
    sums = torch.empty((2 if has_bias else 1, programs, K), dtype=torch.float32, device=x.device)
    has_residual = residual_grad is not None
    stages = STAGES if block <= 8192 and len(grad) == 1 else 2
    _norm_backward[(programs,)](
        grad, residual_grad.contiguous() if residual_grad is not None else grad, x, weight, mean, rstd, grad_x,
        sums[0], sums[-1], T, K, mean.numel() == 0, has_bias, has_residual, block == K and T % rows == 0, is_flat,
        len(grad), rows, block, stages, num_warps=8 if block <= 4096 else 16,
        enable_fp_fusion=True,
    )  # fmt: skip
    total = sum_of_programs(sums)
    return grad_x, total[0], total[1] if has_bias else total.new_empty(0)
