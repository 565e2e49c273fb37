"""Activations fused with their casts to FP8, and their backward, in Triton: the operators of `activation`, and of
experts' activations (`grouped`), whose rows have probabilities.

Bytes per element of a 16-bit activation, of one input / gated: forward 3 / 5; backward 4 + 3 / 6 + 5. Under current
scaling the inputs are read once more for the amax. σ is computed with the GPU's fast exponential (2 ulp), so payloads
can differ from the specification's at rounding boundaries. Squared ReLU's do not.
"""

# The parameters of a Triton kernel have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...activation_functions import Activation
from ...dtypes import MAX_FINITE
from ..quantize.grad_output_triton import check_layouts
from ..quantize.triton import (
    MAX_PARTIALS,
    add_cast,
    add_clamped,
    approximate_reciprocal,
    encode,
    larger_magnitude,
    load_inside,
    magnitude_bits,
    may_clamp,
    num_clamped,
    partials_to_amax,
    raise_amax,
    reciprocal,
    recorded,
    rolled,
    room_for_scale,
    store_transposed,
    sum_of_programs,
    take_scale,
)
from ..shapes import cdiv
from .reference import ExpertRows

# Measured on an H200 at 8192 tokens of GPT-7B.
_NUM_WARPS = 4
_ROWS = 4
_COLUMNS = 1024
_NARROW_TILE = (16, 256)
# Forward of one input: elements of a tile, tiles of a program, tiles loaded ahead.
_FLAT_TILE, _FLAT_TILES, _FLAT_STAGES = 2048, 8, 3
# Backward: rows and warps of a tile, tiles of a program one below the other, tiles loaded ahead. Column sums cross
# threads once per program. Without loading ahead, one tile of half the size was faster.
_TILE_K = 64
_FLAT_BACKWARD = (64, 4, 4, 2)
_FLAT_BACKWARD_EXPERTS = (64, 4, 2, 2)  # groups end at a multiple of 128 rows
_GATED_BACKWARD, _GATED_BACKWARD_SUMMED = (64, 4, 1, 1), (32, 2, 1, 1)

_LOG2_E = tl.constexpr(1.4426950408889634)
_LINEAR = tl.constexpr(1.5957691216057308)
_CUBIC = tl.constexpr(1.5957691216057308 * 0.044715)
_QUICK = tl.constexpr(1.702)
_DENSITY_AT_0 = tl.constexpr(0.3989422804014327)


@triton.jit
def load_inputs(z, rows, columns, mask, F, KIND: tl.constexpr):
    """(z, z), or (gate, up), in FP32."""
    if KIND[1]:
        offsets = rows.to(tl.int64) * (2 * F) + columns
        first = tl.load(z + offsets, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(z + offsets + F, mask=mask, other=0.0).to(tl.float32)
    else:
        first = tl.load(z + rows.to(tl.int64) * F + columns, mask=mask, other=0.0).to(tl.float32)
        second = first
    return first, second


@triton.jit
def _sigmoid(x):
    """1 / (1 + e⁻ˣ) in two special-function instructions. The backward kernel has few to spare."""
    return approximate_reciprocal(1.0 + tl.exp2(-_LOG2_E * x))


@triton.jit
def _normal(x):
    """(Φ(x), φ(x)) of the normal distribution; both keep their tails.

    (1 - Φ(x)) / φ(x) is t·p(t) for x ≥ 0, t = 1 / (1 + 0.3x). This polynomial was fitted for the least relative error
    up to x = 14, which is 1.5e-7.
    """
    density = _DENSITY_AT_0 * tl.exp2((-0.5 * _LOG2_E) * (x * x))
    t = approximate_reciprocal(1.0 + 0.3 * tl.abs(x))
    p = 0.08942365509588004 * t - 0.39405073624264736
    p = p * t + 0.5172532615179624
    p = p * t - 0.13456644773114904
    p = p * t + 0.32225695424148815
    p = p * t + 0.25044577541053337
    p = p * t + 0.3026853110872692
    p = p * t + 0.2998661811075486
    tail = density * (p * t)
    return tl.where(x < 0.0, tail, 1.0 - tail), density


@triton.jit
def _clamped(gate, up, LIMIT: tl.constexpr, OFFSET: tl.constexpr):
    """Gate at most `LIMIT`, and up within ± `LIMIT`, plus `OFFSET`. A NaN stays one."""
    clamped = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    return tl.where(gate > LIMIT, LIMIT, gate), clamped + OFFSET


@triton.jit
def value_of(first, second, KIND: tl.constexpr):
    if KIND[0] == "swiglu":
        return first * _sigmoid(first) * second
    elif KIND[0] == "quick_geglu":
        return first * _sigmoid(_QUICK * first) * second
    elif KIND[0] == "clamped_swiglu":
        gate, up = _clamped(first, second, KIND[2], KIND[4])
        return gate * _sigmoid(KIND[3] * gate) * up
    elif KIND[0] == "squared_relu":
        positive = tl.where(first <= 0.0, 0.0, first)
        return positive * positive
    elif KIND[0] == "gelu_erf":
        gate, _ = _normal(first)
        return first * gate
    else:
        tl.static_assert(KIND[0] == "gelu")
        return first * _sigmoid(first * (_LINEAR + _CUBIC * (first * first)))


@triton.jit
def value_and_derivatives(first, second, KIND: tl.constexpr):
    """(activation, ∂/∂first, ∂/∂second); the last means nothing for an activation of one input."""
    if KIND[0] == "swiglu":
        sigmoid = _sigmoid(first)
        silu = first * sigmoid
        return silu * second, second * (sigmoid + (silu - silu * sigmoid)), silu
    elif KIND[0] == "quick_geglu":
        sigmoid = _sigmoid(_QUICK * first)
        gated = first * sigmoid
        return gated * second, second * (sigmoid + _QUICK * (gated - gated * sigmoid)), gated
    elif KIND[0] == "clamped_swiglu":
        gate, up = _clamped(first, second, KIND[2], KIND[4])
        sigmoid = _sigmoid(KIND[3] * gate)
        gated = gate * sigmoid
        d_first = tl.where(first > KIND[2], 0.0, up * (sigmoid + KIND[3] * (gated - gated * sigmoid)))
        return gated * up, d_first, tl.where(tl.abs(second) > KIND[2], 0.0, gated)
    elif KIND[0] == "squared_relu":
        positive = tl.where(first <= 0.0, 0.0, first)  # a NaN stays one
        return positive * positive, positive + positive, positive
    elif KIND[0] == "gelu_erf":
        gate, density = _normal(first)
        return first * gate, gate + first * density, gate
    else:
        tl.static_assert(KIND[0] == "gelu")
        squared = first * first
        gate = _sigmoid(first * (_LINEAR + _CUBIC * squared))
        value = first * gate
        return value, gate + (value - value * gate) * (_LINEAR + 3.0 * _CUBIC * squared), gate


@triton.jit
def weighted(x, probs, rows, EXPERTS: tl.constexpr):
    """`x`, times the probability of its row where the rows are an expert's."""
    if EXPERTS:
        return x * tl.load(probs + rows)
    else:
        return x


@triton.jit
def _tile(index, F, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    tiles = tl.cdiv(F, COLUMNS)
    return index // tiles * ROWS + tl.arange(0, ROWS)[:, None], index % tiles * COLUMNS + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def _activation_amax(
    z, grad, probs, group_offsets, partials, T, F, E, num_tiles,
    KIND: tl.constexpr, BACKWARD: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Partial amaxes of the activation, or (`BACKWARD`) of the gradient of z.

    `EXPERTS`: the rows end at group_offsets[E], a multiple of `ROWS`, and each has its probability.
    """
    if EXPERTS:
        num_tiles = tl.load(group_offsets + E) // ROWS * tl.cdiv(F, COLUMNS)
    largest = tl.zeros([ROWS, COLUMNS], tl.float32)
    for index in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        rows, columns = _tile(index, F, ROWS, COLUMNS)
        mask = (rows < T) & (columns < F)
        first, second = load_inputs(z, rows, columns, mask, F, KIND)
        if BACKWARD:
            g = tl.load(grad + rows.to(tl.int64) * F + columns, mask=mask, other=0.0).to(tl.float32)
            g = weighted(g, probs, rows, EXPERTS)
            _, d_first, d_second = value_and_derivatives(first, second, KIND)
            largest = larger_magnitude(largest, g * d_first)
            if KIND[1]:
                largest = larger_magnitude(largest, g * d_second)
        else:
            largest = larger_magnitude(largest, weighted(value_of(first, second, KIND), probs, rows, EXPERTS))
    tl.store(partials + tl.program_id(0), tl.max(magnitude_bits(largest)))


@triton.jit
def _quantize_rows(
    z, probs, group_offsets, payload, scale, partials, amax_out, T, F, E, num_partials,
    FP_MAX: tl.constexpr, CURRENT: tl.constexpr, POWER_OF_TWO: tl.constexpr, RECORD: tl.constexpr,
    KIND: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, MAX_PARTIALS: tl.constexpr,
):  # fmt: skip
    """A tile of rows. `EXPERTS`: as in `_activation_amax`."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    first_row = tile // tl.cdiv(F, COLUMNS) * ROWS
    if EXPERTS:
        T = tl.load(group_offsets + E)
        if first_row >= T:
            if CURRENT:
                is_first = tl.program_id(0) == 0
                if is_first:
                    take_scale(scale, partials, num_partials, FP_MAX, CURRENT, POWER_OF_TWO, MAX_PARTIALS)
            return
    rows, columns = _tile(tile, F, ROWS, COLUMNS)
    mask = (rows < T) & (columns < F)
    first, second = load_inputs(z, rows, columns, mask, F, KIND)
    value = weighted(value_of(first, second, KIND), probs, rows, EXPERTS)
    inverse = reciprocal(take_scale(scale, partials, num_partials, FP_MAX, CURRENT, POWER_OF_TWO, MAX_PARTIALS))
    quantized = encode(value, inverse, FP_MAX, payload.dtype.element_ty)
    tl.store(payload + rows.to(tl.int64) * F + columns, quantized, mask=mask)
    if RECORD:
        bits = tl.max(magnitude_bits(value))
        raise_amax(amax_out, bits)
        if RECORD > 1:
            if may_clamp(bits, inverse, FP_MAX):  # computed again, a row at a time: healthy tiles pay nothing for it
                count = tl.zeros([1], tl.int32)
                for row in range(0, rolled(ROWS, bits)):
                    one_row = first_row + row + tl.zeros([1, 1], tl.int32)
                    inside = (one_row < T) & (columns < F)
                    gate, up = load_inputs(z, one_row, columns, inside, F, KIND)
                    again = weighted(value_of(gate, up, KIND), probs, one_row, EXPERTS)
                    count += num_clamped(again, inverse, FP_MAX)
                add_clamped(amax_out, tl.sum(count))
            if tile == 0:
                add_cast(amax_out, T, F)


@triton.jit
def _flat_quantize(
    z, payload, scale, partials, amax_out, n, num_partials,
    FP_MAX: tl.constexpr, CURRENT: tl.constexpr, POWER_OF_TWO: tl.constexpr, RECORD: tl.constexpr,
    KIND: tl.constexpr, EVEN: tl.constexpr,
    TILE: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr, MAX_PARTIALS: tl.constexpr,
):  # fmt: skip
    """Treats the elements as one row, because columns do not matter."""
    offsets = tl.max_contiguous(tl.arange(0, TILE), 8)
    start = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * (TILE * TILES)
    inverse = reciprocal(take_scale(scale, partials, num_partials, FP_MAX, CURRENT, POWER_OF_TWO, MAX_PARTIALS))
    z += start
    payload += start
    largest = tl.zeros([TILE], tl.float32)
    for index in tl.range(0, TILES, num_stages=STAGES):
        at = index * TILE + offsets
        mask = None
        if not EVEN:
            mask = start + at < n
        value = load_inside(z + at, mask, EVEN).to(tl.float32)
        value = value_of(value, value, KIND)
        tl.store(payload + at, encode(value, inverse, FP_MAX, payload.dtype.element_ty), mask=mask)
        if RECORD:
            largest = larger_magnitude(largest, value)
    if RECORD:
        bits = tl.max(magnitude_bits(largest))
        raise_amax(amax_out, bits)
        if RECORD > 1:
            if may_clamp(bits, inverse, FP_MAX):  # computed again: healthy tiles pay nothing for the count
                count = tl.zeros([1], tl.int32)
                for index in range(0, TILES):
                    at = index * TILE + offsets
                    again = load_inside(z + at, start + at < n, False).to(tl.float32)
                    count += num_clamped(value_of(again, again, KIND), inverse, FP_MAX)
                add_clamped(amax_out, tl.sum(count))
            if tl.program_id(0) == 0:
                add_cast(amax_out, n, 1)


@triton.jit
def _grad_rows(
    grad, z, payload, offsets, z_offsets, mask, F, inverse, activation_inverse, largest, sums_first, sums_second,
    probs, grad_probs, rows,
    FP_MAX: tl.constexpr, ACTIVATION_MAX: tl.constexpr, RECORD: tl.constexpr, SUM_COLUMNS: tl.constexpr,
    KIND: tl.constexpr, EXPERTS: tl.constexpr, EVEN: tl.constexpr, dtype: tl.constexpr, activation_dtype: tl.constexpr,
):  # fmt: skip
    """Every fourth row of a tile: (activation, gradient by first, by second) in FP8, and the updated amax and column
    sums.

    Writes the gradients' payload. Amax and sums are taken here so that no FP32 values stay in registers.
    """
    first = load_inside(z + z_offsets, mask, EVEN).to(tl.float32)
    second = first
    if KIND[1]:
        second = load_inside(z + F + z_offsets, mask, EVEN).to(tl.float32)
    g = load_inside(grad + offsets, mask, EVEN).to(tl.float32)
    value, d_first, d_second = value_and_derivatives(first, second, KIND)
    if EXPERTS:
        tl.store(grad_probs + rows, tl.sum(g * value, axis=1, keep_dims=True))
    g = weighted(g, probs, rows, EXPERTS)
    value = weighted(value, probs, rows, EXPERTS)
    activation = encode(value, activation_inverse, ACTIVATION_MAX, activation_dtype)
    g_first = g * d_first
    if RECORD:
        largest = larger_magnitude(largest, g_first)
    if SUM_COLUMNS:
        sums_first += g_first
    q_first = encode(g_first, inverse, FP_MAX, dtype)
    q_second = q_first
    if KIND[1]:
        g_second = g * d_second
        if RECORD:
            largest = larger_magnitude(largest, g_second)
        if SUM_COLUMNS:
            sums_second += g_second
        q_second = encode(g_second, inverse, FP_MAX, dtype)
        tl.store(payload + F + z_offsets, q_second, mask=mask)
    tl.store(payload + z_offsets, q_first, mask=mask)
    return activation, q_first, q_second, largest, sums_first, sums_second


@triton.jit
def _activation_backward_tiles(
    grad, z, probs, group_offsets, payload, payload_t, activation_t, scale, activation_scale, partials, amax_out,
    sums, T, F, E, num_partials,
    FP_MAX: tl.constexpr, ACTIVATION_MAX: tl.constexpr, CURRENT: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    RECORD: tl.constexpr, SUM_COLUMNS: tl.constexpr, KIND: tl.constexpr, EXPERTS: tl.constexpr, EVEN: tl.constexpr,
    TILE_M: tl.constexpr, TILE_K: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr, MAX_PARTIALS: tl.constexpr,
):  # fmt: skip
    """`reference.activation_backward_quantize` of `TILES` tiles, one below the other, with 32-bit offsets inside.

    grad [T, F] and z [T, width] → payload [T, width], payload_t [width, T], activation_t [F, T]; width is 2F for a
    gated activation, otherwise F. With `SUM_COLUMNS`, sums FP32 [blocks of rows, width] of columns. `EXPERTS`: the rows
    end at group_offsets[E], a multiple of the tiles' rows, and each has its probability; sums FP32 [blocks of columns,
    T] are the probabilities' gradients.
    """
    k0 = tl.program_id(0) * TILE_K
    block = tl.num_programs(1) - 1 - tl.program_id(1)  # from the end: what the amax pass read last is still in L2
    first_row = block * (TILES * TILE_M)
    if EXPERTS:
        end = tl.load(group_offsets + E)
        if first_row >= end:
            if CURRENT:
                is_first = tl.program_id(0) + tl.program_id(1) == 0
                if is_first:
                    take_scale(scale, partials, num_partials, FP_MAX, CURRENT, POWER_OF_TWO, MAX_PARTIALS)
            return
    inverse = reciprocal(take_scale(scale, partials, num_partials, FP_MAX, CURRENT, POWER_OF_TWO, MAX_PARTIALS))
    a_inverse = reciprocal(tl.load(activation_scale))
    dtype: tl.constexpr = payload.dtype.element_ty
    a_dtype: tl.constexpr = activation_t.dtype.element_ty
    width = 2 * F if KIND[1] else F
    rows = 4 * tl.arange(0, TILE_M // 4)[:, None]
    columns = tl.max_contiguous(tl.arange(0, TILE_K), 8)[None, :]
    offsets = rows * F + columns
    z_offsets = rows * width + columns
    grad += tl.cast(first_row, tl.int64) * F + k0
    z += tl.cast(first_row, tl.int64) * width + k0
    payload += tl.cast(first_row, tl.int64) * width + k0
    probs += first_row
    grad_probs = sums + tl.cast(tl.program_id(0), tl.int64) * T + first_row
    largest = tl.zeros([TILE_M // 4, TILE_K], tl.float32)
    sums_first = tl.zeros([TILE_M // 4, TILE_K], tl.float32)
    sums_second = tl.zeros([TILE_M // 4, TILE_K], tl.float32)
    for index in tl.range(0, TILES, num_stages=STAGES):
        tile = index * TILE_M
        g_tile = grad + tile * F
        z_tile = z + tile * width
        p_tile = payload + tile * width
        mask = None
        if not EVEN:
            mask = (first_row + tile + rows < T) & (k0 + columns < F)
        a0, p0, s0, largest, sums_first, sums_second = _grad_rows(
            g_tile, z_tile, p_tile, offsets, z_offsets, mask, F, inverse, a_inverse, largest, sums_first, sums_second,
            probs, grad_probs, tile + rows,
            FP_MAX, ACTIVATION_MAX, RECORD, SUM_COLUMNS, KIND, EXPERTS, EVEN, dtype, a_dtype,
        )  # fmt: skip
        a1, p1, s1, largest, sums_first, sums_second = _grad_rows(
            g_tile + F, z_tile + width, p_tile + width, offsets, z_offsets, mask, F, inverse, a_inverse, largest,
            sums_first, sums_second, probs, grad_probs, tile + rows + 1,
            FP_MAX, ACTIVATION_MAX, RECORD, SUM_COLUMNS, KIND, EXPERTS, EVEN, dtype, a_dtype,
        )  # fmt: skip
        a2, p2, s2, largest, sums_first, sums_second = _grad_rows(
            g_tile + 2 * F, z_tile + 2 * width, p_tile + 2 * width, offsets, z_offsets, mask, F, inverse, a_inverse,
            largest, sums_first, sums_second, probs, grad_probs, tile + rows + 2,
            FP_MAX, ACTIVATION_MAX, RECORD, SUM_COLUMNS, KIND, EXPERTS, EVEN, dtype, a_dtype,
        )  # fmt: skip
        a3, p3, s3, largest, sums_first, sums_second = _grad_rows(
            g_tile + 3 * F, z_tile + 3 * width, p_tile + 3 * width, offsets, z_offsets, mask, F, inverse, a_inverse,
            largest, sums_first, sums_second, probs, grad_probs, tile + rows + 3,
            FP_MAX, ACTIVATION_MAX, RECORD, SUM_COLUMNS, KIND, EXPERTS, EVEN, dtype, a_dtype,
        )  # fmt: skip
        m0 = first_row + tile
        store_transposed(a0, a1, a2, a3, activation_t, m0, k0, T, F, TILE_M, TILE_K, EVEN)
        store_transposed(p0, p1, p2, p3, payload_t, m0, k0, T, F, TILE_M, TILE_K, EVEN)
        if KIND[1]:
            second_t = payload_t + tl.cast(F, tl.int64) * T
            store_transposed(s0, s1, s2, s3, second_t, m0, k0, T, F, TILE_M, TILE_K, EVEN)
    if RECORD:
        bits = tl.max(magnitude_bits(largest))
        raise_amax(amax_out, bits)
    if SUM_COLUMNS:
        k = k0 + tl.arange(0, TILE_K)
        base = sums + tl.cast(block, tl.int64) * width + k
        tl.store(base, tl.sum(sums_first, axis=0), mask=k < F)
        if KIND[1]:
            tl.store(base + F, tl.sum(sums_second, axis=0), mask=k < F)
    if RECORD > 1:
        if may_clamp(bits, inverse, FP_MAX):  # computed again: healthy tiles pay nothing for the count
            count = tl.zeros([1], tl.int32)
            for index in range(0, TILES):
                for row in range(0, rolled(4, bits)):
                    at = index * TILE_M + rows + row
                    inside = (first_row + at < T) & (k0 + columns < F)
                    first = load_inside(z + at * width + columns, inside, False).to(tl.float32)
                    second = first
                    if KIND[1]:
                        second = load_inside(z + F + at * width + columns, inside, False).to(tl.float32)
                    g = load_inside(grad + at * F + columns, inside, False).to(tl.float32)
                    g = weighted(g, probs, at, EXPERTS)
                    _, d_first, d_second = value_and_derivatives(first, second, KIND)
                    count += num_clamped(g * d_first, inverse, FP_MAX)
                    if KIND[1]:
                        count += num_clamped(g * d_second, inverse, FP_MAX)
            add_clamped(amax_out, tl.sum(count))
        if (tl.program_id(0) == 0) & (block == 0):
            add_cast(amax_out, end if EXPERTS else T, width)


def constant(activation: Activation) -> tuple[str | float, ...]:
    """``KIND`` of the kernels: the kind, whether it is gated, and its parameters."""
    return activation.kind, activation.row.is_gated, *activation.parameters


def _rows_launched(experts: ExpertRows, stand_in: Tensor) -> tuple[tuple[Tensor, Tensor], int, bool]:
    """What kernels take of `experts`: two tensors, the number of experts, and whether there are any."""
    if experts.probs is None or experts.offsets is None:
        return (stand_in, stand_in), 0, False
    return (experts.probs, experts.offsets), len(experts.offsets) - 1, True


def _tile_sizes(F: int, experts: ExpertRows) -> tuple[int, int]:
    """Rows and columns of a tile. Experts are often narrower than one of many columns."""
    return (_ROWS, _COLUMNS) if experts.probs is None or F % _COLUMNS == 0 else _NARROW_TILE


def _partial_amaxes(z: Tensor, grad: Tensor | None, activation: Activation, experts: ExpertRows) -> tuple[Tensor, int]:
    T, F = z.shape[0], z.shape[1] // activation.row.num_inputs
    rows, columns = _tile_sizes(F, experts)
    num_tiles = cdiv(T, rows) * cdiv(F, columns)
    num_partials = min(num_tiles, MAX_PARTIALS)
    partials = torch.empty(num_partials, dtype=torch.int32, device=z.device)
    operands, num_experts, has_experts = _rows_launched(experts, z)
    _activation_amax[(num_partials,)](
        z, z if grad is None else grad, *operands, partials, T, F, num_experts, num_tiles,
        constant(activation), grad is not None, has_experts, rows, columns,
        num_warps=_NUM_WARPS,
        enable_fp_fusion=True,
    )  # fmt: skip
    return partials, num_partials


def activation_amax(z: Tensor, activation: Activation, experts: ExpertRows) -> Tensor:
    """`reference.activation_amax`: FP32 [1]."""
    return partials_to_amax(*_partial_amaxes(z.contiguous(), None, activation, experts))


def activation_backward_amax(grad: Tensor, z: Tensor, activation: Activation, experts: ExpertRows) -> Tensor:
    """`reference.activation_backward_amax`: FP32 [1]."""
    return partials_to_amax(*_partial_amaxes(z.contiguous(), grad.contiguous(), activation, experts))


def activation_quantize(
    z: Tensor,
    activation: Activation,
    dtype: torch.dtype,
    experts: ExpertRows,
    scale: Tensor | None,
    power_of_two: bool,
    amax_out: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`reference.activation_quantize`: one launch with a given scale, two under current scaling."""
    z = z.contiguous()
    T, F = z.shape[0], z.shape[1] // activation.row.num_inputs
    payload = torch.empty((T, F), dtype=dtype, device=z.device)
    current = scale is None
    taken = room_for_scale(current, z.device)
    partials, num_partials = _partial_amaxes(z, None, activation, experts) if current else (z, 0)
    used = taken if scale is None else scale
    amax_taken = used if amax_out is None else amax_out
    if not activation.row.is_gated and experts.probs is None:
        per_program = _FLAT_TILE * _FLAT_TILES
        _flat_quantize[(cdiv(z.numel(), per_program),)](
            z, payload, used, partials, amax_taken, z.numel(), num_partials,
            MAX_FINITE[dtype], current, power_of_two, recorded(amax_out), constant(activation),
            z.numel() % per_program == 0,
            _FLAT_TILE, _FLAT_TILES, _FLAT_STAGES, MAX_PARTIALS, num_warps=_NUM_WARPS,
            enable_fp_fusion=True,
        )  # fmt: skip
        return payload, taken
    rows, columns = _tile_sizes(F, experts)
    operands, num_experts, has_experts = _rows_launched(experts, z)
    _quantize_rows[(cdiv(T, rows) * cdiv(F, columns),)](
        z, *operands, payload, used, partials, amax_taken, T, F, num_experts, num_partials,
        MAX_FINITE[dtype], current, power_of_two, recorded(amax_out), constant(activation), has_experts, rows, columns,
        MAX_PARTIALS, num_warps=_NUM_WARPS,
        enable_fp_fusion=True,
    )  # fmt: skip
    return payload, taken


def activation_backward_quantize(
    grad: Tensor,
    z: Tensor,
    activation: Activation,
    dtype: torch.dtype,
    experts: ExpertRows,
    scale: Tensor | None,
    power_of_two: bool,
    amax_out: Tensor | None,
    activation_dtype: torch.dtype,
    activation_scale: Tensor,
    column_sums: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`reference.activation_backward_quantize`: one launch (two under current scaling), and one that adds up the tiles'
    sums.

    Raises:
        ValueError: the number of rows is not a multiple of 4, or of columns not a multiple of 16.
    """
    grad, z = grad.contiguous(), z.contiguous()
    (T, Z), F = z.shape, grad.shape[1]
    check_layouts(T, F)
    payload = torch.empty((T, Z), dtype=dtype, device=z.device)
    payload_t = torch.empty((Z, T), dtype=dtype, device=z.device)
    activation_t = torch.empty((F, T), dtype=activation_dtype, device=z.device)
    current = scale is None
    taken = room_for_scale(current, z.device)
    partials, num_partials = _partial_amaxes(z, grad, activation, experts) if current else (z, 0)
    used = taken if scale is None else scale
    gated = _GATED_BACKWARD_SUMMED if column_sums else _GATED_BACKWARD
    flat = _FLAT_BACKWARD if experts.probs is None else _FLAT_BACKWARD_EXPERTS
    tile_m, num_warps, tiles, stages = gated if activation.row.is_gated else flat
    tiles_k, blocks = cdiv(F, _TILE_K), cdiv(T, tiles * tile_m)
    is_even = T % (tiles * tile_m) == 0 and F % _TILE_K == 0
    operands, num_experts, has_experts = _rows_launched(experts, z)
    num_sums = (tiles_k, T) if has_experts else (blocks, Z) if column_sums else (1, 0)
    sums = torch.empty((1, *num_sums), dtype=torch.float32, device=z.device)
    _activation_backward_tiles[(tiles_k, blocks)](
        grad, z, *operands, payload, payload_t, activation_t, used, activation_scale, partials,
        used if amax_out is None else amax_out, sums, T, F, num_experts, num_partials,
        MAX_FINITE[dtype], MAX_FINITE[activation_dtype], current, power_of_two, recorded(amax_out), column_sums,
        constant(activation), has_experts, is_even, tile_m, _TILE_K, tiles, stages, MAX_PARTIALS, num_warps=num_warps,
        enable_fp_fusion=True,
    )  # fmt: skip
    return payload, payload_t, activation_t, sum_of_programs(sums)[0], taken
