"""The specification: every operation in plain PyTorch, on any device. Variants are tested against these.

Rounding is to nearest even everywhere. A cast is always preceded by a clamp to the format's finite range, because
overflowing casts differ between devices (a CPU saturates, CUDA gives NaN). A NaN stays NaN through every cast.

Two kinds of scale:

- **tensorwise**: one FP32 scale for the tensor, ``amax / fp_max``, optionally rounded up to a power of two;
- **blockwise**: one FP32 power-of-two scale for each run of `block` elements of the flattened tensor. A power of two
  makes encoding an unchanged value again exact. A block that is all zero has scale 1; a block whose amax is not finite
  has scale NaN, so that everything decoded from it is NaN and cannot pass for a number.

Optimizer state in int8 and uint8 is companded, always blockwise, and its scale is the amax: see `companding`. The split
master is in `split_master`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..formats import COMPANDED_DTYPES, FP8_DTYPES, MAX_FINITE
from .adamw import companding
from .adamw.operands import AdamHyper, AdamState, FlatState
from .registration import operator
from .shapes import fp32, layouts, taken_scale

_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


@operator(gpu=".quantize.triton", fake=lambda a: fp32(a.x, 1))
def amax(x: Tensor) -> Tensor:
    """Largest magnitude of `x` (any shape) as FP32 of shape [1]; NaN where `x` holds a NaN."""
    low, high = torch.aminmax(x.detach().reshape(-1))
    return torch.maximum(-low, high).float().reshape(1)


def round_up_to_power_of_two(scale: Tensor) -> Tensor:
    """Smallest power of two ≥ `scale` (FP32, positive), at least 2⁻¹²⁶; inf and NaN stay as they are."""
    bits = (scale.clamp_min(_SMALLEST_NORMAL).view(torch.int32) + 0x007FFFFF) & 0x7F800000
    return torch.where(torch.isfinite(scale), bits.view(torch.float32), scale)


def scale_from_amax(amax: Tensor, dtype: torch.dtype, *, power_of_two: bool) -> Tensor:
    """Dequantising scale ``amax / fp_max`` in FP32, elementwise.

    An amax of 0 gives 1. An amax that is not finite gives NaN: what is quantised with it is NaN too, so the step's
    non-finite check finds it.
    """
    # Divided by a tensor: CUDA turns division by a Python number into multiplication by its rounded reciprocal.
    scale = (amax / torch.full_like(amax, MAX_FINITE[dtype])).clamp_min(_SMALLEST_NORMAL)
    if power_of_two:
        scale = round_up_to_power_of_two(scale)
    scale = torch.where(amax == 0, torch.ones_like(scale), scale)
    return torch.where(torch.isfinite(amax), scale, torch.full_like(scale, torch.nan))


def encode(x: Tensor, scale: Tensor, dtype: torch.dtype, noise: Tensor | None = None) -> Tensor:
    """``cast(clamp(x / scale))`` to `dtype`; `scale` (FP32) broadcasts against `x`. Saturates, keeps NaN.

    Integers are companded, and rounded stochastically where `noise` is given: see `companding.encode`.
    """
    if dtype in COMPANDED_DTYPES:
        return companding.encode(x.float(), scale, dtype, noise)
    assert noise is None, dtype
    limit = MAX_FINITE[dtype]
    return (x.float() * scale.reciprocal()).clamp_(-limit, limit).to(dtype)


def decode(payload: Tensor, scale: Tensor | None = None) -> Tensor:
    """``payload · scale`` in FP32; `scale` (FP32) broadcasts. Integers are companded: see `companding.decode`."""
    if payload.dtype in COMPANDED_DTYPES:
        assert scale is not None
        return companding.decode(payload, scale)
    if payload.dtype in FP8_DTYPES and payload.device.type == "cpu":
        value = _decode_fp8_by_table(payload)
    else:
        value = payload.float()
    return value if scale is None else value * scale


def _decode_fp8_by_table(payload: Tensor) -> Tensor:
    # A CPU's own float8 → float32 cast is scalar; a 256-entry table is three times as fast and as exact.
    codes = torch.arange(256, dtype=torch.uint8).view(payload.dtype).float()
    index = payload.contiguous().view(torch.uint8).view(-1).int()
    return codes.index_select(0, index).view(payload.shape)


@operator(
    gpu=".quantize.triton",
    fake=lambda a: (*layouts(a.x, a.dtype, rowwise=a.rowwise, transposed=a.transposed), fp32(a.x, 1)),
)
def quantize_current(
    x: Tensor, dtype: torch.dtype, power_of_two: bool, rowwise: bool, transposed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise `x` [M, K] with a scale taken from its own amax, in either layout or both.

    Returns:
        payload [M, K] (empty unless `rowwise`), its transpose [K, M] (empty unless `transposed`), scale FP32 [1].
    """
    scale = scale_from_amax(amax(x), dtype, power_of_two=power_of_two)
    payload, payload_t = quantize_with_scale(x, scale, dtype, rowwise, transposed, None)
    return payload, payload_t, scale


@operator(
    gpu=".quantize.triton",
    fake=lambda a: layouts(a.x, a.dtype, rowwise=a.rowwise, transposed=a.transposed),
    mutates=["amax_out"],
)
def quantize_with_scale(
    x: Tensor, scale: Tensor, dtype: torch.dtype, rowwise: bool, transposed: bool, amax_out: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Quantise `x` [M, K] with a given FP32 scale [1], in either layout or both; values beyond it saturate.

    Args:
        amax_out: FP32 [1]; raised to the amax of `x` when given (delayed scaling records it in the same pass).

    Returns:
        payload [M, K] (empty unless `rowwise`), its transpose [K, M] (empty unless `transposed`).
    """
    if amax_out is not None:
        torch.maximum(amax_out, amax(x), out=amax_out)
    payload = encode(x, scale, dtype)
    empty = payload.new_empty(0)
    return payload if rowwise else empty, payload.t().contiguous() if transposed else empty


@operator(
    gpu=".quantize.grad_output_triton",
    fake=lambda a: (
        *layouts(a.x, a.dtype, transposed=a.transposed),
        fp32(a.x, a.x.shape[1]),
        taken_scale(a.x, a.scale),
    ),
    mutates=["amax_out"],
)
def quantize_grad_output(
    x: Tensor,
    dtype: torch.dtype,
    scale: Tensor | None,
    power_of_two: bool,
    amax_out: Tensor | None,
    transposed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantise an output gradient `x` [M, K] and sum its columns (a bias's gradient) in one read.

    Args:
        scale: FP32 [1]; None takes one from the amax of `x`.

    Returns:
        payload [M, K], its transpose [K, M] (empty unless `transposed`), column sums FP32 [K], the scale taken FP32 [1]
        (empty if it was given).
    """
    taken = scale_from_amax(amax(x), dtype, power_of_two=power_of_two) if scale is None else None
    used = scale if scale is not None else taken
    assert used is not None
    payload, payload_t = quantize_with_scale(x, used, dtype, rowwise=True, transposed=transposed, amax_out=amax_out)
    return payload, payload_t, x.float().sum(dim=0), used.new_empty(0) if taken is None else taken


@operator(gpu=".quantize.triton", fake=lambda a: layouts(a.payload, a.payload.dtype)[1])
def transpose(payload: Tensor) -> Tensor:
    """[M, K] FP8 bytes → contiguous [K, M]."""
    return payload.t().contiguous()


@operator(gpu=".gemm.scaled_mm", fake=lambda a: a.a.new_empty((a.a.shape[0], a.b.shape[0]), dtype=a.out_dtype))
def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> Tensor:
    """(a · scale_a) @ (b · scale_b)ᵀ + bias, accumulated in FP32.

    Args:
        a: FP8 [M, K], K-major. b: FP8 [N, K], K-major. scale_a, scale_b: FP32 [1].
        bias: [N] or None, added before rounding to `out_dtype`.
        use_fast_accum: Hopper's shorter accumulator; the reference always accumulates in FP32.

    Returns:
        [M, N] in `out_dtype`.
    """
    out = (decode(a) @ decode(b).t()) * (scale_a * scale_b)
    if bias is not None:
        out += bias.float()
    return out.to(out_dtype)


@operator(gpu=".gemm.scaled_mm", mutates=["out"])
def scaled_mm_into_(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    use_fast_accum: bool,
    addend: Tensor | None,
) -> None:
    """`scaled_mm` plus `addend` (in `out`'s dtype, or None) written to contiguous `out` [M, N], rounded once."""
    dtype = out.dtype if addend is None else torch.float32
    product = scaled_mm(a, b, scale_a, scale_b, bias=bias, out_dtype=dtype, use_fast_accum=use_fast_accum)
    out.copy_(product if addend is None else product + addend)


@operator(gpu=".gemm.scaled_mm", mutates=["out", "amax"])
def scaled_mm_to_fp8_(
    out: Tensor, amax: Tensor, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, inverse: Tensor
) -> None:
    """`scaled_mm` with its FP32 result cast to FP8 by the given scale, saturated, in place.

    Args:
        out: FP8 [M, N], takes the product times `inverse`.
        amax: FP32 [1], takes the amax of the product.
        inverse: FP32 [1], the reciprocal of the scale that `out` is decoded by.
    """
    product = scaled_mm(a, b, scale_a, scale_b, bias=None, out_dtype=torch.float32, use_fast_accum=False)
    amax.copy_(product.abs().amax())
    out.copy_(encode(product, inverse.reciprocal(), out.dtype))


@operator(gpu=".quantize.blockwise_triton", mutates=["payload", "scales"])
def quantize_blockwise_(x: Tensor, payload: Tensor, scales: Tensor) -> None:
    """Quantise flat `x` [n] into `payload` [n] (FP8, FP16 or a companded integer) and its FP32 `scales`, in place.

    Args:
        x: may be shorter than `payload`, whose rest becomes zero.
        scales: [n / block], powers of two, or of integers the amax; the block is ``payload.numel() / scales.numel()``.
    """
    if x.numel() != payload.numel():
        x = torch.nn.functional.pad(x.reshape(-1), (0, payload.numel() - x.numel()))
    store_state_(x, payload, scales)


@operator(gpu=".quantize.blockwise_triton", fake=lambda a: fp32(a.payload, a.payload.numel()))
def dequantize_blockwise(payload: Tensor, scales: Tensor) -> Tensor:
    """Flat payload [n] with FP32 `scales` [n / block] → FP32 [n]."""
    return decode(payload.view(scales.numel(), -1), scales[:, None]).view(-1)


def sum_of_rows(rows: Tensor) -> Tensor:
    """The sum [...] of `rows` [d, ...] in FP32 and in their order, rounded to their dtype once."""
    total = rows[0].float()
    for row in rows[1:]:
        total = total + row.float()
    return total.to(rows.dtype)


@operator(gpu=".wire.triton", mutates=["accumulator"])
def accumulate_rows_(
    payload: Tensor,
    scales: Tensor | None,
    accumulator: Tensor,
    factor: float,
    add: bool,
    own_row: int,
    own_payload: Tensor | None,
    own_scales: Tensor | None,
    addend: Tensor | None,
) -> None:
    """``accumulator (+)= Σ_r payload_r · (scales_r · factor)`` in FP32, one row after another, in place.

    A BF16 accumulator is rounded to once, at the end; with an addend, before it is added and after.

    Args:
        payload: flat FP8 [d · n], one version of the sum's n elements after another; or BF16 or FP32, without
        scales: FP32 [d · n / block], the block scales of each row.
        accumulator: FP32 or BF16 [n], n a multiple of the block. Unless `add`, row 0 takes the place of what it holds.
        factor: rounded to FP32; multiplies the scales, or where there are none the values.
        own_row: index of a row that lies elsewhere, in `own_payload` [n] and `own_scales` [n / block]; -1 if none does.
        addend: [n] in the accumulator's dtype, added to the rounded sum as an addition after a reduction is.
    """
    num_rows = payload.numel() // accumulator.numel()
    every_scale = [None] * num_rows if scales is None else list(scales.view(num_rows, -1))
    rows = list(zip(payload.view(num_rows, -1), every_scale, strict=True))
    if own_payload is not None:
        rows[own_row] = (own_payload, own_scales)
    total = accumulator.float() if add else None
    for values, row_scales in rows:
        value = values.float() * factor if row_scales is None else dequantize_blockwise(values, row_scales * factor)
        total = value if total is None else total + value
    assert total is not None
    accumulator.copy_(total)
    if addend is not None:
        accumulator += addend


def load_state(payload: Tensor, scales: Tensor | None) -> Tensor:
    """Optimizer state [n] in any storage dtype → FP32 [n]; `scales` is None for unscaled dtypes."""
    return payload.float() if scales is None else dequantize_blockwise(payload, scales)


def store_state_(value: Tensor, payload: Tensor, scales: Tensor | None, noise: Tensor | None = None) -> None:
    """[n] → optimizer state [n] in its storage dtype, in place; `scales` is None for unscaled dtypes.

    Args:
        noise: FP32 [n], for stochastic rounding to an integer; None rounds to nearest.
    """
    if scales is None:
        payload.copy_(value)
        return
    blocks = value.reshape(scales.numel(), -1).float()
    # The scale of companded integers is the amax itself (their largest code decodes to 1 · scale).
    power_of_two = payload.dtype not in COMPANDED_DTYPES
    scale = scale_from_amax(blocks.abs().amax(dim=1), payload.dtype, power_of_two=power_of_two)
    scales.copy_(scale)
    noise = None if noise is None else noise.view_as(blocks)
    payload.copy_(encode(blocks, scale[:, None], payload.dtype, noise).view(-1))


@operator(gpu=".quantize.blockwise_triton", fake=lambda a: fp32(a.payload, 1))
def squared_norm(payload: Tensor, scales: Tensor | None) -> Tensor:
    """Σ x² of flat `payload` [n] (with its block scales, if any), FP32 [1]; NaN or inf where any element is."""
    # Not torch.dot: some processors' BLAS adds one after the other, with an error that grows with n.
    return load_state(payload, scales).square().sum().reshape(1)


@operator(gpu=".adamw.triton", mutates=["exp_avg", "exp_avg_sq", "master", "weight", "chunk_amax"])
def adamw_step_(
    state: AdamState,
    hyper: AdamHyper,
    grad_factor: Tensor,
    step: Tensor,
    weight: Tensor | None,
    chunk_amax: Tensor | None,
) -> None:
    """One Adam(W) step over flat storage, computed in FP32, every operand in its own storage dtype, in place.

    AdamW (Loshchilov & Hutter, arXiv 1711.05101, Algorithm 2; `AdamHyper.decoupled`) or Adam with the L2 term in the
    gradient, which enters both moments. The update uses the moments before they are rounded to storage. Moments in int8
    and uint8 are rounded stochastically, by a hash of (element of this flat storage, `step`).

    Args:
        grad_factor: FP32 [1], multiplies the gradient (clipping, averaging). Where it is not finite, nothing is
            written: the step is skipped on the device, with no host synchronisation.
        step: FP32 [1], the number of this step counted from 1 over steps that were not skipped.
        weight: flat [n] 16- or 32-bit copy that receives the new value as the master stores it, or None (FP8 weights
            are derived afterwards with `chunk_amax`; with no separate master, the master is the weight).
        chunk_amax: FP32 [n / chunk] receives the largest magnitude of each chunk of the new master, or None.
    """
    master = state.master

    def update() -> None:
        g = load_state(*state.grad) * grad_factor
        p = adam_update_(g, load_state(*master), state.exp_avg, state.exp_avg_sq, step, hyper)
        store_state_(p, *master)
        stored = load_state(*master)
        if weight is not None:
            weight.copy_(stored)
        if chunk_amax is not None:
            torch.amax(stored.abs().view(chunk_amax.numel(), -1), dim=1, out=chunk_amax)

    update_where_finite(grad_factor, [*state.exp_avg, *state.exp_avg_sq, *master, weight, chunk_amax], update)


def adam_update_(
    g: Tensor, p: Tensor, exp_avg: FlatState, exp_avg_sq: FlatState, step: Tensor, hyper: AdamHyper
) -> Tensor:
    """The new FP32 parameters [n] from the scaled gradient `g` and the old ones `p`; moments move in place."""
    lr, beta1, beta2, eps, weight_decay, decoupled = hyper
    if decoupled:
        p = p * (1.0 - lr * weight_decay)
    else:
        g = g + weight_decay * p
    m = beta1 * load_state(*exp_avg) + (1.0 - beta1) * g
    v = beta2 * load_state(*exp_avg_sq) + (1.0 - beta2) * g * g
    # In FP64, so that every device rounds the same numbers to FP32.
    bias_correction1 = -torch.expm1((step * _log(beta1)).double()).float()
    bias_correction2 = -torch.expm1((step * _log(beta2)).double()).float()
    _store_moment_(m, exp_avg, step, companding.EXP_AVG_STREAM)
    _store_moment_(v, exp_avg_sq, step, companding.EXP_AVG_SQ_STREAM)
    return p - (lr / bias_correction1) * m / (companding.square_root(v / bias_correction2) + eps)


def _store_moment_(value: Tensor, moment: FlatState, step: Tensor, stream: int) -> None:
    companded = moment.payload.dtype in COMPANDED_DTYPES
    noise = companding.rounding_noise(value.numel(), step, stream) if companded else None
    store_state_(value, *moment, noise)


def update_where_finite(factor: Tensor, written: Sequence[Tensor | None], update: Callable[[], None]) -> None:
    """Run `update`, which writes the tensors `written`; where `factor` [1] is not finite they stay as they were.

    On a GPU nothing waits: the update runs in any case and is taken back there (one copy of `written`).
    """
    if factor.device.type == "cpu":
        if bool(torch.isfinite(factor)):
            update()
        return
    tensors = [tensor for tensor in written if tensor is not None]
    before = [tensor.clone() for tensor in tensors]
    update()
    keep_new = torch.isfinite(factor)
    for tensor, old in zip(tensors, before, strict=True):
        as_bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize]
        new_bits = tensor.view(as_bits)
        new_bits.copy_(torch.where(keep_new, new_bits, old.view(as_bits)))


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0.0 else -math.inf


@operator(gpu=".adamw.triton", mutates=["payload"])
def derive_fp8_weights_(
    master: Tensor, master_scales: Tensor | None, payload: Tensor, weight_scales: Tensor, chunk_tensor: Tensor
) -> None:
    """FP8 weights from their master: ``payload = cast(master / scale of its tensor)``, in place.

    Args:
        master: flat [n] with block scales or None. payload: flat E4M3 [n].
        weight_scales: FP32 [num_tensors], one a tensor. chunk_tensor: int32 [n / chunk], the tensor of each chunk.
    """
    scale = weight_scales[chunk_tensor.long()][:, None]
    value = load_state(master, master_scales).view(chunk_tensor.numel(), -1)
    payload.copy_(encode(value, scale, payload.dtype).view(-1))
