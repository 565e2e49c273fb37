"""The gradient of a rotated QKV projection cast to FP8 in Triton: `reference.quantize_rotated_qkv_grad` and its amax.

A program's tile holds pairs of columns of one head after another, so that the angles of its tokens stay in registers.
Kernels are compiled without fused multiply-add: results are bitwise those of the specification. The value's gradient is
not rotated. The programs of query, key and value share a launch.
"""

# The parameters of a Triton kernel have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...dtypes import MAX_FINITE
from ..quantize.grad_output_triton import check_layouts, dense, quantize_grad_output
from ..quantize.triton import (
    MAX_PARTIALS,
    add_cast,
    add_clamped,
    encode,
    larger_magnitude,
    magnitude_bits,
    may_clamp,
    num_clamped,
    partial_amaxes,
    partials_to_amax,
    raise_amax,
    reciprocal,
    recorded,
    room_for_scale,
    sum_of_programs,
    take_scale,
    transposed_words,
)
from ..reference import decode
from ..shapes import cdiv
from .reference import Rotation
from .triton import heads_of_rows, join_rotated_back, load_angles, load_pairs, rotate, tile_of

#: Tokens of a tile; more where a head's tile is narrow, so that a thread has four pairs of each row.
_TILE_M = 32
_MAX_TILE_P = 64
_NARROW_TILE_P = 16
#: FP8 columns that a store of a half writes at least: ptxas 12.8 miscompiles narrower ones.
_STORED_TOGETHER = 4
#: Divides the pairs of any head. ptxas 12.8 also miscompiled masked stores of single bytes, as interleaved pairs need.
_WHOLE_TILE_P = 8
#: Heads that share a program's angles. More read fewer angles; fewer fill the multiprocessors more evenly.
_HEADS_A_PROGRAM = 4
_NUM_WARPS = 4
_AMAX_WARPS = 4


@triton.jit
def _columns_of_pairs(pairs, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The two columns of each pair of a head. The columns that are not rotated make pairs, too."""
    if INTERLEAVED:
        return 2 * pairs, 2 * pairs + 1
    elif 2 * HALF == HEAD_DIM:
        return pairs, pairs + HALF
    elif HALF == 0:
        return pairs, pairs + HEAD_DIM // 2
    else:
        first = tl.where(pairs < HALF, pairs, HALF + pairs)
        return first, tl.where(pairs < HALF, pairs + HALF, HEAD_DIM // 2 + pairs)


@triton.jit
def _load_rotated_back(
    x, offsets, first, second, cos, sin, mask, is_rotated, factor,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """The pairs of one head in the rows that begin at x + offsets [R, 1], times `factor` if `SCALED`, rotated back:
    two FP32 [R, TILE_P]."""
    x1 = tl.load(x + offsets + first, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(x + offsets + second, mask=mask, other=0.0).to(tl.float32)
    if SCALED:
        x1, x2 = x1 * factor, x2 * factor
    if HALF == 0:
        return x1, x2
    y1, y2 = rotate(x1, x2, cos, -sin)
    if 2 * HALF < HEAD_DIM:  # chosen, because an inf beside it times a sine of 0 is a NaN
        y1, y2 = tl.where(is_rotated, y1, x1), tl.where(is_rotated, y2, x2)
    return y1, y2


@triton.jit
def _store_rows(payload, y0, y1, y2, y3, rows, columns, mask, columns_total, inverse, FP_MAX: tl.constexpr):
    """Cast four interleaved sets of rows [R, TILE_P], store them, and return the casts."""
    dtype: tl.constexpr = payload.dtype.element_ty
    q0 = encode(y0, inverse, FP_MAX, dtype)
    q1 = encode(y1, inverse, FP_MAX, dtype)
    q2 = encode(y2, inverse, FP_MAX, dtype)
    q3 = encode(y3, inverse, FP_MAX, dtype)
    target = payload + rows.to(tl.int64) * columns_total + columns
    tl.store(target, q0, mask=mask)
    tl.store(target + columns_total, q1, mask=mask)
    tl.store(target + 2 * columns_total, q2, mask=mask)
    tl.store(target + 3 * columns_total, q3, mask=mask)
    return q0, q1, q2, q3


@triton.jit
def _largest_of(largest, y0, y1, y2, y3):
    return larger_magnitude(larger_magnitude(larger_magnitude(larger_magnitude(largest, y0), y1), y2), y3)


@triton.jit
def _quantize_heads(
    chunk, block, x, factor, cos_sin, payload, payload_t, inverse, amax_out, column_sums,
    T, batch, stride_s, stride_b, stride_g, heads, num_groups, group_width, first_column, columns_total,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, SCALED: tl.constexpr,
    FP_MAX: tl.constexpr, RECORD: tl.constexpr, SUM_COLUMNS: tl.constexpr,
    HEADS: tl.constexpr, TILE_M: tl.constexpr, TILE_P: tl.constexpr,
):  # fmt: skip
    """x [s, b, groups, heads · d] → columns [group · group_width + first_column, + heads · d) of the payload.

    Heads [chunk · HEADS, + HEADS) of num_groups · heads, cut into tiles of TILE_P pairs, in rows [block · TILE_M,
    + TILE_M).
    """
    tiles_a_head: tl.constexpr = (HEAD_DIM // 2 + TILE_P - 1) // TILE_P
    tile = chunk % tiles_a_head
    chunk = chunk // tiles_a_head
    if SCALED:
        factor = tl.load(factor)
    m0 = block * TILE_M
    rows = m0 + 4 * tl.arange(0, TILE_M // 4)[:, None]
    pair = tile * TILE_P + tl.arange(0, TILE_P)
    first_of_head, second_of_head = _columns_of_pairs(pair, HEAD_DIM, HALF, INTERLEAVED)
    first, second = first_of_head[None, :], second_of_head[None, :]
    in_head, is_rotated = (pair < HEAD_DIM // 2)[None, :], (pair < HALF)[None, :]
    mask = (rows < T) & in_head  # T is a multiple of 4: four rows are in or out together
    with_angle = (rows < T) & is_rotated
    cos0, sin0 = load_angles(cos_sin, rows // batch, pair[None, :], with_angle, HALF)
    cos1, sin1 = load_angles(cos_sin, (rows + 1) // batch, pair[None, :], with_angle, HALF)
    cos2, sin2 = load_angles(cos_sin, (rows + 2) // batch, pair[None, :], with_angle, HALF)
    cos3, sin3 = load_angles(cos_sin, (rows + 3) // batch, pair[None, :], with_angle, HALF)
    at0 = (rows // batch).to(tl.int64) * stride_s + (rows % batch).to(tl.int64) * stride_b
    at1 = ((rows + 1) // batch).to(tl.int64) * stride_s + ((rows + 1) % batch).to(tl.int64) * stride_b
    at2 = ((rows + 2) // batch).to(tl.int64) * stride_s + ((rows + 2) % batch).to(tl.int64) * stride_b
    at3 = ((rows + 3) // batch).to(tl.int64) * stride_s + ((rows + 3) % batch).to(tl.int64) * stride_b
    words = tl.arange(0, TILE_M // 4)[None, :]
    words_mask = (m0 // 4 + words < T // 4) & (pair < HEAD_DIM // 2)[:, None]
    largest = tl.zeros([TILE_M // 4, TILE_P], tl.float32)
    end = tl.minimum((chunk + 1) * HEADS, num_groups * heads)
    for index in tl.range(chunk * HEADS, end, num_stages=2):  # loads of the next head start early
        source = x + tl.cast(index // heads, tl.int64) * stride_g + index % heads * HEAD_DIM
        k0 = index // heads * group_width + first_column + index % heads * HEAD_DIM
        a0, b0 = _load_rotated_back(
            source, at0, first, second, cos0, sin0, mask, is_rotated, factor, HEAD_DIM, HALF, SCALED
        )
        a1, b1 = _load_rotated_back(
            source, at1, first, second, cos1, sin1, mask, is_rotated, factor, HEAD_DIM, HALF, SCALED
        )
        a2, b2 = _load_rotated_back(
            source, at2, first, second, cos2, sin2, mask, is_rotated, factor, HEAD_DIM, HALF, SCALED
        )
        a3, b3 = _load_rotated_back(
            source, at3, first, second, cos3, sin3, mask, is_rotated, factor, HEAD_DIM, HALF, SCALED
        )
        if RECORD:
            largest = _largest_of(_largest_of(largest, a0, a1, a2, a3), b0, b1, b2, b3)
        if SUM_COLUMNS:
            sums = column_sums + block.to(tl.int64) * columns_total + k0
            inside = pair < HEAD_DIM // 2
            tl.store(sums + first_of_head, tl.sum((a0 + a1) + (a2 + a3), axis=0), mask=inside)
            tl.store(sums + second_of_head, tl.sum((b0 + b1) + (b2 + b3), axis=0), mask=inside)
        corner = payload_t.to(tl.pointer_type(tl.int32)) + m0 // 4 + words
        p0, p1, p2, p3 = _store_rows(payload, a0, a1, a2, a3, rows, k0 + first, mask, columns_total, inverse, FP_MAX)
        target = corner + (k0 + first_of_head)[:, None].to(tl.int64) * (T // 4)
        tl.store(target, transposed_words(p0, p1, p2, p3), mask=words_mask)
        q0, q1, q2, q3 = _store_rows(payload, b0, b1, b2, b3, rows, k0 + second, mask, columns_total, inverse, FP_MAX)
        target = corner + (k0 + second_of_head)[:, None].to(tl.int64) * (T // 4)
        tl.store(target, transposed_words(q0, q1, q2, q3), mask=words_mask)
    if RECORD:
        bits = tl.max(magnitude_bits(largest))
        raise_amax(amax_out, bits)
        if RECORD > 1:
            if may_clamp(bits, inverse, FP_MAX):  # read again: healthy tiles keep no values for this
                count = tl.zeros([1], tl.int32)
                for index in range(chunk * HEADS, end):
                    source = x + tl.cast(index // heads, tl.int64) * stride_g + index % heads * HEAD_DIM
                    for row in range(0, 4):
                        at = ((rows + row) // batch).to(tl.int64) * stride_s
                        at += ((rows + row) % batch).to(tl.int64) * stride_b
                        cos, sin = load_angles(cos_sin, (rows + row) // batch, pair[None, :], with_angle, HALF)
                        a, b = _load_rotated_back(
                            source, at, first, second, cos, sin, mask, is_rotated, factor, HEAD_DIM, HALF, SCALED
                        )
                        count += num_clamped(a, inverse, FP_MAX) + num_clamped(b, inverse, FP_MAX)
                add_clamped(amax_out, tl.sum(count))
            if (chunk == 0) & (tile == 0) & (block == 0):
                add_cast(amax_out, T, num_groups * heads * HEAD_DIM)


@triton.jit
def _quantize_rotated_tiles(
    query, key, value, factor_query, factor_key, factor_value, cos_sin, payload, payload_t,
    scale, partials, amax_out, column_sums, query_programs, key_programs,
    T, batch, query_s, query_b, query_g, key_s, key_b, key_g, value_s, value_b, value_g,
    heads, num_groups, group_width, columns_total, num_partials,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, SCALED: tl.constexpr,
    FP_MAX: tl.constexpr, CURRENT: tl.constexpr, POWER_OF_TWO: tl.constexpr, RECORD: tl.constexpr,
    SUM_COLUMNS: tl.constexpr, HEADS: tl.constexpr, TILE_M: tl.constexpr, TILE_P: tl.constexpr,
    MAX_PARTIALS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    block = tl.num_programs(1) - 1 - tl.program_id(1)  # from the end: what the amax pass read last is still in L2
    inverse = reciprocal(take_scale(scale, partials, num_partials, FP_MAX, CURRENT, POWER_OF_TWO, MAX_PARTIALS))
    if program < query_programs:
        _quantize_heads(
            program, block, query, factor_query, cos_sin, payload, payload_t, inverse, amax_out, column_sums,
            T, batch, query_s, query_b, query_g, heads, num_groups, group_width, 0, columns_total,
            HEAD_DIM, HALF, INTERLEAVED, SCALED, FP_MAX, RECORD, SUM_COLUMNS, HEADS, TILE_M, TILE_P,
        )  # fmt: skip
    elif program < query_programs + key_programs:
        _quantize_heads(
            program - query_programs, block, key, factor_key, cos_sin, payload, payload_t, inverse, amax_out,
            column_sums, T, batch, key_s, key_b, key_g, 1, num_groups, group_width, heads * HEAD_DIM, columns_total,
            HEAD_DIM, HALF, INTERLEAVED, SCALED, FP_MAX, RECORD, SUM_COLUMNS, HEADS, TILE_M, TILE_P,
        )  # fmt: skip
    else:
        _quantize_heads(
            program - query_programs - key_programs, block, value, factor_value, cos_sin, payload, payload_t, inverse,
            amax_out, column_sums,
            T, batch, value_s, value_b, value_g, 1, num_groups, group_width, (heads + 1) * HEAD_DIM, columns_total,
            HEAD_DIM, 0, False, SCALED, FP_MAX, RECORD, SUM_COLUMNS, HEADS, TILE_M, TILE_P,
        )  # fmt: skip


@triton.jit
def _rotated_partial_amax(
    x, cos_sin, partials, T, batch, stride_s, stride_b, stride_g, heads, num_groups,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    TILE_R: tl.constexpr, TILE_P: tl.constexpr, TILE_REST: tl.constexpr,
):  # fmt: skip
    largest = tl.zeros([TILE_R, TILE_P], tl.int32)
    largest_of_rest = tl.zeros([TILE_R, TILE_REST], tl.int32)
    pairs = tl.arange(0, TILE_P)[None, :]
    rest = 2 * HALF + tl.arange(0, TILE_REST)[None, :]
    num_rows = T * num_groups * heads
    for start in range(tl.program_id(0) * TILE_R, num_rows, tl.num_programs(0) * TILE_R):
        rows = start + tl.arange(0, TILE_R)[:, None]
        mask = rows < num_rows
        token, _, _, source = heads_of_rows(rows, batch, heads, num_groups, stride_s, stride_b, stride_g, HEAD_DIM)
        cos, sin = load_angles(cos_sin, token // batch, pairs, mask & (pairs < HALF), HALF)
        first, second = load_pairs(x, source, mask, HALF, INTERLEAVED, TILE_P)
        first, second = rotate(first, second, cos, -sin)
        largest = tl.maximum(largest, tl.maximum(magnitude_bits(first), magnitude_bits(second)))
        if 2 * HALF < HEAD_DIM:
            others = tl.load(x + source + rest, mask=mask & (rest < HEAD_DIM), other=0.0)
            largest_of_rest = tl.maximum(largest_of_rest, magnitude_bits(others))
    tl.store(partials + tl.program_id(0), tl.maximum(tl.max(largest), tl.max(largest_of_rest)))


def rotated_qkv_grad_amax(grads: list[Tensor], rotation: Rotation) -> Tensor:
    """`reference.rotated_qkv_grad_amax`: a launch for each of query, key and value, and one for their maximum."""
    partials = _partial_amaxes([dense(grad) for grad in grads], rotation)
    return partials_to_amax(partials, partials.numel())


def _partial_amaxes(grads: list[Tensor], rotation: Rotation) -> Tensor:
    """int32 magnitude bits of parts of the gradients, query and key rotated back; at most `MAX_PARTIALS`."""
    *rotated, value = grads
    most = MAX_PARTIALS // len(grads)
    parts = [_rotated_amaxes(grad, rotation, most) for grad in rotated]
    return torch.cat([*parts, partial_amaxes(value.as_strided((value.numel(),), (1,)), most=most)[0]])


def _rotated_amaxes(grad: Tensor, rotation: Rotation, most: int) -> Tensor:
    cos_sin, head_dim, interleaved = rotation
    seq, batch, groups, width = grad.shape
    half, heads = cos_sin.shape[2], width // head_dim
    tile_r, tile_p = tile_of(rotation)
    partials = torch.empty(min(cdiv(seq * batch * groups * heads, tile_r), most), dtype=torch.int32, device=grad.device)
    _rotated_partial_amax[(partials.numel(),)](
        grad, cos_sin, partials, seq * batch, batch, *grad.stride()[:3], heads, groups, head_dim, half, interleaved,
        tile_r, tile_p, triton.next_power_of_2(max(1, head_dim - 2 * half)),
        num_warps=_AMAX_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return partials


def quantize_rotated_qkv_grad(
    grads: list[Tensor],
    rotation: Rotation,
    dtype: torch.dtype,
    scale: Tensor | None,
    power_of_two: bool,
    amax_out: Tensor | None,
    column_sums: bool,
    grad_scales: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`reference.quantize_rotated_qkv_grad`: one launch; under current scaling, three more for the amaxes. Halves of
    other than multiples of 4 columns are written in FP32 in between.

    Raises:
        ValueError: the number of tokens is not a multiple of 4, or a width not a multiple of 16.
    """
    cos_sin, head_dim, interleaved = rotation
    half = cos_sin.shape[2]
    if not interleaved and half % _STORED_TOGETHER:
        wide = grads
        if grad_scales:
            wide = [decode(grad, of_grad) for grad, of_grad in zip(grads, grad_scales, strict=True)]
        whole = join_rotated_back(wide, rotation, torch.float32)
        payload, payload_t, totals, taken = quantize_grad_output(whole, dtype, scale, power_of_two, amax_out, True)
        return payload, payload_t, totals if column_sums else totals.new_empty(0), taken
    query, key, value = grads = [dense(grad) for grad in grads]
    seq, batch, groups, query_width = query.shape
    T, heads, device = seq * batch, query_width // head_dim, query.device
    check_layouts(T, query_width, head_dim)
    group_width = query_width + 2 * head_dim
    total = groups * group_width
    payload = torch.empty((T, total), dtype=dtype, device=device)
    payload_t = torch.empty((total, T), dtype=dtype, device=device)
    current = scale is None
    taken = room_for_scale(current, device)
    used = taken if scale is None else scale
    partials = _partial_amaxes(grads, rotation) if current else used
    tile_p = min(_MAX_TILE_P, triton.next_power_of_2(head_dim // 2))
    if interleaved and head_dim // 2 % tile_p:
        tile_p = _WHOLE_TILE_P
    tile_m = _TILE_M * max(1, _NARROW_TILE_P // tile_p)
    blocks = cdiv(T, tile_m)
    sums = torch.empty((1, blocks, total) if column_sums else (1, 1, 0), dtype=torch.float32, device=device)
    tiles_a_head = cdiv(head_dim // 2, tile_p)
    query_programs = cdiv(groups * heads, _HEADS_A_PROGRAM) * tiles_a_head
    key_programs = cdiv(groups, _HEADS_A_PROGRAM) * tiles_a_head
    _quantize_rotated_tiles[(query_programs + 2 * key_programs, blocks)](
        query, key, value, *(grad_scales or [used] * 3), cos_sin, payload, payload_t,
        used, partials, used if amax_out is None else amax_out, sums, query_programs, key_programs,
        T, batch, *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
        heads, groups, group_width, total, partials.numel(), head_dim, half, interleaved, bool(grad_scales),
        MAX_FINITE[dtype], current, power_of_two, recorded(amax_out), column_sums,
        _HEADS_A_PROGRAM, tile_m, tile_p, MAX_PARTIALS,
        num_warps=max(1, tile_p * _NUM_WARPS // _MAX_TILE_P), enable_fp_fusion=False,
    )  # fmt: skip
    return payload, payload_t, sum_of_programs(sums)[0], taken
