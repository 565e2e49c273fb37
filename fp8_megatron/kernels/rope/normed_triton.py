"""Query-key normalisation with RoPE in Triton: `reference.norm_rotate_qk` and its backward, one launch each way.

A row of a tile is one head of one token, so a program computes a head's statistics from what it holds. Backward's
programs add up the gradients of the weights over all rows they take; a second small launch adds up the programs.
"""

# The parameters of a Triton kernel have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..quantize.grad_output_triton import dense
from ..quantize.triton import sum_of_programs
from ..shapes import cdiv
from .reference import QKNorm, Rotation
from .triton import heads_of_rows, load_angles, load_pairs, rotate, store_pairs, tile_of_rest

#: Columns of heads in a program's tile.
_ELEMENTS = 2048
_NUM_WARPS = 4
#: Programs of backward for each of query, key and value: a few for each multiprocessor.
_BACKWARD_PROGRAMS = 264


@triton.jit
def _load_head(
    x, rows, mask,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    TILE_P: tl.constexpr, TILE_REST: tl.constexpr,
):  # fmt: skip
    """The heads that begin at x + rows [R, 1] in FP32: both columns of their pairs [R, TILE_P] and the rest."""
    first, second = load_pairs(x, rows, mask, HALF, INTERLEAVED, TILE_P)
    rest = 2 * HALF + tl.arange(0, TILE_REST)[None, :]
    others = tl.load(x + rows + rest, mask=mask & (rest < HEAD_DIM), other=0.0).to(tl.float32)
    return first, second, others


@triton.jit
def _store_head(
    out, rows, mask, first, second, others,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    TILE_P: tl.constexpr, TILE_REST: tl.constexpr,
):  # fmt: skip
    if HALF:
        store_pairs(out, rows, mask, first, second, HALF, INTERLEAVED, TILE_P)
    if 2 * HALF < HEAD_DIM:
        rest = 2 * HALF + tl.arange(0, TILE_REST)[None, :]
        tl.store(out + rows + rest, others.to(out.dtype.element_ty), mask=mask & (rest < HEAD_DIM))


@triton.jit
def _sum_of_head(first, second, others):
    """[R, 1]: sums over the columns of a head."""
    return (tl.sum(first + second, axis=1) + tl.sum(others, axis=1))[:, None]


@triton.jit
def _normalize(
    first, second, others, eps, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, RMS: tl.constexpr,
    TILE_P: tl.constexpr, TILE_REST: tl.constexpr,
):  # fmt: skip
    """The normalised head and 1 / √(variance + eps)."""
    if not RMS:
        mean = _sum_of_head(first, second, others) / HEAD_DIM
        inside = tl.arange(0, TILE_P)[None, :] < HALF
        first = tl.where(inside, first - mean, 0.0)
        second = tl.where(inside, second - mean, 0.0)
        others = tl.where(2 * HALF + tl.arange(0, TILE_REST)[None, :] < HEAD_DIM, others - mean, 0.0)
    rstd = 1.0 / tl.sqrt(_sum_of_head(first * first, second * second, others * others) / HEAD_DIM + eps)
    return first * rstd, second * rstd, others * rstd, rstd


@triton.jit
def _norm_rows(
    block, x, out, weight, bias, cos_sin, eps,
    T, batch, heads, num_groups, width, group_width,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, RMS: tl.constexpr, HAS_BIAS: tl.constexpr,
    TILE_R: tl.constexpr, TILE_P: tl.constexpr, TILE_REST: tl.constexpr,
):  # fmt: skip
    rows = block * TILE_R + tl.arange(0, TILE_R)[:, None]
    mask = rows < T * num_groups * heads
    token, _, _, source = heads_of_rows(rows, batch, heads, num_groups, batch * width, width, group_width, HEAD_DIM)
    first, second, others = _load_head(x, source, mask, HEAD_DIM, HALF, INTERLEAVED, TILE_P, TILE_REST)
    first, second, others, _ = _normalize(first, second, others, eps, HEAD_DIM, HALF, RMS, TILE_P, TILE_REST)
    zero = tl.zeros([1, 1], tl.int32)
    w1, w2, w3 = _load_head(weight, zero, zero == 0, HEAD_DIM, HALF, INTERLEAVED, TILE_P, TILE_REST)
    first, second, others = first * w1, second * w2, others * w3
    if HAS_BIAS:
        b1, b2, b3 = _load_head(bias, zero, zero == 0, HEAD_DIM, HALF, INTERLEAVED, TILE_P, TILE_REST)
        first, second, others = first + b1, second + b2, others + b3
    if HALF:
        pairs = tl.arange(0, TILE_P)[None, :]
        cos, sin = load_angles(cos_sin, token // batch, pairs, mask & (pairs < HALF), HALF)
        first, second = rotate(first, second, cos, sin)
    target = rows.to(tl.int64) * HEAD_DIM
    _store_head(out, target, mask, first, second, others, HEAD_DIM, HALF, INTERLEAVED, TILE_P, TILE_REST)


@triton.jit
def _norm_rotate(
    y, query, key, query_weight, key_weight, query_bias, key_bias, cos_sin, eps, query_blocks,
    T, batch, heads, num_groups, width, group_width,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, RMS: tl.constexpr, HAS_BIAS: tl.constexpr,
    TILE_R: tl.constexpr, TILE_P: tl.constexpr, TILE_REST: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    if block < query_blocks:
        _norm_rows(
            block, y, query, query_weight, query_bias, cos_sin, eps, T, batch, heads, num_groups, width, group_width,
            HEAD_DIM, HALF, INTERLEAVED, RMS, HAS_BIAS, TILE_R, TILE_P, TILE_REST,
        )  # fmt: skip
    else:
        _norm_rows(
            block - query_blocks, y + heads * HEAD_DIM, key, key_weight, key_bias, cos_sin, eps,
            T, batch, 1, num_groups, width, group_width,
            HEAD_DIM, HALF, INTERLEAVED, RMS, HAS_BIAS, TILE_R, TILE_P, TILE_REST,
        )  # fmt: skip


@triton.jit
def _backward_rows(
    program, num_programs, grad, x, out, weight, cos_sin, grad_weight, grad_bias, eps,
    T, batch, heads, num_groups, grad_s, grad_b, grad_g, width, group_width,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, RMS: tl.constexpr, HAS_BIAS: tl.constexpr,
    TILE_R: tl.constexpr, TILE_P: tl.constexpr, TILE_REST: tl.constexpr,
):  # fmt: skip
    """x and out [T, width] begin at the first head's first column; `grad_weight` and `grad_bias` are the program's."""
    zero = tl.zeros([1, 1], tl.int32)
    w1, w2, w3 = _load_head(weight, zero, zero == 0, HEAD_DIM, HALF, INTERLEAVED, TILE_P, TILE_REST)
    pairs = tl.arange(0, TILE_P)[None, :]
    weight1, weight2 = tl.zeros([TILE_R, TILE_P], tl.float32), tl.zeros([TILE_R, TILE_P], tl.float32)
    bias1, bias2 = tl.zeros([TILE_R, TILE_P], tl.float32), tl.zeros([TILE_R, TILE_P], tl.float32)
    weight3, bias3 = tl.zeros([TILE_R, TILE_REST], tl.float32), tl.zeros([TILE_R, TILE_REST], tl.float32)
    num_rows = T * num_groups * heads
    for start in range(program * TILE_R, num_rows, num_programs * TILE_R):
        rows = start + tl.arange(0, TILE_R)[:, None]
        mask = rows < num_rows
        token, _, _, at = heads_of_rows(rows, batch, heads, num_groups, grad_s, grad_b, grad_g, HEAD_DIM)
        g1, g2, g3 = _load_head(grad, at, mask, HEAD_DIM, HALF, INTERLEAVED, TILE_P, TILE_REST)
        if HALF:
            cos, sin = load_angles(cos_sin, token // batch, pairs, mask & (pairs < HALF), HALF)
            g1, g2 = rotate(g1, g2, cos, -sin)
        _, _, _, place = heads_of_rows(rows, batch, heads, num_groups, batch * width, width, group_width, HEAD_DIM)
        x1, x2, x3 = _load_head(x, place, mask, HEAD_DIM, HALF, INTERLEAVED, TILE_P, TILE_REST)
        x1, x2, x3, rstd = _normalize(x1, x2, x3, eps, HEAD_DIM, HALF, RMS, TILE_P, TILE_REST)
        weight1 += g1 * x1
        weight2 += g2 * x2
        weight3 += g3 * x3
        if HAS_BIAS:
            bias1 += g1
            bias2 += g2
            bias3 += g3
        g1, g2, g3 = g1 * w1, g2 * w2, g3 * w3
        projection = _sum_of_head(g1 * x1, g2 * x2, g3 * x3) / HEAD_DIM
        mean = tl.zeros([TILE_R, 1], tl.float32)
        if not RMS:
            mean = _sum_of_head(g1, g2, g3) / HEAD_DIM
        y1 = (g1 - x1 * projection - mean) * rstd
        y2 = (g2 - x2 * projection - mean) * rstd
        y3 = (g3 - x3 * projection - mean) * rstd
        _store_head(out, place, mask, y1, y2, y3, HEAD_DIM, HALF, INTERLEAVED, TILE_P, TILE_REST)
    one = zero == 0
    _store_head(
        grad_weight, zero, one,
        tl.sum(weight1, axis=0)[None, :], tl.sum(weight2, axis=0)[None, :], tl.sum(weight3, axis=0)[None, :],
        HEAD_DIM, HALF, INTERLEAVED, TILE_P, TILE_REST,
    )  # fmt: skip
    if HAS_BIAS:
        _store_head(
            grad_bias, zero, one,
            tl.sum(bias1, axis=0)[None, :], tl.sum(bias2, axis=0)[None, :], tl.sum(bias3, axis=0)[None, :],
            HEAD_DIM, HALF, INTERLEAVED, TILE_P, TILE_REST,
        )  # fmt: skip


@triton.jit
def _norm_rotate_backward(
    query, key, value, y, out, query_weight, key_weight, cos_sin, sums, eps, programs,
    T, batch, heads, num_groups, width, group_width,
    query_s, query_b, query_g, key_s, key_b, key_g, value_s, value_b, value_g,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, RMS: tl.constexpr, HAS_BIAS: tl.constexpr,
    TILE_R: tl.constexpr, TILE_P: tl.constexpr, TILE_REST: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    """sums FP32 [2 or 4, programs, d]: of the query's weight, the key's weight, the query's bias, the key's bias."""
    program = tl.program_id(0) % programs
    mine = sums + program * HEAD_DIM
    each = programs * HEAD_DIM
    if tl.program_id(0) < programs:
        _backward_rows(
            program, programs, query, y, out, query_weight, cos_sin, mine, mine + 2 * each, eps,
            T, batch, heads, num_groups, query_s, query_b, query_g, width, group_width,
            HEAD_DIM, HALF, INTERLEAVED, RMS, HAS_BIAS, TILE_R, TILE_P, TILE_REST,
        )  # fmt: skip
    elif tl.program_id(0) < 2 * programs:
        first = heads * HEAD_DIM
        _backward_rows(
            program, programs, key, y + first, out + first, key_weight, cos_sin, mine + each, mine + 3 * each, eps,
            T, batch, 1, num_groups, key_s, key_b, key_g, width, group_width,
            HEAD_DIM, HALF, INTERLEAVED, RMS, HAS_BIAS, TILE_R, TILE_P, TILE_REST,
        )  # fmt: skip
    else:
        columns = tl.arange(0, TILE_D)[None, :]
        for start in range(program * TILE_R, T * num_groups, programs * TILE_R):
            rows = start + tl.arange(0, TILE_R)[:, None]
            mask = (rows < T * num_groups) & (columns < HEAD_DIM)
            _, _, _, at = heads_of_rows(rows, batch, 1, num_groups, value_s, value_b, value_g, HEAD_DIM)
            _, _, _, place = heads_of_rows(rows, batch, 1, num_groups, batch * width, width, group_width, HEAD_DIM)
            target = out + (heads + 1) * HEAD_DIM + place + columns
            tl.store(target, tl.load(value + at + columns, mask=mask), mask=mask)


def _tiles(rotation: Rotation) -> tuple[int, int, int]:
    """Rows of a tile, pairs, and columns beside them."""
    half = rotation.cos_sin.shape[2]
    tile_r = max(1, _ELEMENTS // triton.next_power_of_2(rotation.head_dim))
    return tile_r, triton.next_power_of_2(max(1, half)), tile_of_rest(rotation.head_dim, half)


def norm_rotate_qk(y: Tensor, rotation: Rotation, norm: QKNorm, heads_per_group: int) -> tuple[Tensor, Tensor]:
    """`reference.norm_rotate_qk`."""
    cos_sin, head_dim, interleaved = rotation
    T, width = y.shape
    group_width = (heads_per_group + 2) * head_dim
    groups = width // group_width
    query, key = y.new_empty((T, groups * heads_per_group * head_dim)), y.new_empty((T, groups * head_dim))
    tile_r, tile_p, tile_rest = _tiles(rotation)
    query_blocks = cdiv(T * groups * heads_per_group, tile_r)
    query_bias, key_bias = norm.query_bias, norm.key_bias
    has_bias = query_bias is not None
    _norm_rotate[(query_blocks + cdiv(T * groups, tile_r),)](
        y, query, key, norm.query_weight, norm.key_weight,
        query_bias if has_bias else y, key_bias if has_bias else y, cos_sin, norm.eps, query_blocks,
        T, T // cos_sin.shape[0], heads_per_group, groups, width, group_width,
        head_dim, cos_sin.shape[2], interleaved, norm.rms, has_bias, tile_r, tile_p, tile_rest, num_warps=_NUM_WARPS,
        enable_fp_fusion=True,
    )  # fmt: skip
    return query, key


def norm_rotate_qk_backward(
    grads: list[Tensor], y: Tensor, rotation: Rotation, norm: QKNorm
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.norm_rotate_qk_backward`."""
    cos_sin, head_dim, interleaved = rotation
    query, key, value = (dense(grad) for grad in grads)
    T, width = y.shape
    groups, heads = query.shape[2], query.shape[3] // head_dim
    has_bias = norm.query_bias is not None
    tile_r, tile_p, tile_rest = _tiles(rotation)
    programs = min(cdiv(T * groups * heads, tile_r), _BACKWARD_PROGRAMS)
    out = torch.empty_like(y)
    sums = torch.empty((4 if has_bias else 2, programs, head_dim), dtype=torch.float32, device=y.device)
    _norm_rotate_backward[(3 * programs,)](
        query, key, value, y, out, norm.query_weight, norm.key_weight, cos_sin, sums, norm.eps, programs,
        T, T // cos_sin.shape[0], heads, groups, width, (heads + 2) * head_dim,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
        head_dim, cos_sin.shape[2], interleaved, norm.rms, has_bias, tile_r, tile_p, tile_rest,
        triton.next_power_of_2(head_dim), num_warps=_NUM_WARPS,
        enable_fp_fusion=True,
    )  # fmt: skip
    totals = sum_of_programs(sums)
    return out, totals[:2], totals[2:]
