"""Cases of `kernels.py` for experts: rows grouped by expert, their activation, and GEMMs beside torch's. A floor reads
each token once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from fused_cases import Scaling, rotating
from kernel_timing import Case, Rotating
from torch import Tensor

from fp8_megatron.activation_functions import Activation
from fp8_megatron.dtypes import E4M3, E5M2, GEMM_BLOCK, GRAD_BLOCK, GROUP_ROWS
from fp8_megatron.kernels import ops
from fp8_megatron.kernels.grouped import gemm_cuda

_SWIGLU = Activation("swiglu")


def rows(device: torch.device, tokens: int, hidden: int, num_experts: int, top_k: int) -> Iterator[Case]:
    """Where rows lie, tokens' rows to their experts, and the sum of a token's rows."""
    num_rows = tokens * top_k
    at = f"{tokens}×{hidden}, {top_k} of {num_experts}"
    chosen = _balanced(device, tokens, num_experts, top_k)
    offsets, source, places = ops.routed_rows(chosen, num_rows, top_k)
    yield Case(
        f"routed_rows {at}",
        lambda _: ops.routed_rows(chosen, num_rows, top_k),
        tokens * num_experts + 4 * (num_experts + 2 * num_rows),
    )
    x = Rotating(lambda: torch.randn(tokens, hidden, device=device).to(E4M3))
    of_blocks = torch.ones(hidden // GEMM_BLOCK, tokens, device=device)
    for layout, rowwise, transposed in (("", True, False), (" + transposed", True, True), (" transposed", False, True)):
        layouts = dict(rowwise=rowwise, transposed=transposed)
        yield Case(
            f"gather_rows E4M3{layout} {at}",
            lambda i, layouts=layouts: ops.gather_rows(x(i), source, num_experts, offsets, **layouts),
            (tokens + (rowwise + transposed) * num_rows) * hidden + 4 * num_rows,
        )
        yield Case(
            f"gather_blocks E4M3{layout} {at}",
            lambda i, layouts=layouts: ops.gather_blocks(
                x(i), of_blocks, source, num_experts, offsets, power_of_two=True, **layouts
            ),
            (tokens + (rowwise + transposed) * num_rows) * hidden * (1 + 4 / GEMM_BLOCK) + 4 * num_rows,
        )
    y = rotating(device, num_rows, hidden)
    yield Case(f"sum_rows {at}", lambda i: ops.sum_rows(y(i), places), 2 * (num_rows + tokens) * hidden + 4 * num_rows)


def activations(device: torch.device, tokens: int, width: int, num_experts: int, top_k: int) -> Iterator[Case]:
    """Experts' SwiGLU with an output of [tokens · top_k, width]: to FP8; backward in both layouts."""
    num_rows = tokens * top_k
    n, at = num_rows * width, f"{num_rows}×{width}, {num_experts} experts"
    offsets = ops.routed_rows(_balanced(device, tokens, num_experts, top_k), num_rows, top_k)[0]
    probs = torch.rand(num_rows, device=device)
    z, grad = rotating(device, num_rows, 2 * width), rotating(device, num_rows, width)
    scaling = Scaling(device)
    for name, passes, scale in scaling:
        yield _activation(
            f"experts' SwiGLU → E4M3, {name} {at}", (z, probs, offsets), scale, (4 * n + 4 * num_rows) * passes + n
        )
    for name, passes, scale in scaling:
        yield _backward(
            f"experts' SwiGLU backward → E5M2, {name} {at}",
            (grad, z, probs, offsets, scaling.scale),
            scale,
            (6 * n + 4 * num_rows) * passes + 5 * n + 4 * num_rows,
        )

    operands, per_element = (probs, offsets, _SWIGLU, E4M3), 1 + 4 / GEMM_BLOCK
    yield Case(
        f"experts' SwiGLU → E4M3, blocks {at}",
        lambda i: ops.expert_activation_quantize_blocks(z(i), *operands, power_of_two=True),
        4 * n + 4 * num_rows + per_element * n,
    )
    yield Case(
        f"experts' SwiGLU backward → E4M3, blocks {at}",
        lambda i: ops.expert_activation_backward_quantize_blocks(grad(i), z(i), *operands, power_of_two=True),
        6 * n + 4 * num_rows + 5 * per_element * n + 4 * num_rows,
    )


def gemms(device: torch.device, rows: int, num_experts: int, k: int, n: int) -> Iterator[Case]:
    """GEMMs of [rows, k] with experts' weights [n, k], each with as many rows, beside torch's and one dense GEMM."""
    assert rows % (num_experts * GROUP_ROWS) == 0, (rows, num_experts)
    at, num_flops = f"{rows}, {num_experts} experts, {k} → {n}", 2 * rows * k * n
    offsets = torch.arange(num_experts + 1, device=device, dtype=torch.int32) * (rows // num_experts)
    ends, one = offsets[1:], torch.ones(1, device=device)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    x, grad, weight = random(rows, k), random(rows, n), random(num_experts, n, k)
    x8, grad8, weight8 = x.to(E4M3), grad.to(E5M2), weight.to(E4M3)
    weight_t, x_t, grad_t = (each.mT.contiguous() for each in (weight8, x8, grad8))
    scales = torch.ones(num_experts, device=device)
    out = torch.empty_like(weight8)
    out_scales = torch.empty(out.numel() // GRAD_BLOCK, device=device)

    def scaled(a: Tensor, b: Tensor, scales_a: int, *scales_b: int) -> Tensor:
        """torch's, which has a scale a row of `a` and a column of `b`, E4M3 alone."""
        ones_a, ones_b = torch.ones(scales_a, device=device), torch.ones(scales_b, device=device)
        settings = dict(offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True)
        return torch._scaled_grouped_mm(a, b, ones_a, ones_b, **settings)

    def ones(*shape: int) -> Tensor:
        return torch.ones(shape, device=device)

    grad_e4m3_t = grad_t.to(torch.bfloat16).to(E4M3)
    grad_e4m3 = grad_e4m3_t.mT.contiguous()
    blocks, tiles = [size // GEMM_BLOCK for size in (rows, k, n)], ones(num_experts, n // GEMM_BLOCK, k // GEMM_BLOCK)
    of_rows = [ones(blocks[1], rows), ones(blocks[2], rows)]
    of_columns = [ones(blocks[0], n), ones(blocks[0], k)]
    calls = {
        "dense E4M3": lambda _: ops.scaled_mm(x8, weight8[0], one, one, use_fast_accum=True),
        "grouped forward": lambda _: ops.grouped_mm(x8, weight8, one, scales, offsets),
        "torch FP8 forward": lambda _: scaled(x8, weight8.mT, rows, num_experts, n),
        "torch BF16 forward": lambda _: torch.nn.functional.grouped_mm(x, weight.mT, offs=ends),
        "grouped dgrad": lambda _: ops.grouped_mm(grad8, weight_t, one, scales, offsets),
        "grouped wgrad → E4M3": lambda _: ops.grouped_wgrad_to_fp8_(out, out_scales, grad_t, x_t, one, one, offsets),
        "blockwise forward": lambda _: ops.grouped_mm(x8, weight8, of_rows[0], tiles, offsets),
        "blockwise dgrad": lambda _: ops.grouped_mm(grad_e4m3, weight_t, of_rows[1], tiles.mT, offsets),
        "blockwise wgrad → E4M3": lambda _: ops.grouped_wgrad_to_fp8_(
            out, out_scales, grad_e4m3_t, x_t, *of_columns, offsets
        ),
        "Triton blockwise forward": in_triton(lambda _: ops.grouped_mm(x8, weight8, of_rows[0], tiles, offsets)),
        "Triton blockwise dgrad": in_triton(
            lambda _: ops.grouped_mm(grad_e4m3, weight_t, of_rows[1], tiles.mT, offsets)
        ),
        "torch FP8 wgrad": lambda _: scaled(grad_e4m3_t, x_t.mT, n * num_experts, k * num_experts),
        "torch BF16 wgrad": lambda _: torch.nn.functional.grouped_mm(grad.mT, x, offs=ends),
    }
    for name, call in calls.items():
        yield Case(f"{name} {at}", call, num_flops=num_flops)


def in_triton(call: Callable[[int], object]) -> Callable[[int], object]:
    """A call whose grouped GEMMs with scales of blocks are Triton's on every GPU."""

    def without_cuda(index: int) -> object:
        with patch.object(gemm_cuda, "compiled_kernel", lambda *_: None):
            return call(index)

    return without_cuda


def _activation(name: str, operands: tuple[Rotating, Tensor, Tensor], scale: dict[str, Any], num_bytes: float) -> Case:
    z, probs, offsets = operands
    experts = ops.ExpertRows(probs, offsets)
    return Case(name, lambda i: ops.activation_quantize(z(i), _SWIGLU, E4M3, experts, **scale), num_bytes)


def _backward(
    name: str, operands: tuple[Rotating, Rotating, Tensor, Tensor, Tensor], scale: dict[str, Any], num_bytes: float
) -> Case:
    grad, z, probs, offsets, activation_scale = operands
    again, experts = dict(activation_dtype=E4M3, activation_scale=activation_scale), ops.ExpertRows(probs, offsets)
    return Case(
        name,
        lambda i: ops.activation_backward_quantize(grad(i), z(i), _SWIGLU, E5M2, experts, **again, **scale),
        num_bytes,
    )


def _balanced(device: torch.device, tokens: int, num_experts: int, top_k: int) -> Tensor:
    """bool [tokens, num_experts]: neighbouring experts of each token, in a random order of tokens. Each expert has as
    many tokens, a multiple of `GROUP_ROWS`, so that no row is padding.
    """
    assert num_experts % top_k == 0 and tokens * top_k % (num_experts * GROUP_ROWS) == 0, (tokens, num_experts)
    first = torch.randperm(tokens, device=device) * top_k % num_experts
    chosen = torch.zeros(tokens, num_experts, dtype=torch.bool, device=device)
    return chosen.scatter_(1, first[:, None] + torch.arange(top_k, device=device), True)
