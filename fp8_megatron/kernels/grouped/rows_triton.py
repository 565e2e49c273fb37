"""Rows grouped by expert in Triton: every result has the specification's bits, and no launch waits for the host.

Bytes: `routed_rows` reads the map twice. `gather_rows` reads a row of x once for each of its rows, mostly from L2,
whether it writes one layout or both; so does `gather_blocks`, with 4/128 bytes an element more each way. `sum_rows`
reads each row once.
"""

# The parameters of a Triton kernel have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...dtypes import GEMM_BLOCK, GROUP_ROWS, MAX_FINITE
from ..launch import MOST_SHAPES, PreparedLaunch
from ..quantize.blocks import block_scales_shape
from ..quantize.blocks_triton import cast_transposed
from ..quantize.triton import TILE_K, TILE_M, no_values, store_transposed
from ..shapes import cdiv, empty, empty_vector, next_power_of_2

# Tokens of a program, and elements of the map that it holds at once.
_TOKENS, _MAP_TILE = 128, 4096
# int32 that a program sets to -1 at once.
_FILL = 1024
# A row without its transpose moves in int32 words: rows and words of a tile.
_GATHER_ROWS, _GATHER_WORDS = 8, 512
# Tokens and columns of a tile of the sum.
_SUM_TOKENS, _SUM_COLUMNS = 2, 1024
_NUM_WARPS, _TRANSPOSING_WARPS, _ROUTING_WARPS = 4, 8, 8


@triton.jit
def _chosen(routing_map, tokens, experts, T, E):
    """A tile of the map, int32."""
    return tl.load(routing_map + tokens * E + experts, mask=(tokens < T) & (experts < E), other=0).to(tl.int32)


@triton.jit
def _fill(x, n, SIZE: tl.constexpr):
    """-1 everywhere in x [n], by all programs together."""
    for start in range(tl.program_id(0) * SIZE, n, tl.num_programs(0) * SIZE):
        places = start + tl.arange(0, SIZE)
        tl.store(x + places, tl.full([SIZE], -1, tl.int32), mask=places < n)


@triton.jit
def _count_rows(
    routing_map, counts, source, rows, T, E, R, num_places,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr, STEP: tl.constexpr, FILL: tl.constexpr,
):  # fmt: skip
    """counts int32 [programs, EXPERTS], of a program's tokens; source [R] and rows [num_places] become -1."""
    experts = tl.arange(0, EXPERTS)
    count = tl.zeros([EXPERTS], tl.int32)
    for start in range(0, TOKENS, STEP):
        tokens = tl.program_id(0) * TOKENS + start + tl.arange(0, STEP)
        count += tl.sum(_chosen(routing_map, tokens[:, None], experts[None, :], T, E), axis=0)
    tl.store(counts + tl.program_id(0) * EXPERTS + experts, count)
    _fill(source, R, FILL)
    _fill(rows, num_places, FILL)


@triton.jit
def _place_rows(
    routing_map, counts, offsets, source, rows, T, E, R, num_blocks,
    TOP_K: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """After `_count_rows`, with the same programs: each sums the counts of all, and places the rows of its tokens."""
    block = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    before = tl.zeros([EXPERTS], tl.int32)
    total = tl.zeros([EXPERTS], tl.int32)
    for start in range(0, num_blocks, STEP):
        blocks = start + tl.arange(0, STEP)[:, None]
        count = tl.load(counts + blocks * EXPERTS + experts[None, :], mask=blocks < num_blocks, other=0)
        total += tl.sum(count, axis=0)
        before += tl.sum(tl.where(blocks < block, count, 0), axis=0)
    sizes = (total + (GROUP - 1)) // GROUP * GROUP
    ends = tl.cumsum(sizes, axis=0)
    if block == 0:
        tl.store(offsets, 0)
        tl.store(offsets + 1 + experts, ends, mask=experts < E)
    first = ends - sizes + before
    for start in range(0, TOKENS, STEP):
        tokens = block * TOKENS + start + tl.arange(0, STEP)[:, None]
        chosen = _chosen(routing_map, tokens, experts[None, :], T, E)
        row = first[None, :] + tl.cumsum(chosen, axis=0) - chosen
        place = tl.cumsum(chosen, axis=1) - chosen
        is_row = (chosen > 0) & (row < R) & (place < TOP_K)
        tl.store(source + row, tokens * E + experts[None, :], mask=is_row)
        tl.store(rows + tokens * TOP_K + place, row, mask=is_row)
        first += tl.sum(chosen, axis=0)


@triton.jit
def _gather_words(x, source, offsets, out, words, E, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """A tile of x [T, words] → out [R, words], int32."""
    tiles = tl.cdiv(words, WORDS)
    first_row = tl.program_id(0) // tiles * ROWS
    if first_row < tl.load(offsets + E):
        rows = first_row + tl.arange(0, ROWS)[:, None]
        columns = tl.program_id(0) % tiles * WORDS + tl.arange(0, WORDS)[None, :]
        origin = tl.load(source + rows)
        token = (origin // E).to(tl.int64)
        value = tl.load(x + token * words + columns, mask=(origin >= 0) & (columns < words), other=0)
        tl.store(out + rows.to(tl.int64) * words + columns, value, mask=columns < words)


@triton.jit
def _row_of_tokens(x, source, rows, columns, H, E):
    origin = tl.load(source + rows)
    return tl.load(x + (origin // E).to(tl.int64) * H + columns, mask=(origin >= 0) & (columns < H), other=0)


@triton.jit
def _gather_tiles(
    x, source, offsets, payload, payload_t, R, H, E, ROWWISE: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr
):
    """A tile of x [T, H] → payload_t [H, R] and, with `ROWWISE`, payload [R, H], all as bytes."""
    tiles_k = tl.cdiv(H, TILE_K)
    m0 = tl.program_id(0) // tiles_k * TILE_M
    if m0 < tl.load(offsets + E):
        k0 = tl.program_id(0) % tiles_k * TILE_K
        rows = m0 + 4 * tl.arange(0, TILE_M // 4)[:, None]
        columns = k0 + tl.arange(0, TILE_K)[None, :]
        q0 = _row_of_tokens(x, source, rows, columns, H, E)
        q1 = _row_of_tokens(x, source, rows + 1, columns, H, E)
        q2 = _row_of_tokens(x, source, rows + 2, columns, H, E)
        q3 = _row_of_tokens(x, source, rows + 3, columns, H, E)
        if ROWWISE:
            target = payload + rows.to(tl.int64) * H + columns
            mask = columns < H
            tl.store(target, q0, mask=mask)
            tl.store(target + H, q1, mask=mask)
            tl.store(target + 2 * H, q2, mask=mask)
            tl.store(target + 3 * H, q3, mask=mask)
        store_transposed(q0, q1, q2, q3, payload_t, m0, k0, R, H, TILE_M, TILE_K)


@triton.jit
def _row_with_scale(x, scales, source, rows, columns, E, stride, scale_stride):
    """Elements of a row's block in FP8, and the block's scale; 0 and 1 where a row has no token."""
    origin = tl.load(source + rows)
    token = (origin // E).to(tl.int64)
    value = tl.load(x + token * stride + columns, mask=(origin >= 0) & (columns >= 0), other=0.0)
    return value, tl.load(scales + token * scale_stride, mask=origin >= 0, other=1.0)


@triton.jit
def _gather_blocks(
    x, scales, source, offsets, payload, own_scales, payload_t, scales_t, R, H, E, stride, block_stride, scale_stride,
    FP_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, ROWWISE: tl.constexpr, TRANSPOSED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile of BLOCK rows and columns of x [T, H] → payload [R, H] with own_scales [H / BLOCK, R], payload_t [H, R]
    with scales_t [R / BLOCK, H].

    Rows of x are `stride` apart, scales of neighbouring rows `scale_stride`, of neighbouring blocks `block_stride`.
    """
    blocks = H // BLOCK
    tile, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    if tile * BLOCK < tl.load(offsets + E):
        rows = tile * BLOCK + 4 * tl.arange(0, BLOCK // 4)[:, None]
        columns = block * BLOCK + tl.arange(0, BLOCK)[None, :]
        scales += block * block_stride
        q0, s0 = _row_with_scale(x, scales, source, rows, columns, E, stride, scale_stride)
        q1, s1 = _row_with_scale(x, scales, source, rows + 1, columns, E, stride, scale_stride)
        q2, s2 = _row_with_scale(x, scales, source, rows + 2, columns, E, stride, scale_stride)
        q3, s3 = _row_with_scale(x, scales, source, rows + 3, columns, E, stride, scale_stride)
        if ROWWISE:
            target = payload + rows.to(tl.int64) * H + columns
            tl.store(target, q0)
            tl.store(target + H, q1)
            tl.store(target + 2 * H, q2)
            tl.store(target + 3 * H, q3)
            places = own_scales + block.to(tl.int64) * R + rows
            tl.store(places, s0)
            tl.store(places + 1, s1)
            tl.store(places + 2, s2)
            tl.store(places + 3, s3)
        if TRANSPOSED:
            cast_transposed(
                q0.to(tl.float32) * s0, q1.to(tl.float32) * s1, q2.to(tl.float32) * s2, q3.to(tl.float32) * s3,
                payload_t, scales_t, R, H, tile, block * BLOCK, FP_MAX, POWER_OF_TWO, True, BLOCK, BLOCK,
            )  # fmt: skip


@triton.jit
def _sum_token_rows(y, rows, out, T, H, TOP_K: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile of out [T, H]."""
    tiles = tl.cdiv(H, COLUMNS)
    tokens = tl.program_id(0) // tiles * TOKENS + tl.arange(0, TOKENS)[:, None]
    columns = tl.program_id(0) % tiles * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (tokens < T) & (columns < H)
    total = tl.zeros([TOKENS, COLUMNS], tl.float32)
    for choice in tl.static_range(TOP_K):
        row = tl.load(rows + tokens * TOP_K + choice, mask=tokens < T, other=-1)
        total += tl.load(y + row.to(tl.int64) * H + columns, mask=inside & (row >= 0), other=0.0).to(tl.float32)
    tl.store(out + tokens.to(tl.int64) * H + columns, total.to(out.dtype.element_ty), mask=inside)


def routed_rows(routing_map: Tensor, num_rows: int, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """`rows_reference.routed_rows` in two launches: counts of blocks of tokens, then the places."""
    num_tokens, num_experts = routing_map.shape
    device = routing_map.device
    offsets = empty_vector(num_experts + 1, torch.int32, device)
    source = empty_vector(num_rows, torch.int32, device)
    rows = empty(num_tokens, top_k, torch.int32, device)
    size, count, place = _routing_launches(num_tokens, num_experts, num_rows, top_k)
    counts = empty_vector(size, torch.int32, device)
    codes = routing_map.contiguous().view(torch.uint8)
    count(codes, counts, source, rows)
    place(codes, counts, offsets, source, rows)
    return offsets, source, rows


@lru_cache(maxsize=MOST_SHAPES)
def _routing_launches(T: int, E: int, R: int, top_k: int) -> tuple[int, PreparedLaunch, PreparedLaunch]:
    """The size of the counts, and the launches."""
    blocks = cdiv(T, _TOKENS)
    experts = max(next_power_of_2(E), 8)
    tiles = (_TOKENS, experts, max(min(_MAP_TILE // experts, _TOKENS), 1))
    counting, placing = (T, E, R, T * top_k, *tiles, _FILL), (T, E, R, blocks, top_k, *tiles, GROUP_ROWS)
    count = PreparedLaunch(_count_rows, (blocks,), *counting, num_warps=_ROUTING_WARPS, enable_fp_fusion=True)
    place = PreparedLaunch(_place_rows, (blocks,), *placing, num_warps=_ROUTING_WARPS, enable_fp_fusion=True)
    return blocks * experts, count, place


def gather_rows(
    x: Tensor, source: Tensor, num_experts: int, offsets: Tensor, rowwise: bool, transposed: bool
) -> tuple[Tensor, Tensor]:
    """`rows_reference.gather_rows` in one launch.

    Raises:
        ValueError: neither layout requested.
    """
    (_, H), R, device = x.shape, len(source), x.device
    payload = empty(R, H, x.dtype, device) if rowwise else no_values(x.dtype, device)
    payload_t = empty(H, R, x.dtype, device) if transposed else no_values(x.dtype, device)
    x = x.contiguous()
    if transposed:
        launch = _gather_launch(R, H, num_experts, rowwise)
        launch(x.view(torch.uint8), source, offsets, payload.view(torch.uint8), payload_t.view(torch.uint8))
    elif rowwise:
        words = H * x.itemsize // 4
        _words_launch(R, words, num_experts)(x.view(torch.int32), source, offsets, payload.view(torch.int32))
    else:
        raise ValueError("rows into no layout: set rowwise, transposed or both")
    return payload, payload_t


@lru_cache(maxsize=MOST_SHAPES)
def _gather_launch(R: int, H: int, num_experts: int, rowwise: bool) -> PreparedLaunch:
    grid = (cdiv(R, TILE_M) * cdiv(H, TILE_K),)
    numbers = (R, H, num_experts, rowwise, TILE_M, TILE_K)
    return PreparedLaunch(_gather_tiles, grid, *numbers, num_warps=_TRANSPOSING_WARPS, enable_fp_fusion=True)


@lru_cache(maxsize=MOST_SHAPES)
def _words_launch(R: int, words: int, num_experts: int) -> PreparedLaunch:
    grid = (cdiv(R, _GATHER_ROWS) * cdiv(words, _GATHER_WORDS),)
    numbers = (words, num_experts, _GATHER_ROWS, _GATHER_WORDS)
    return PreparedLaunch(_gather_words, grid, *numbers, num_warps=_NUM_WARPS, enable_fp_fusion=True)


def gather_blocks(
    x: Tensor,
    scales: Tensor,
    source: Tensor,
    num_experts: int,
    offsets: Tensor,
    rowwise: bool,
    transposed: bool,
    power_of_two: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`rows_reference.gather_blocks` in one launch."""
    (_, H), R, device = x.shape, len(source), x.device
    no_payload, no_scales = no_values(x.dtype, device), no_values(torch.float32, device)
    payload, own_scales, payload_t, scales_t = no_payload, no_scales, no_payload, no_scales
    if rowwise:
        payload = empty(R, H, x.dtype, device)
        own_scales = empty(*block_scales_shape(R, H), torch.float32, device)
    if transposed:
        payload_t = empty(H, R, x.dtype, device)
        scales_t = empty(*block_scales_shape(H, R), torch.float32, device)
    numbers = (R, H, num_experts, x.stride(0), *scales.stride(), MAX_FINITE[x.dtype])
    launch = _gather_blocks_launch(*numbers, power_of_two, rowwise, transposed)
    launch(x, scales, source, offsets, payload, own_scales, payload_t, scales_t)
    return payload, own_scales, payload_t, scales_t


@lru_cache(maxsize=MOST_SHAPES)
def _gather_blocks_launch(R: int, H: int, *numbers: float) -> PreparedLaunch:
    grid = (R // GEMM_BLOCK * (H // GEMM_BLOCK),)
    call = (R, H, *numbers, GEMM_BLOCK)
    return PreparedLaunch(_gather_blocks, grid, *call, num_warps=_TRANSPOSING_WARPS, enable_fp_fusion=True)


def sum_rows(y: Tensor, rows: Tensor) -> Tensor:
    """`rows_reference.sum_rows` in one launch."""
    (T, top_k), H = rows.shape, y.shape[1]
    out = empty(T, H, y.dtype, y.device)
    _sum_launch(T, H, top_k)(y.contiguous(), rows.contiguous(), out)
    return out


@lru_cache(maxsize=MOST_SHAPES)
def _sum_launch(T: int, H: int, top_k: int) -> PreparedLaunch:
    grid = (cdiv(T, _SUM_TOKENS) * cdiv(H, _SUM_COLUMNS),)
    numbers = (T, H, top_k, _SUM_TOKENS, _SUM_COLUMNS)
    return PreparedLaunch(_sum_token_rows, grid, *numbers, num_warps=_NUM_WARPS, enable_fp_fusion=True)
