"""RoPE in Triton: `reference.rotate_qk_`, `split_rotated_qkv` and `unrotate_qkv_grad`, one launch each.

A program rotates some heads of some tokens. A row of its tile is one head of one token. Kernels are compiled without
fused multiply-add, so that results are bitwise those of the specification.
"""

# The parameters of a Triton kernel have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..quantize.grad_output_triton import dense
from ..shapes import cdiv
from .reference import Rotation

#: Pairs of columns in a program's tile.
_TILE_PAIRS = 2048
_NUM_WARPS = 4


@triton.jit
def load_angles(cos_sin, index, pairs, mask, HALF: tl.constexpr):
    """Cosine and sine of the pairs at a sequence index."""
    at = cos_sin + index * (2 * HALF) + pairs
    return tl.load(at, mask=mask, other=1.0), tl.load(at + HALF, mask=mask, other=0.0)


@triton.jit
def rotate(first, second, cos, sin):
    """FP32 pairs, rotated; with −sin rotated back."""
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def load_pairs(x, rows, mask, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, TILE_P: tl.constexpr):
    """The pairs of the heads that begin at x + rows [R, 1], two FP32 [R, TILE_P]; `mask` [R, 1] of the rows."""
    if INTERLEAVED:
        columns = tl.arange(0, 2 * TILE_P)[None, :]
        both = tl.load(x + rows + columns, mask=mask & (columns < 2 * HALF), other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(both, (both.shape[0], TILE_P, 2)))
    else:
        pairs = tl.arange(0, TILE_P)[None, :]
        inside = mask & (pairs < HALF)
        first = tl.load(x + rows + pairs, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(x + rows + HALF + pairs, mask=inside, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def store_pairs(out, rows, mask, first, second, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, TILE_P: tl.constexpr):
    dtype: tl.constexpr = out.dtype.element_ty
    if INTERLEAVED:
        columns = tl.arange(0, 2 * TILE_P)[None, :]
        both = tl.reshape(tl.join(first.to(dtype), second.to(dtype)), (first.shape[0], 2 * TILE_P))
        tl.store(out + rows + columns, both, mask=mask & (columns < 2 * HALF))
    else:
        pairs = tl.arange(0, TILE_P)[None, :]
        inside = mask & (pairs < HALF)
        tl.store(out + rows + pairs, first.to(dtype), mask=inside)
        tl.store(out + rows + HALF + pairs, second.to(dtype), mask=inside)


@triton.jit
def heads_of_rows(
    rows, batch, heads, num_groups, stride_s, stride_b, stride_g,
    HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Of rows that count heads fastest, then groups, then tokens: token, group, head, and the element it begins at."""
    head = rows % heads
    group = rows // heads % num_groups
    token = rows // heads // num_groups
    begin = (token // batch).to(tl.int64) * stride_s + (token % batch).to(tl.int64) * stride_b
    return token, group, head, begin + group.to(tl.int64) * stride_g + head * HEAD_DIM


@triton.jit
def _rotate_rows(
    block, x, out, cos_sin,
    T, batch, heads, num_groups, stride_s, stride_b, stride_g, group_width, first_column, out_width,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr,
    COPIES_REST: tl.constexpr, TILE_R: tl.constexpr, TILE_P: tl.constexpr, TILE_REST: tl.constexpr,
):  # fmt: skip
    """Rows [block · TILE_R, + TILE_R) of x [s, b, groups, heads · d], in the columns [group · group_width +
    first_column, + heads · d) of `out` [T, out_width]. HALF = 0 copies them."""
    rows = block * TILE_R + tl.arange(0, TILE_R)[:, None]
    mask = rows < T * num_groups * heads
    token, group, head, source = heads_of_rows(rows, batch, heads, num_groups, stride_s, stride_b, stride_g, HEAD_DIM)
    target = token.to(tl.int64) * out_width + group * group_width + first_column + head * HEAD_DIM
    if HALF:
        pairs = tl.arange(0, TILE_P)[None, :]
        cos, sin = load_angles(cos_sin, token // batch, pairs, mask & (pairs < HALF), HALF)
        if INVERSE:
            sin = -sin
        first, second = load_pairs(x, source, mask, HALF, INTERLEAVED, TILE_P)
        first, second = rotate(first, second, cos, sin)
        store_pairs(out, target, mask, first, second, HALF, INTERLEAVED, TILE_P)
    if COPIES_REST:
        rest = 2 * HALF + tl.arange(0, TILE_REST)[None, :]
        inside = mask & (rest < HEAD_DIM)
        tl.store(out + target + rest, tl.load(x + source + rest, mask=inside), mask=inside)


@triton.jit
def _rotate_in_place(
    y, cos_sin, T, batch, heads, num_groups, width, group_width,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, TILE_R: tl.constexpr, TILE_P: tl.constexpr,
):  # fmt: skip
    _rotate_rows(
        tl.program_id(0), y, y, cos_sin,
        T, batch, heads, num_groups, batch * width, width, group_width, group_width, 0, width,
        HEAD_DIM, HALF, INTERLEAVED, False, False, TILE_R, TILE_P, TILE_P,
    )  # fmt: skip


@triton.jit
def _rotate_and_split(
    y, query, key, value, cos_sin, query_blocks, key_blocks, T, batch, heads, num_groups, width, group_width,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    TILE_R: tl.constexpr, TILE_P: tl.constexpr, TILE_REST: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    RESTS: tl.constexpr = 2 * HALF < HEAD_DIM
    single = num_groups * HEAD_DIM
    if block < query_blocks:
        _rotate_rows(
            block, y, query, cos_sin,
            T, batch, heads, num_groups, batch * width, width, group_width, heads * HEAD_DIM, 0, heads * single,
            HEAD_DIM, HALF, INTERLEAVED, False, RESTS, TILE_R, TILE_P, TILE_REST,
        )  # fmt: skip
    elif block < query_blocks + key_blocks:
        _rotate_rows(
            block - query_blocks, y + heads * HEAD_DIM, key, cos_sin,
            T, batch, 1, num_groups, batch * width, width, group_width, HEAD_DIM, 0, single,
            HEAD_DIM, HALF, INTERLEAVED, False, RESTS, TILE_R, TILE_P, TILE_REST,
        )  # fmt: skip
    else:
        _rotate_rows(
            block - query_blocks - key_blocks, y + (heads + 1) * HEAD_DIM, value, cos_sin,
            T, batch, 1, num_groups, batch * width, width, group_width, HEAD_DIM, 0, single,
            HEAD_DIM, 0, INTERLEAVED, False, True, TILE_R, TILE_P, TILE_D,
        )  # fmt: skip


@triton.jit
def _unrotate_and_join(
    query, key, value, out, cos_sin, query_blocks, key_blocks,
    T, batch, heads, num_groups, out_width, group_width,
    query_s, query_b, query_g, key_s, key_b, key_g, value_s, value_b, value_g,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    TILE_R: tl.constexpr, TILE_P: tl.constexpr, TILE_REST: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    RESTS: tl.constexpr = 2 * HALF < HEAD_DIM
    if block < query_blocks:
        _rotate_rows(
            block, query, out, cos_sin,
            T, batch, heads, num_groups, query_s, query_b, query_g, group_width, 0, out_width,
            HEAD_DIM, HALF, INTERLEAVED, True, RESTS, TILE_R, TILE_P, TILE_REST,
        )  # fmt: skip
    elif block < query_blocks + key_blocks:
        _rotate_rows(
            block - query_blocks, key, out, cos_sin,
            T, batch, 1, num_groups, key_s, key_b, key_g, group_width, heads * HEAD_DIM, out_width,
            HEAD_DIM, HALF, INTERLEAVED, True, RESTS, TILE_R, TILE_P, TILE_REST,
        )  # fmt: skip
    else:
        _rotate_rows(
            block - query_blocks - key_blocks, value, out, cos_sin,
            T, batch, 1, num_groups, value_s, value_b, value_g, group_width, (heads + 1) * HEAD_DIM, out_width,
            HEAD_DIM, 0, INTERLEAVED, True, True, TILE_R, TILE_P, TILE_D,
        )  # fmt: skip


def tile_of(rotation: Rotation) -> tuple[int, int]:
    """Rows (heads of tokens) and pairs of a program's tile. Without angles, the rows are those of whole heads."""
    tile_p = triton.next_power_of_2(rotation.cos_sin.shape[2] or rotation.head_dim // 2)
    return max(1, _TILE_PAIRS // tile_p), tile_p


def rotate_qk_(y: Tensor, rotation: Rotation, heads_per_group: int) -> None:
    """`reference.rotate_qk_`."""
    cos_sin, head_dim, interleaved = rotation
    T, width = y.shape
    group_width = (heads_per_group + 2) * head_dim
    groups, heads = width // group_width, heads_per_group + 1
    tile_r, tile_p = tile_of(rotation)
    _rotate_in_place[(cdiv(T * groups * heads, tile_r),)](
        y, cos_sin, T, T // cos_sin.shape[0], heads, groups, width, group_width,
        head_dim, cos_sin.shape[2], interleaved, tile_r, tile_p, num_warps=_NUM_WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def split_rotated_qkv(y: Tensor, rotation: Rotation, heads_per_group: int) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.split_rotated_qkv`."""
    cos_sin, head_dim, interleaved = rotation
    T, width = y.shape
    group_width = (heads_per_group + 2) * head_dim
    groups, half = width // group_width, cos_sin.shape[2]
    query = y.new_empty((T, groups * heads_per_group * head_dim))
    key, value = y.new_empty((T, groups * head_dim)), y.new_empty((T, groups * head_dim))
    tile_r, tile_p = tile_of(rotation)
    query_blocks, key_blocks = cdiv(T * groups * heads_per_group, tile_r), cdiv(T * groups, tile_r)
    _rotate_and_split[(query_blocks + 2 * key_blocks,)](
        y, query, key, value, cos_sin, query_blocks, key_blocks,
        T, T // cos_sin.shape[0], heads_per_group, groups, width, group_width,
        head_dim, half, interleaved, tile_r, tile_p, tile_of_rest(head_dim, half), triton.next_power_of_2(head_dim),
        num_warps=_NUM_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return query, key, value


def tile_of_rest(head_dim: int, half: int) -> int:
    """Columns of a tile of what is not rotated."""
    tile: int = triton.next_power_of_2(max(1, head_dim - 2 * half))
    return tile


def unrotate_qkv_grad(grads: list[Tensor], rotation: Rotation) -> Tensor:
    """`reference.unrotate_qkv_grad`."""
    return join_rotated_back(grads, rotation, grads[0].dtype)


def join_rotated_back(grads: list[Tensor], rotation: Rotation, dtype: torch.dtype) -> Tensor:
    """`unrotate_qkv_grad` in `dtype`."""
    cos_sin, head_dim, interleaved = rotation
    query, key, value = (dense(grad) for grad in grads)
    seq, batch, groups, query_width = query.shape
    T, heads = seq * batch, query_width // head_dim
    group_width = query_width + 2 * head_dim
    out = query.new_empty((T, groups * group_width), dtype=dtype)
    half = cos_sin.shape[2]
    tile_r, tile_p = tile_of(rotation)
    query_blocks, key_blocks = cdiv(T * groups * heads, tile_r), cdiv(T * groups, tile_r)
    _unrotate_and_join[(query_blocks + 2 * key_blocks,)](
        query, key, value, out, cos_sin, query_blocks, key_blocks,
        T, batch, heads, groups, out.shape[1], group_width,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
        head_dim, half, interleaved, tile_r, tile_p, tile_of_rest(head_dim, half), triton.next_power_of_2(head_dim),
        num_warps=_NUM_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return out
