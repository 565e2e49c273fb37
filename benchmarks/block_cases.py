"""The blockwise recipe's cases of `kernels.py`: casts with scales of blocks or tiles, and the GEMM that takes them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from fused_cases import rotating
from grouped_cases import in_triton
from kernel_timing import Case, Rotating
from torch import Tensor

from fp8_megatron.activation_functions import Activation
from fp8_megatron.dtypes import E4M3, GEMM_BLOCK, GRAD_BLOCK
from fp8_megatron.kernels import ops

#: Bytes of scales for each element of one layout.
_PER_BLOCK, _PER_TILE = 4 / GEMM_BLOCK, 4 / GEMM_BLOCK**2


def casts(device: torch.device, m: int, k: int) -> Iterator[Case]:
    """Blocks of an activation [m, k], tiles of a weight of this size."""
    n, at = m * k, f"{m}×{k}"
    x = Rotating(lambda: torch.randn(m, k, device=device, dtype=torch.bfloat16))
    for layout, rowwise, transposed in (("", True, False), (" + transposed", True, True), (" transposed", False, True)):
        layouts = dict(rowwise=rowwise, transposed=transposed)
        written = rowwise + transposed
        yield Case(
            f"quantize_blocks{layout} {at}",
            lambda i, layouts=layouts: ops.quantize_blocks(x(i), E4M3, **layouts),
            (2 + written * (1 + _PER_BLOCK)) * n,
        )
        yield Case(
            f"quantize_tiles{layout} {at}",
            lambda i, layouts=layouts: ops.quantize_tiles(x(i), E4M3, **layouts),
            (2 + written * (1 + _PER_TILE)) * n,
        )
    yield Case(
        f"quantize_blocks + transposed + column sums {at}",
        lambda i: ops.quantize_blocks(x(i), E4M3, transposed=True, column_sums=True),
        (2 + 2 * (1 + _PER_BLOCK)) * n + 4 * k,
    )
    tiles = Rotating(lambda: ops.quantize_tiles(x(0), E4M3)[0])
    scales = ops.quantize_tiles(x(0), E4M3)[1]
    yield Case(f"transpose_tiles {at}", lambda i: ops.transpose_tiles(tiles(i), scales), (2 + 2 * _PER_TILE) * n)


def fused(device: torch.device, tokens: int, hidden: int, width: int, kind: str) -> Iterator[Case]:
    """Norm and activation with an output of [tokens, width], cast into blocks in the same pass; and backward."""
    n, at = tokens * hidden, f"{tokens}×{hidden}"
    x, weight = rotating(device, tokens, hidden), torch.ones(hidden, device=device, dtype=torch.bfloat16)
    yield Case(
        f"RMSNorm → E4M3, blocks {at}",
        lambda i: ops.norm_quantize_blocks(x(i), weight, None, E4M3, eps=1e-5, rms=True),
        (2 + 1 + _PER_BLOCK) * n + 4 * tokens,
    )
    _, _, mean, rstd = ops.norm_quantize_blocks(x(0), weight, None, E4M3, eps=1e-5, rms=True)
    yield Case(
        f"RMSNorm again → E4M3 transposed, blocks {at}",
        lambda i: ops.norm_requantize_blocks(x(i), weight, None, mean, rstd, E4M3),
        (2 + 1 + _PER_BLOCK) * n + 4 * tokens,
    )
    function = Activation(kind)
    inputs, title, n, at = function.row.num_inputs, function.row.title, tokens * width, f"{tokens}×{width}"
    z, grad = rotating(device, tokens, inputs * width), rotating(device, tokens, width)
    yield Case(
        f"{title} → E4M3, blocks {at}",
        lambda i: ops.activation_quantize_blocks(z(i), function, E4M3),
        (2 * inputs + 1 + _PER_BLOCK) * n,
    )
    for sums, column_sums in (("", False), (", bias sums", True)):
        yield Case(
            f"{title} backward → E4M3 both layouts{sums}, blocks {at}",
            lambda i, column_sums=column_sums: ops.activation_backward_quantize_blocks(
                grad(i), z(i), function, E4M3, column_sums=column_sums
            ),
            (2 + 2 * inputs + (2 * inputs + 1) * (1 + _PER_BLOCK)) * n + 4 * inputs * width * column_sums,
        )


def gemms(device: torch.device, tokens: int, outputs: int, inputs: int) -> Iterator[Case]:
    """The three GEMMs of a linear layer with scales of blocks and tiles, beside one scale with either accumulator."""
    x, w, grad = (
        torch.randn(shape, device=device, dtype=torch.bfloat16)
        for shape in ((tokens, inputs), (outputs, inputs), (tokens, outputs))
    )
    x_rows, x_scales, x_t, x_scales_t, _ = ops.quantize_blocks(x, E4M3, transposed=True)
    g_rows, g_scales, g_t, g_scales_t, _ = ops.quantize_blocks(grad, E4M3, transposed=True)
    w_rows, w_scales, w_t, w_scales_t = ops.quantize_tiles(w, E4M3, transposed=True)
    yield from _gemm("fprop", x_rows, w_rows, x_scales, w_scales)
    yield from _gemm("dgrad", g_rows, w_t, g_scales, w_scales_t)
    yield from _gemm("wgrad", g_t, x_t, g_scales_t, x_scales_t)
    yield from _in_triton(x_rows, w_rows, x_scales, w_scales, "fprop")
    yield from _in_triton(g_rows, w_t, g_scales, w_scales_t, "dgrad")
    yield from _wgrad_in_triton(g_t, x_t, g_scales_t, x_scales_t)


def _in_triton(a: Tensor, tiles: Tensor, scales_a: Tensor, scales: Tensor, name: str) -> Iterator[Case]:
    """The grouped GEMM as that of one group: Triton's candidate, which adds each block's sum in FP32."""
    (m, k), n = a.shape, tiles.shape[0]
    offsets = torch.tensor([0, m], dtype=torch.int32, device=a.device)
    yield Case(
        f"Triton {name} M={m} N={n} K={k}",
        in_triton(lambda _: ops.grouped_mm(a, tiles[None], scales_a, scales[None], offsets)),
        num_flops=2 * m * n * k,
    )


def _wgrad_in_triton(g_t: Tensor, x_t: Tensor, scales_g: Tensor, scales_x: Tensor) -> Iterator[Case]:
    (n, m), k = g_t.shape, x_t.shape[0]
    offsets = torch.tensor([0, m], dtype=torch.int32, device=g_t.device)
    operands, at = (g_t, x_t, scales_g, scales_x, offsets), f"M={n} N={k} K={m}"
    out = torch.empty(1, n, k, dtype=torch.bfloat16, device=g_t.device)
    yield Case(f"Triton wgrad {at}", lambda _: ops.grouped_wgrad_(out, *operands, adds=False), num_flops=2 * m * n * k)
    payload, scales = out.to(E4M3), torch.empty(n * k // GRAD_BLOCK, device=g_t.device)
    yield Case(
        f"Triton wgrad to E4M3 {at}",
        lambda _: ops.grouped_wgrad_to_fp8_(payload, scales, *operands),
        num_flops=2 * m * n * k,
    )


def _gemm(name: str, a: Tensor, b: Tensor, scales_a: Tensor, scales_b: Tensor) -> Iterator[Case]:
    (m, k), n = a.shape, b.shape[0]
    at, num_flops = f"{name} M={m} N={n} K={k}", 2 * m * n * k
    one = torch.ones(1, device=a.device)
    yield Case(f"block_scaled_mm {at}", lambda _: ops.block_scaled_mm(a, b, scales_a, scales_b), num_flops=num_flops)
    if a.is_cuda:
        of_b = scales_b if scales_b.shape[1] == n else scales_b[:, : k // GEMM_BLOCK].t()
        yield Case(
            f"torch's block_scaled_mm, the heuristic's first {at}",
            lambda _: torch._scaled_mm(a, b.t(), scale_a=scales_a.t(), scale_b=of_b, out_dtype=torch.bfloat16),
            num_flops=num_flops,
        )
    for fast in (False, True):
        yield Case(
            f"scaled_mm {'fast' if fast else 'split'} {at}",
            lambda _, fast=fast: ops.scaled_mm(a, b, one, one, use_fast_accum=fast),
            num_flops=num_flops,
        )
