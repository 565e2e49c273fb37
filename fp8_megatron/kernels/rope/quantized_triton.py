"""Query, key and value in E4M3 in Triton: `reference.quantize_rotated_qkv`, one launch.

A program reads some heads of some tokens, so that the tokens' angles stay in registers. Rows of its tile are tokens.
The kernel is compiled without fused multiply-add: results are bitwise those of the specification.
"""

# The parameters of a Triton kernel have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...dtypes import E4M3, MAX_FINITE
from ..quantize.triton import (
    add_cast,
    add_clamped,
    encode,
    larger_magnitude,
    magnitude_bits,
    may_clamp,
    num_clamped,
    quantize_with_scale,
    raise_amax,
    reciprocal,
    recorded,
)
from ..shapes import cdiv
from .reference import QKVCasts, Rotation
from .triton import load_angles, load_pairs, rotate, split_rotated_qkv, store_pairs, tile_of_rest

#: Pairs of columns in a program's tile.
_TILE_PAIRS = 2048
#: Heads that share a program's angles.
_HEADS_A_PROGRAM = 4
_NUM_WARPS = 4
#: FP8 columns that a store writes at least: ptxas 12.8 miscompiles narrower ones.
_STORED_TOGETHER = 4


@triton.jit
def _cast_heads(
    chunk, block, y, out, cos_sin, scale, record,
    T, batch, heads, num_groups, width, group_width, first_column,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, FP_MAX: tl.constexpr, RECORD: tl.constexpr,
    HEADS: tl.constexpr, TILE_M: tl.constexpr, TILE_P: tl.constexpr, TILE_REST: tl.constexpr,
):  # fmt: skip
    """Heads [chunk · HEADS, + HEADS) of num_groups · heads, in tokens [block · TILE_M, + TILE_M).

    Head h of a group begins at column group · group_width + first_column + h · HEAD_DIM of y [T, width].
    """
    inverse = reciprocal(tl.load(scale))
    dtype: tl.constexpr = out.dtype.element_ty
    tokens = block * TILE_M + tl.arange(0, TILE_M)[:, None]
    mask = tokens < T
    source, target = tokens.to(tl.int64) * width, tokens.to(tl.int64) * (num_groups * heads * HEAD_DIM)
    rest = 2 * HALF + tl.arange(0, TILE_REST)[None, :]
    largest = tl.zeros([TILE_M, TILE_P], tl.float32)
    largest_of_rest = tl.zeros([TILE_M, TILE_REST], tl.float32)
    end = tl.minimum((chunk + 1) * HEADS, num_groups * heads)
    pairs = tl.arange(0, TILE_P)[None, :]
    cos, sin = load_angles(cos_sin, tokens // batch, pairs, mask & (pairs < HALF), HALF)
    for index in range(chunk * HEADS, end):
        column = index // heads * group_width + first_column + index % heads * HEAD_DIM
        if HALF:
            first, second = load_pairs(y, source + column, mask, HALF, INTERLEAVED, TILE_P)
            first, second = rotate(first, second, cos, sin)
            if RECORD:
                largest = larger_magnitude(larger_magnitude(largest, first), second)
            first, second = encode(first, inverse, FP_MAX, dtype), encode(second, inverse, FP_MAX, dtype)
            store_pairs(out, target + index * HEAD_DIM, mask, first, second, HALF, INTERLEAVED, TILE_P)
        if 2 * HALF < HEAD_DIM:
            inside = mask & (rest < HEAD_DIM)
            value = tl.load(y + source + column + rest, mask=inside, other=0.0).to(tl.float32)
            if RECORD:
                largest_of_rest = larger_magnitude(largest_of_rest, value)
            tl.store(out + target + index * HEAD_DIM + rest, encode(value, inverse, FP_MAX, dtype), mask=inside)
    if RECORD:
        bits = tl.maximum(tl.max(magnitude_bits(largest)), tl.max(magnitude_bits(largest_of_rest)))
        raise_amax(record, bits)
        if RECORD > 1:
            if may_clamp(bits, inverse, FP_MAX):  # read again: healthy tiles keep no values for this
                count = tl.zeros([1], tl.int32)
                for index in range(chunk * HEADS, end):
                    column = index // heads * group_width + first_column + index % heads * HEAD_DIM
                    if HALF:
                        first, second = load_pairs(y, source + column, mask, HALF, INTERLEAVED, TILE_P)
                        first, second = rotate(first, second, cos, sin)
                        count += num_clamped(first, inverse, FP_MAX) + num_clamped(second, inverse, FP_MAX)
                    if 2 * HALF < HEAD_DIM:
                        inside = mask & (rest < HEAD_DIM)
                        value = tl.load(y + source + column + rest, mask=inside, other=0.0)
                        count += num_clamped(value, inverse, FP_MAX)
                add_clamped(record, tl.sum(count))
            if (chunk == 0) & (block == 0):
                add_cast(record, T, num_groups * heads * HEAD_DIM)


@triton.jit
def _quantize_rotated_heads(
    y, query, key, value, cos_sin,
    scale_query, scale_key, scale_value, record_query, record_key, record_value,
    query_chunks, key_chunks, T, batch, heads, num_groups, width, group_width,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, FP_MAX: tl.constexpr, RECORD: tl.constexpr,
    HEADS: tl.constexpr, TILE_M: tl.constexpr, TILE_P: tl.constexpr, TILE_REST: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    chunk, block = tl.program_id(0), tl.program_id(1)
    if chunk < query_chunks:
        _cast_heads(
            chunk, block, y, query, cos_sin, scale_query, record_query,
            T, batch, heads, num_groups, width, group_width, 0,
            HEAD_DIM, HALF, INTERLEAVED, FP_MAX, RECORD, HEADS, TILE_M, TILE_P, TILE_REST,
        )  # fmt: skip
    elif chunk < query_chunks + key_chunks:
        _cast_heads(
            chunk - query_chunks, block, y, key, cos_sin, scale_key, record_key,
            T, batch, 1, num_groups, width, group_width, heads * HEAD_DIM,
            HEAD_DIM, HALF, INTERLEAVED, FP_MAX, RECORD, HEADS, TILE_M, TILE_P, TILE_REST,
        )  # fmt: skip
    else:
        _cast_heads(
            chunk - query_chunks - key_chunks, block, y, value, cos_sin, scale_value, record_value,
            T, batch, 1, num_groups, width, group_width, (heads + 1) * HEAD_DIM,
            HEAD_DIM, 0, INTERLEAVED, FP_MAX, RECORD, HEADS, TILE_M, 1, TILE_D,
        )  # fmt: skip


def quantize_rotated_qkv(
    y: Tensor, rotation: Rotation, casts: QKVCasts, heads_per_group: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.quantize_rotated_qkv`. If other than multiples of 4 columns turn together, the rotated parts are
    written in FP32 in between."""
    cos_sin, head_dim, interleaved = rotation
    half = cos_sin.shape[2]
    together = 2 * half if interleaved else half
    if together % _STORED_TOGETHER or head_dim % _STORED_TOGETHER:
        return _cast_parts(split_rotated_qkv(y.float(), rotation, heads_per_group), casts)
    T, width = y.shape
    group_width = (heads_per_group + 2) * head_dim
    groups = width // group_width
    query = torch.empty((T, groups * heads_per_group * head_dim), dtype=E4M3, device=y.device)
    key, value = (torch.empty((T, groups * head_dim), dtype=E4M3, device=y.device) for _ in range(2))
    tile_p = triton.next_power_of_2(max(1, half))
    tile_d = triton.next_power_of_2(head_dim)
    tile_m = max(1, 2 * _TILE_PAIRS // tile_d)
    query_chunks, key_chunks = cdiv(groups * heads_per_group, _HEADS_A_PROGRAM), cdiv(groups, _HEADS_A_PROGRAM)
    records = [cast.scale if cast.record is None else cast.record for cast in casts]
    _quantize_rotated_heads[(query_chunks + 2 * key_chunks, cdiv(T, tile_m))](
        y, query, key, value, cos_sin, *(cast.scale for cast in casts), *records, query_chunks, key_chunks,
        T, T // cos_sin.shape[0], heads_per_group, groups, width, group_width,
        head_dim, half, interleaved, MAX_FINITE[E4M3], recorded(casts.query.record),
        _HEADS_A_PROGRAM, tile_m, tile_p, tile_of_rest(head_dim, half), tile_d,
        num_warps=_NUM_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return query, key, value


def _cast_parts(parts: tuple[Tensor, Tensor, Tensor], casts: QKVCasts) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (
        quantize_with_scale(part, cast.scale, E4M3, True, False, cast.record)[0]
        for part, cast in zip(parts, casts, strict=True)
    )
    return query, key, value
