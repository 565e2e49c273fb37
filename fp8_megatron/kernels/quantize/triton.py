"""Tensorwise FP8 quantisation in Triton: `reference.amax`, `quantize_current`, `quantize_with_scale` and `transpose`.

Every result is bitwise equal to the reference's (computed on a CPU, where a division by a constant is a division). The
amax is a maximum over integers, so the order of reduction does not matter. Scale and reciprocal are IEEE divisions, and
the product is one FP32 multiplication.

Each launch reads a tensor once and writes both layouts from the same registers. Four rows of a tile are loaded
separately, so that the bytes of one column are packed into 32-bit words before the tile is transposed through shared
memory. This takes a quarter of the shared-memory accesses of a bytewise transposition.
"""

# The parameters of a Triton kernel have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import cache, lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...dtypes import CLAMPED_ABOVE, E4M3, E5M2, MAX_FINITE
from ..launch import MOST_SHAPES, PreparedLaunch
from ..shapes import cdiv, empty, empty_vector

# Programs of the amax pass. They are few enough that each program of the cast can reduce all of their results again
# (4 KiB from L2), which saves a third launch. 1024 programs of 256 threads are one wave on 132 multiprocessors.
MAX_PARTIALS = 1024
_AMAX_TILE = 8192
_CAST_TILE = 8192
TILE_M = 128
TILE_K = 128
_NUM_WARPS = 8
_SUM_ROWS_AT_ONCE = 32
SUM_COLUMNS = 32

_SMALLEST_NORMAL = tl.constexpr(1.1754943508222875e-38)
_INF_BITS = tl.constexpr(0x7F800000)
_E4M3_MAX = tl.constexpr(MAX_FINITE[E4M3])
_E4M3_CLAMPED_ABOVE = tl.constexpr(CLAMPED_ABOVE[E4M3])
_E5M2_CLAMPED_ABOVE = tl.constexpr(CLAMPED_ABOVE[E5M2])


@triton.jit
def magnitude_bits(x):
    """|x| as the int32 bits of its FP32 value: ordered as magnitudes are, and a NaN above inf."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def load_inside(pointers, mask, EVEN: tl.constexpr):
    """Load the elements that lie inside, and 0 outside `mask`. With `EVEN` all lie inside, and no mask is needed."""
    if EVEN:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def larger_magnitude(largest, x):
    """max(largest, |x|) in FP32, a NaN kept: one instruction an element."""
    return tl.maximum(largest, tl.abs(x.to(tl.float32)), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def scale_from_amax_bits(bits, FP_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """`reference.scale_from_amax` of an amax given as `magnitude_bits`."""
    return _scale_of(bits, tl.div_rn(bits.to(tl.float32, bitcast=True), FP_MAX), POWER_OF_TWO)


@triton.jit
def _scale_of(bits, quotient, POWER_OF_TWO: tl.constexpr):
    """The scale, from the amax's bits and the amax divided by the format's largest number."""
    scale = tl.maximum(quotient, _SMALLEST_NORMAL)
    if POWER_OF_TWO:
        scale = ((scale.to(tl.int32, bitcast=True) + 0x007FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    scale = tl.where(bits == 0, 1.0, scale)
    return tl.where(bits < _INF_BITS, scale, float("nan"))


@triton.jit
def reciprocal(scale):
    """1 / scale, correctly rounded."""
    return tl.div_rn(1.0, scale)


@triton.jit
def approximate_reciprocal(x):
    """1 / x, to 1 ulp."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def scales_and_reciprocals(bits, FP_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """`scale_from_amax_bits` and its `reciprocal`, without a division's branches, for kernels with many scales.

    The remainder of a quotient that is off by one unit, times the divisor's rounded reciprocal, corrects it (Markstein,
    IBM J. Res. Dev. 34, 1990). The reciprocal is computed as ``rcp.rn.f32`` does where result and operand are normal
    numbers, as those of a scale are.
    """
    amax = bits.to(tl.float32, bitcast=True)
    quotient = amax * (1.0 / FP_MAX)
    quotient = tl.fma(tl.fma(quotient, -FP_MAX, amax), 1.0 / FP_MAX, quotient)
    scale = _scale_of(bits, quotient, POWER_OF_TWO)
    inverse = approximate_reciprocal(scale)
    return scale, tl.fma(tl.fma(-scale, inverse, 1.0), inverse, inverse)


@triton.jit
def encode(x, inverse, FP_MAX: tl.constexpr, dtype: tl.constexpr):
    """`reference.encode` with the reciprocal of the scale: rounded to nearest even, saturated, NaN kept.

    The cast to FP8 is `cvt.rn.satfinite`, which saturates by itself: a clamp would cost two instructions an element.
    """
    scaled = x.to(tl.float32) * inverse
    if dtype == tl.float8e4nv or dtype == tl.float8e5:
        return scaled.to(dtype)
    else:
        return tl.clamp(scaled, -FP_MAX, FP_MAX, propagate_nan=tl.PropagateNan.ALL).to(dtype)


@triton.jit
def _partial_amax(x, partials, n, TILE: tl.constexpr, EVEN: tl.constexpr):
    part = tl.program_id(0)
    offsets = tl.arange(0, TILE)
    bits = tl.zeros([TILE], tl.int32)
    for start in range(part.to(tl.int64) * TILE, n, tl.num_programs(0) * TILE):
        if EVEN:
            value = tl.load(x + start + offsets)
        else:
            value = tl.load(x + start + offsets, mask=start + offsets < n, other=0.0)
        bits = tl.maximum(bits, magnitude_bits(value))
    tl.store(partials + part, tl.max(bits, axis=0))


@triton.jit
def _reduce_partials(partials, num_partials, MAX_PARTIALS: tl.constexpr):
    offsets = tl.arange(0, MAX_PARTIALS)
    return tl.max(tl.load(partials + offsets, mask=offsets < num_partials, other=0), axis=0)


@triton.jit
def _finish_amax(partials, out, num_partials, MAX_PARTIALS: tl.constexpr):
    tl.store(out, _reduce_partials(partials, num_partials, MAX_PARTIALS).to(tl.float32, bitcast=True))


@triton.jit
def take_scale(
    scale,
    partials,
    num_partials,
    FP_MAX: tl.constexpr,
    CURRENT: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    MAX_PARTIALS: tl.constexpr,
):
    """The given scale, or with `CURRENT` one from the partial amaxes, which the first program writes."""
    if CURRENT:
        value = scale_from_amax_bits(_reduce_partials(partials, num_partials, MAX_PARTIALS), FP_MAX, POWER_OF_TWO)
        if tl.program_id(0) == 0:
            tl.store(scale, value)
    else:
        value = tl.load(scale)
    return value


@triton.jit
def raise_amax(amax_out, bits):
    # FP32 bits of magnitudes are ordered as integers, so the result does not depend on the order of the programs.
    tl.atomic_max(amax_out.to(tl.pointer_type(tl.int32)), bits, sem="relaxed")


@triton.jit
def is_clamped(x, inverse, FP_MAX: tl.constexpr):
    """Whether the cast clamps x; False for a NaN."""
    LIMIT: tl.constexpr = _E4M3_CLAMPED_ABOVE if FP_MAX == _E4M3_MAX else _E5M2_CLAMPED_ABOVE
    return tl.abs(x.to(tl.float32) * inverse) > LIMIT


@triton.jit
def num_clamped(x, inverse, FP_MAX: tl.constexpr):
    """How many elements of a tile the cast clamps."""
    return tl.sum(is_clamped(x, inverse, FP_MAX).to(tl.int32))


@triton.jit
def may_clamp(bits, inverse, FP_MAX: tl.constexpr):
    """Whether the cast clamps anything among values whose largest magnitude is given by its bits; True for a NaN."""
    return is_clamped(bits.to(tl.float32, bitcast=True), inverse, FP_MAX) | (bits > _INF_BITS)


@triton.jit
def rolled(n, bits):
    """n, as a number that the compiler does not know (`bits` are of a magnitude): unrolled, a rare loop takes registers
    from the others."""
    return n + (bits >> 31)


@triton.jit
def add_clamped(record, count):
    # Whole numbers in FP32: the order of the programs does not matter below 2²⁴.
    tl.atomic_add(record + 1, count.to(tl.float32), sem="relaxed")


@triton.jit
def add_cast(record, rows, columns):
    """Add rows · columns elements; called by one program of a launch."""
    tl.atomic_add(record + 2, (tl.cast(rows, tl.int64) * columns).to(tl.float32), sem="relaxed")


@triton.jit
def _quantize_flat(
    x,
    payload,
    scale,
    partials,
    amax_out,
    n,
    num_partials,
    FP_MAX: tl.constexpr,
    CURRENT: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    RECORD: tl.constexpr,
    EVEN: tl.constexpr,
    TILE: tl.constexpr,
    MAX_PARTIALS: tl.constexpr,
):
    """One tile of x [n] → payload [n]. `scale`, `CURRENT` and `RECORD`: see `_quantize_tiles`."""
    # From the end: what the amax pass read last is still in L2.
    start = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * TILE
    offsets = tl.arange(0, TILE)
    mask = None
    if EVEN:
        value = tl.load(x + start + offsets)
    else:
        mask = start + offsets < n
        value = tl.load(x + start + offsets, mask=mask, other=0.0)
    inverse = reciprocal(take_scale(scale, partials, num_partials, FP_MAX, CURRENT, POWER_OF_TWO, MAX_PARTIALS))
    tl.store(payload + start + offsets, encode(value, inverse, FP_MAX, payload.dtype.element_ty), mask=mask)
    if RECORD:
        bits = tl.max(magnitude_bits(value), axis=0)
        raise_amax(amax_out, bits)
        if RECORD > 1:
            if may_clamp(bits, inverse, FP_MAX):  # read again, in parts: healthy tiles keep no registers for this
                PART: tl.constexpr = TILE // 8
                count = tl.zeros([1], tl.int32)
                for part in range(0, 8):
                    at = start + part * PART + tl.arange(0, PART)
                    count += num_clamped(tl.load(x + at, mask=at < n, other=0.0), inverse, FP_MAX)
                add_clamped(amax_out, tl.sum(count))
            if start == 0:
                add_cast(amax_out, n, 1)


# Bytes a0…a3, b0…b3, c0…c3, d0…d3 of four registers → words (a0 b0 c0 d0), …, (a3 b3 c3 d3). Written with shifts of
# single bytes it takes four times the instructions, and ptxas 12.8 miscompiles it (it merges two FP8 conversions into
# one register and loses the halves).
_TRANSPOSE_BYTES = tl.constexpr("""{
    .reg .b32 ab01, cd01, ab23, cd23;
    prmt.b32 ab01, $4, $5, 0x5140;
    prmt.b32 cd01, $6, $7, 0x5140;
    prmt.b32 ab23, $4, $5, 0x7362;
    prmt.b32 cd23, $6, $7, 0x7362;
    prmt.b32 $0, ab01, cd01, 0x5410;
    prmt.b32 $1, ab01, cd01, 0x7632;
    prmt.b32 $2, ab23, cd23, 0x5410;
    prmt.b32 $3, ab23, cd23, 0x7632;
}""")


@triton.jit
def transposed_words(q0, q1, q2, q3):
    """Rows 4i, 4i+1, 4i+2, 4i+3 of a tile, each [R, K] of FP8, as int32 [K, R]: a word holds a column's four bytes."""
    words = tl.inline_asm_elementwise(
        _TRANSPOSE_BYTES, "=r,=r,=r,=r,r,r,r,r", [q0, q1, q2, q3], dtype=tl.int32, is_pure=True, pack=4
    )
    return tl.trans(words)


@triton.jit
def store_transposed(
    q0, q1, q2, q3, payload_t, m0, k0, M, K, TILE_M: tl.constexpr, TILE_K: tl.constexpr, EVEN: tl.constexpr = False
):
    """Store rows 4i, 4i+1, 4i+2, 4i+3 of a tile, each [TILE_M / 4, TILE_K] of FP8, into [K, M].

    `EVEN`: the tile lies inside.
    """
    words = transposed_words(q0, q1, q2, q3)
    rows = tl.arange(0, TILE_K)[:, None]
    columns = tl.arange(0, TILE_M // 4)[None, :]
    corner = payload_t.to(tl.pointer_type(tl.int32)) + tl.cast(k0, tl.int64) * (M // 4) + m0 // 4
    mask = None
    if not EVEN:
        mask = (k0 + rows < K) & (m0 // 4 + columns < M // 4)
    tl.store(corner + rows * (M // 4) + columns, words, mask=mask)


@triton.jit
def _quantize_tiles(
    x,
    payload,
    payload_t,
    scale,
    partials,
    amax_out,
    M,
    K,
    num_partials,
    FP_MAX: tl.constexpr,
    CURRENT: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ROWWISE: tl.constexpr,
    RECORD: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
    MAX_PARTIALS: tl.constexpr,
):
    """One tile of x [M, K] → payload_t [K, M] and, with `ROWWISE`, payload [M, K]; M is a multiple of 4.

    `scale` FP32 [1] is read, or with `CURRENT` made from the amaxes in `partials` and written. `RECORD`: 1 raises
    `amax_out` to the tile's amax; 2 counts casts and clamped elements there, too.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    tiles_k = tl.cdiv(K, TILE_K)
    m0 = tile // tiles_k * TILE_M
    k0 = tile % tiles_k * TILE_K
    rows = m0 + 4 * tl.arange(0, TILE_M // 4)[:, None]
    columns = k0 + tl.arange(0, TILE_K)[None, :]
    offsets = rows.to(tl.int64) * K + columns
    mask = (rows < M) & (columns < K)  # M is a multiple of 4: the four rows are in or out together
    x0 = tl.load(x + offsets, mask=mask, other=0.0)
    x1 = tl.load(x + offsets + K, mask=mask, other=0.0)
    x2 = tl.load(x + offsets + 2 * K, mask=mask, other=0.0)
    x3 = tl.load(x + offsets + 3 * K, mask=mask, other=0.0)
    inverse = reciprocal(take_scale(scale, partials, num_partials, FP_MAX, CURRENT, POWER_OF_TWO, MAX_PARTIALS))
    q0 = encode(x0, inverse, FP_MAX, payload_t.dtype.element_ty)
    q1 = encode(x1, inverse, FP_MAX, payload_t.dtype.element_ty)
    q2 = encode(x2, inverse, FP_MAX, payload_t.dtype.element_ty)
    q3 = encode(x3, inverse, FP_MAX, payload_t.dtype.element_ty)
    if ROWWISE:
        tl.store(payload + offsets, q0, mask=mask)
        tl.store(payload + offsets + K, q1, mask=mask)
        tl.store(payload + offsets + 2 * K, q2, mask=mask)
        tl.store(payload + offsets + 3 * K, q3, mask=mask)
    store_transposed(q0, q1, q2, q3, payload_t, m0, k0, M, K, TILE_M, TILE_K)
    if RECORD:
        tile_bits = tl.maximum(
            tl.maximum(magnitude_bits(x0), magnitude_bits(x1)), tl.maximum(magnitude_bits(x2), magnitude_bits(x3))
        )
        bits = tl.max(tile_bits)
        raise_amax(amax_out, bits)
        if RECORD > 1:
            if may_clamp(bits, inverse, FP_MAX):
                count = tl.zeros([1], tl.int32)
                for part in range(0, TILE_M // 8):
                    again_rows = m0 + 8 * part + tl.arange(0, 8)[:, None]
                    inside = (again_rows < M) & (columns < K)
                    again = tl.load(x + again_rows.to(tl.int64) * K + columns, mask=inside, other=0.0)
                    count += num_clamped(again, inverse, FP_MAX)
                add_clamped(amax_out, tl.sum(count))
            if tile == 0:
                add_cast(amax_out, M, K)


@triton.jit
def _transpose_tiles(payload, payload_t, M, K, TILE_M: tl.constexpr, TILE_K: tl.constexpr):
    tiles_k = tl.cdiv(K, TILE_K)
    first = tl.program_id(1).to(tl.int64) * M * K
    payload += first
    payload_t += first
    m0 = tl.program_id(0) // tiles_k * TILE_M
    k0 = tl.program_id(0) % tiles_k * TILE_K
    rows = m0 + 4 * tl.arange(0, TILE_M // 4)[:, None]
    columns = k0 + tl.arange(0, TILE_K)[None, :]
    offsets = rows.to(tl.int64) * K + columns
    mask = (rows < M) & (columns < K)
    q0 = tl.load(payload + offsets, mask=mask)
    q1 = tl.load(payload + offsets + K, mask=mask)
    q2 = tl.load(payload + offsets + 2 * K, mask=mask)
    q3 = tl.load(payload + offsets + 3 * K, mask=mask)
    store_transposed(q0, q1, q2, q3, payload_t, m0, k0, M, K, TILE_M, TILE_K)


@cache
def no_values(dtype: torch.dtype, device: torch.device) -> Tensor:
    """An empty tensor [0], made once: making one takes the host 1 µs, and a layer returns a dozen."""
    return torch.empty(0, dtype=dtype, device=device)


def room_for_scale(current: bool, device: torch.device) -> Tensor:
    """FP32 [1], memory for the scale that a kernel takes; empty if the scale is given."""
    return empty_vector(1, torch.float32, device) if current else no_values(torch.float32, device)


def recorded(record: Tensor | None) -> int:
    """How many numbers a cast records (`reference.record_`): 0, 1 or 3."""
    return 0 if record is None else record.numel()


def partial_amaxes(x: Tensor, *, most: int = MAX_PARTIALS) -> tuple[Tensor, int]:
    """int32 magnitude bits of the amax of each of at most `most` parts of contiguous `x`, and their number."""
    num_partials, launch = _partial_amax_launch(x.numel(), most)
    partials = empty_vector(num_partials, torch.int32, x.device)
    launch(x, partials)
    return partials, num_partials


@lru_cache(maxsize=MOST_SHAPES)
def _partial_amax_launch(n: int, most: int) -> tuple[int, PreparedLaunch]:
    num_partials = min(cdiv(n, _AMAX_TILE), most)
    return num_partials, PreparedLaunch(
        _partial_amax, (num_partials,), n, _AMAX_TILE, n % _AMAX_TILE == 0, num_warps=_NUM_WARPS, enable_fp_fusion=True
    )


def amax(x: Tensor) -> Tensor:
    """`reference.amax`: FP32 [1]; one launch up to 8192 elements, two above."""
    return partials_to_amax(*partial_amaxes(x.contiguous()))


@triton.jit
def _sum_rows(partials, out, R, C, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """The sums of BLOCK columns of one FP32 [R, C], over CHUNK rows at once."""
    kind = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0)
    columns = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    sums = tl.zeros([CHUNK, BLOCK], tl.float32)
    for start in range(0, R, CHUNK):
        rows = start + tl.arange(0, CHUNK)[:, None]
        sums += tl.load(partials + (kind * R + rows) * C + columns, mask=(rows < R) & (columns < C), other=0.0)
    k = block * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + kind * C + k, tl.sum(sums, axis=0), mask=k < C)


def sum_of_programs(partials: Tensor) -> Tensor:
    """FP32 [N, C]: sums over R of programs' FP32 partial sums [N, R, C], in a fixed order, in half of torch's time."""
    N, R, C = partials.shape
    out = empty(N, C, torch.float32, partials.device)
    if C:
        _sum_launch(N, R, C)(partials, out)
    return out


def sum_of_blocks(partials: Tensor) -> Tensor:
    """FP32 [C]: `sum_of_programs` of one kind of sum, FP32 [R, C]."""
    R, C = partials.shape
    out = empty_vector(C, torch.float32, partials.device)
    _sum_launch(1, R, C)(partials, out)
    return out


@lru_cache(maxsize=MOST_SHAPES)
def _sum_launch(N: int, R: int, C: int) -> PreparedLaunch:
    grid = (cdiv(C, SUM_COLUMNS), N)
    return PreparedLaunch(
        _sum_rows, grid, R, C, _SUM_ROWS_AT_ONCE, SUM_COLUMNS, num_warps=_NUM_WARPS, enable_fp_fusion=True
    )


def partials_to_amax(partials: Tensor, num_partials: int) -> Tensor:
    """FP32 [1]: the largest of int32 magnitude bits [num_partials]."""
    if num_partials == 1:
        return partials.view(torch.float32)
    out = empty_vector(1, torch.float32, partials.device)
    _finish_launch(num_partials)(partials, out)
    return out


@lru_cache(maxsize=MOST_SHAPES)
def _finish_launch(num_partials: int) -> PreparedLaunch:
    return PreparedLaunch(_finish_amax, (1,), num_partials, MAX_PARTIALS, enable_fp_fusion=True)


def _cast_with_scale(
    x: Tensor,
    scale: Tensor,
    partials: Tensor,
    num_partials: int,
    dtype: torch.dtype,
    current: bool,
    power_of_two: bool,
    rowwise: bool,
    transposed: bool,
    amax_out: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The second pass of `quantize_current`, with `current`, or else `quantize_with_scale`; `x` is contiguous."""
    M, K = x.shape
    fp_max, device = MAX_FINITE[dtype], x.device
    payload = empty(M, K, dtype, device) if rowwise else no_values(dtype, device)
    payload_t = empty(K, M, dtype, device) if transposed else no_values(dtype, device)
    record = scale if amax_out is None else amax_out
    if transposed:
        launch = _tiles_launch(M, K, num_partials, fp_max, current, power_of_two, rowwise, recorded(amax_out))
        launch(x, payload, payload_t, scale, partials, record)
    else:
        if not rowwise:
            raise ValueError("quantisation into no layout: set rowwise, transposed or both")
        launch = _flat_launch(M * K, num_partials, fp_max, current, power_of_two, recorded(amax_out))
        launch(x, payload, scale, partials, record)
    return payload, payload_t


@lru_cache(maxsize=MOST_SHAPES)
def _tiles_launch(
    M: int,
    K: int,
    num_partials: int,
    fp_max: float,
    current: bool,
    power_of_two: bool,
    rowwise: bool,
    num_recorded: int,
) -> PreparedLaunch:
    if M % 4:
        raise ValueError(f"a transposed FP8 payload needs M={M} to be a multiple of 4 (the FP8 GEMM: of 16)")
    return PreparedLaunch(
        _quantize_tiles,
        (cdiv(M, TILE_M) * cdiv(K, TILE_K),),
        *(M, K, num_partials, fp_max, current, power_of_two, rowwise, num_recorded),
        *(TILE_M, TILE_K, MAX_PARTIALS),
        num_warps=_NUM_WARPS,
        enable_fp_fusion=True,
    )


@lru_cache(maxsize=MOST_SHAPES)
def _flat_launch(
    n: int, num_partials: int, fp_max: float, current: bool, power_of_two: bool, num_recorded: int
) -> PreparedLaunch:
    return PreparedLaunch(
        _quantize_flat,
        (cdiv(n, _CAST_TILE),),
        *(n, num_partials, fp_max, current, power_of_two, num_recorded),
        *(n % _CAST_TILE == 0, _CAST_TILE, MAX_PARTIALS),
        num_warps=_NUM_WARPS,
        enable_fp_fusion=True,
    )


def quantize_current(
    x: Tensor, dtype: torch.dtype, power_of_two: bool, rowwise: bool, transposed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.quantize_current` in two launches: partial amaxes, then the cast.

    Raises:
        ValueError: `transposed` with M not a multiple of 4, or neither layout requested.
    """
    x = x.contiguous()
    partials, num_partials = partial_amaxes(x)
    scale = empty_vector(1, torch.float32, x.device)
    payload, payload_t = _cast_with_scale(
        x, scale, partials, num_partials, dtype, True, power_of_two, rowwise, transposed, None
    )
    return payload, payload_t, scale


def quantize_with_scale(
    x: Tensor, scale: Tensor, dtype: torch.dtype, rowwise: bool, transposed: bool, amax_out: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`reference.quantize_with_scale` in one launch; the amax is an atomic maximum over magnitude bits.

    Raises:
        ValueError: `transposed` with M not a multiple of 4, or neither layout requested.
    """
    return _cast_with_scale(x.contiguous(), scale, scale, 0, dtype, False, False, rowwise, transposed, amax_out)


def transpose(payload: Tensor) -> Tensor:
    """`reference.transpose`: FP8 [M, K] → contiguous [K, M], or [E, M, K] → [E, K, M].

    Raises:
        ValueError: M is not a multiple of 4.
    """
    *leading, M, K = payload.shape
    if M % 4:
        raise ValueError(f"transposing an FP8 payload needs M={M} to be a multiple of 4 (the FP8 GEMM: of 16)")
    count = leading[0] if leading else 1
    payload_t = empty(count * K, M, payload.dtype, payload.device)
    _transpose_launch(M, K, count)(payload.contiguous(), payload_t)
    return payload_t.view(*leading, K, M) if leading else payload_t


@lru_cache(maxsize=MOST_SHAPES)
def _transpose_launch(M: int, K: int, count: int) -> PreparedLaunch:
    grid = (cdiv(M, TILE_M) * cdiv(K, TILE_K), count)
    return PreparedLaunch(_transpose_tiles, grid, M, K, TILE_M, TILE_K, num_warps=_NUM_WARPS, enable_fp_fusion=True)
