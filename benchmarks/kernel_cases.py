"""Cases of `kernels.py` without fusion: casts, block-scaled storage, the optimizer's step, GEMMs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from kernel_timing import Case, Rotating
from torch import Tensor

from fp8_megatron.dtypes import E4M3, E5M2, GRAD_BLOCK, STATE_BLOCK
from fp8_megatron.kernels import ops

HYPER = ops.AdamHyper(lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, decoupled=True)
_LAYOUTS = (("", True, False), (" + transposed", True, True), (" transposed", False, True))


def quantization(device: torch.device, m: int, k: int) -> Iterator[Case]:
    """amax, both modes of tensorwise quantisation of [m, k], the transposition of a payload, and a weight's cast."""
    n, at = m * k, f"{m}×{k}"
    x = Rotating(lambda: torch.randn(m, k, device=device, dtype=torch.bfloat16))
    scale, recorded = torch.tensor([0.02], device=device), torch.zeros(3, device=device)
    yield Case(f"amax {at}", lambda i: ops.amax(x(i)), 2 * n)
    for layout, rowwise, transposed in _LAYOUTS:
        yield from _casts(x, scale, recorded, at, layout, rowwise=rowwise, transposed=transposed)
    payload = Rotating(lambda: ops.quantize_current(x(0), E4M3)[0])
    yield Case(f"transpose {at}", lambda i: ops.transpose(payload(i)), 2 * n)
    for transposed in (False, True):
        yield _weight_cast(device, m, k, scale, transposed=transposed)


def _weight_cast(device: torch.device, m: int, k: int, scale: Tensor, *, transposed: bool) -> Case:
    """A weight at O1 and O2, in one layout."""
    weight = Rotating(lambda: torch.randn(m, k, device=device, dtype=torch.float16))
    scales = torch.ones(m * k // STATE_BLOCK, device=device)
    layout = " transposed" if transposed else ""
    return Case(
        f"quantize_weight FP16/{STATE_BLOCK}{layout} {m}×{k}",
        lambda i: ops.quantize_weight(weight(i), scales, scale, E4M3, transposed=transposed),
        (2 + 4 / STATE_BLOCK + 1) * m * k,
    )


def _casts(
    x: Rotating, scale: Tensor, recorded: Tensor, at: str, layout: str, *, rowwise: bool, transposed: bool
) -> Iterator[Case]:
    n, written = x(0).numel(), rowwise + transposed
    layouts = dict(rowwise=rowwise, transposed=transposed)
    yield Case(
        f"quantize_current{layout} {at}", lambda i: ops.quantize_current(x(i), E4M3, **layouts), (2 + 2 + written) * n
    )
    yield Case(
        f"quantize_with_scale{layout} {at}",
        lambda i: ops.quantize_with_scale(x(i), scale, E4M3, amax_out=recorded, **layouts),
        (2 + written) * n,
    )


def blockwise(device: torch.device, n: int) -> Iterator[Case]:
    """Block-scaled storage of n elements: the gradient's quantisation, its norm, and the sum of d ranks' rows."""
    x = torch.randn(n, device=device)
    payload = torch.empty(n, dtype=E4M3, device=device)
    scales = torch.empty(n // GRAD_BLOCK, device=device)
    at = f"2^{n.bit_length() - 1}"
    per_scale = 4 / GRAD_BLOCK
    yield Case(
        f"quantize_blockwise_ FP32 → E4M3/{GRAD_BLOCK} {at}",
        lambda _: ops.quantize_blockwise_(x, payload, scales),
        (4 + 1 + per_scale) * n,
    )
    yield Case(
        f"dequantize_blockwise E4M3/{GRAD_BLOCK} {at}",
        lambda _: ops.dequantize_blockwise(payload, scales),
        (1 + 4 + per_scale) * n,
    )
    yield Case(f"squared_norm E4M3/{GRAD_BLOCK} {at}", lambda _: ops.squared_norm(payload, scales), (1 + per_scale) * n)
    yield Case(f"squared_norm FP32 {at}", lambda _: ops.squared_norm(x, None), 4 * n)
    for num_rows in (4, 8):
        for add in (False, True):
            yield _sum_of_rows(payload, scales, num_rows, add=add)


def _sum_of_rows(payload: Tensor, scales: Tensor, num_rows: int, *, add: bool) -> Case:
    shard = payload.numel() // num_rows
    accumulator = torch.zeros(shard, device=payload.device)
    return Case(
        f"accumulate_rows_ {num_rows} ranks' rows of 2^{shard.bit_length() - 1}{', add' if add else ''}",
        lambda _: ops.accumulate_rows_(payload, scales, accumulator, factor=1 / num_rows, add=add),
        (num_rows * (1 + 4 / GRAD_BLOCK) + 4 * (1 + add)) * shard,
    )


def optimizer(device: torch.device, n: int, chunk: int = 4096) -> Iterator[Case]:
    """The fused step over n parameters: FP32 (level bf16), O3, 8-bit moments, split master; FP8 weights derived; Muon's
    two halves."""
    at = f"2^{n.bit_length() - 1}"
    one = torch.ones(1, device=device)
    values = [1e-3 * torch.randn(n, device=device), 1e-4 * torch.randn(n, device=device)]
    values += [1e-8 * torch.rand(n, device=device), 0.02 * torch.randn(n, device=device)]
    weight = torch.empty(n, dtype=torch.bfloat16, device=device)
    scalars: dict[str, Tensor] = dict(grad_factor=one, step=one)
    unscaled = ops.AdamState(*(ops.FlatState(value) for value in values))
    yield Case(
        f"adamw_step_ FP32 + BF16 weight {at}",
        lambda _: ops.adamw_step_(unscaled, HYPER, weight=weight, **scalars),
        (4 + 3 * 8 + 2) * n,
    )
    forms = ((E4M3, GRAD_BLOCK), (E4M3, STATE_BLOCK), (torch.float16, STATE_BLOCK), (torch.float16, STATE_BLOCK))
    facts = torch.tensor([[1, 0, 1 << 30, 1 << 30, 0]], dtype=torch.int32, device=device)
    places = ops.Places(facts.repeat(n // chunk, 1))
    scaled = ops.AdamState(*(_stored(value, *form) for value, form in zip(values, forms, strict=True)), places)
    chunk_amax = torch.empty(n // chunk, device=device)
    per_chunk = (4 + 20) / chunk
    o3_bytes = (1 + 2 * (1 + 2 + 2) + 4 / GRAD_BLOCK + 3 * 8 / STATE_BLOCK + per_chunk) * n
    yield Case(
        f"adamw_step_ O3 {at}", lambda _: ops.adamw_step_(scaled, HYPER, chunk_amax=chunk_amax, **scalars), o3_bytes
    )
    part = scaled._replace(places=_in_rows(places, 1000))
    yield Case(
        f"adamw_step_ O3, rows of a tensor-parallel part {at}",
        lambda _: ops.adamw_step_(part, HYPER, chunk_amax=chunk_amax, **scalars),
        o3_bytes,
    )
    weights = torch.empty(n, dtype=E4M3, device=device)
    chunk_tensor = torch.zeros(n // chunk, dtype=torch.int32, device=device)
    yield Case(
        f"derive_fp8_weights_ {at}",
        lambda _: ops.derive_fp8_weights_(*scaled.master, weights, one, chunk_tensor),
        (2 + 1 + 4 / STATE_BLOCK + 4 / chunk) * n,
    )
    companded = [_stored(values[1], torch.int8, STATE_BLOCK), _stored(values[2], torch.uint8, STATE_BLOCK)]
    for value, moment in zip(values[1:3], companded, strict=True):
        yield _companding(value, moment)
    with_companded = ops.AdamState(scaled.grad, *companded, scaled.master, places)
    moments = (1 + 2 * (1 + 1) + 4 / GRAD_BLOCK + 2 * 8 / STATE_BLOCK + per_chunk) * n
    yield Case(
        f"adamw_step_ O3, int8 + uint8 moments {at}",
        lambda _: ops.adamw_step_(with_companded, HYPER, chunk_amax=chunk_amax, **scalars),
        moments + (2 * 2 + 8 / STATE_BLOCK) * n,
    )
    correction = torch.zeros(n, dtype=torch.int8, device=device)
    weight_scales, new_weight_scales = (torch.full((1,), 2.0**-11, device=device) for _ in range(2))
    split = ops.SplitAdamState(
        *(scaled.grad, *companded), weights, correction, weight_scales, new_weight_scales, chunk_tensor, places
    )
    yield Case(
        f"adamw_split_step_ int8 + uint8 moments {at}",
        lambda _: ops.adamw_split_step_(split, HYPER, chunk_amax=chunk_amax, **scalars),
        moments + (2 * (1 + 1) + 4 / chunk) * n,
    )
    state = ops.MomentumState(*scaled[:2], places)
    update = torch.randn(n, device=device).bfloat16()
    yield Case(
        f"momentum_step_ O3 {at}",
        lambda _: ops.momentum_step_(state, update, beta=0.95, nesterov=True, **scalars),
        (1 + 2 * 1 + 2 + 4 / GRAD_BLOCK + 8 / STATE_BLOCK + 20 / chunk) * n,
    )
    yield Case(
        f"orthogonal_step_ O3 {at}",
        lambda _: ops.orthogonal_step_(
            update, scaled.master, places, lr=1e-3, weight_decay=0.1, chunk_amax=chunk_amax, **scalars
        ),
        (2 + 2 * 2 + 8 / STATE_BLOCK + per_chunk) * n,
    )
    master = ops.SplitMaster(*split[3:])
    yield Case(
        f"orthogonal_split_step_ {at}",
        lambda _: ops.orthogonal_split_step_(
            update, master, lr=1e-3, weight_decay=0.1, chunk_amax=chunk_amax, **scalars
        ),
        (2 + 2 * (1 + 1) + per_chunk + 4 / chunk) * n,
    )


def _in_rows(places: ops.Places, width: int) -> ops.Places:
    """The same units as the upper left quarter of parameters with twice as long rows."""
    assert places.table is not None
    table = places.table.clone()
    table[:, 2:] = width
    return ops.Places(table, width)


def _stored(value: Tensor, dtype: torch.dtype, block: int) -> ops.FlatState:
    payload = torch.empty(value.numel(), dtype=dtype, device=value.device)
    scales = torch.empty(value.numel() // block, device=value.device)
    ops.quantize_blockwise_(value, payload, scales)
    return ops.FlatState(payload, scales)


def _companding(value: Tensor, state: ops.FlatState) -> Case:
    name, n = str(state.payload.dtype).removeprefix("torch."), value.numel()
    return Case(
        f"quantize_blockwise_ FP32 → {name}/{STATE_BLOCK} 2^{n.bit_length() - 1}",
        lambda _: ops.quantize_blockwise_(value, state.payload, state.scales),
        (4 + 1 + 4 / STATE_BLOCK) * n,
    )


def gemms(device: torch.device, m: int, n: int, k: int) -> Iterator[Case]:
    """The FP8 GEMM with each accumulator beside BF16's."""
    at, num_flops = f"M={m} N={n} K={k}", 2 * m * n * k
    a, b = (torch.randn(rows, k, device=device, dtype=torch.bfloat16) for rows in (m, n))
    out = torch.empty(m, n, device=device, dtype=torch.bfloat16)
    yield Case(f"matmul BF16 {at}", lambda _: torch.mm(a, b.t(), out=out), num_flops=num_flops)
    for format_a, fast, name in ((E4M3, True, "E4M3 fast"), (E4M3, False, "E4M3 split"), (E5M2, False, "E5M2 split")):
        yield _fp8_gemm(f"scaled_mm {name} {at}", a, b, format_a, fast=fast)


def _fp8_gemm(name: str, a: Tensor, b: Tensor, format_a: torch.dtype, *, fast: bool) -> Case:
    one = torch.ones(1, device=a.device)
    qa, qb = ops.quantize_current(a, format_a)[0], ops.quantize_current(b, E4M3)[0]
    return Case(
        name,
        lambda _: ops.scaled_mm(qa, qb, one, one, use_fast_accum=fast),
        num_flops=2 * a.shape[0] * b.shape[0] * a.shape[1],
    )
