"""The block-scaled GEMM: its specification in plain PyTorch, and the limits of Hopper's variant on every device."""

from __future__ import annotations

import torch
from torch import Tensor

from ...dtypes import E5M2, FP8_DTYPES, FP8_GEMM_MULTIPLE
from ..quantize.blocks import dequantize_blocks, has_tile_scales
from ..registration import operator
from .reference import check_addend

#: Operands that passed: the check would take the host longer than the launch.
_fine: set[tuple[object, ...]] = set()


def check_block_scaled_mm(a: Tensor, b: Tensor, scales_a: Tensor, scales_b: Tensor) -> None:
    """Check a GEMM a [M, K] · b [N, K]ᵀ against cuBLASLt's limits, on every device (a CPU would accept more).

    Raises:
        ValueError: operands that are not FP8, both E5M2, not contiguous, of sizes that cuBLASLt does not take, with
            scales of another shape than in `quantize.blocks`, or both with scales of tiles.
    """
    key = (a.dtype, b.dtype, a.shape, b.shape, scales_a.shape, scales_b.shape)
    if key in _fine and all(tensor.is_contiguous() for tensor in (a, b, scales_a, scales_b)):
        return
    name = "block-scaled GEMM"
    if a.dtype not in FP8_DTYPES or b.dtype not in FP8_DTYPES or (a.dtype == E5M2 and b.dtype == E5M2):
        raise ValueError(f"{name} takes E4M3×E4M3, E4M3×E5M2 or E5M2×E4M3, not {a.dtype} × {b.dtype}")
    if not (a.is_contiguous() and b.is_contiguous()):
        raise ValueError(f"{name} takes contiguous (K-major) operands, not strides {a.stride()} × {b.stride()}")
    (m, k), (n, k_of_b) = a.shape, b.shape
    if k != k_of_b:
        raise ValueError(f"{name} operands differ in K: a is [{m}, {k}], b is [{n}, {k_of_b}]")
    for letter, size in (("M", m), ("N", n), ("K", k)):
        if size % FP8_GEMM_MULTIPLE:
            sizes = f"M={m} N={n} K={k}"
            raise ValueError(f"{name} size {letter}={size} is not a multiple of {FP8_GEMM_MULTIPLE} ({sizes})")
    if has_tile_scales(a, scales_a) and has_tile_scales(b, scales_b):
        raise ValueError(f"{name} takes 128×128 tiles on one side only: cast a or b with quantize_blocks")
    _fine.add(key)


def _check_block_scaled_mm_into(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    scales_a: Tensor,
    scales_b: Tensor,
    bias: Tensor | None,
    addend: Tensor | None,
) -> None:
    check_block_scaled_mm(a, b, scales_a, scales_b)
    assert out.shape == (a.shape[0], b.shape[0]) and out.is_contiguous(), (out.shape, a.shape, b.shape)
    assert bias is None or out.dtype == bias.dtype != torch.float32, (bias, out.dtype)
    if addend is not None:
        check_addend(out, addend)


@operator(gpu=".block_scaled_cublaslt", mutates=["out"], check=_check_block_scaled_mm_into)
def block_scaled_mm_into_(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    scales_a: Tensor,
    scales_b: Tensor,
    *,
    bias: Tensor | None = None,
    addend: Tensor | None = None,
) -> None:
    """``Σ_j (a_j b_jᵀ) · scales_a_j · scales_b_j (+ bias) (+ addend)`` over the blocks j of 128 along K, into `out`.

    Accumulated in FP32 and rounded to `out`'s dtype once. The specification multiplies by a scale before the sum over a
    block; Hopper multiplies after it. The results differ by FP32's rounding.

    Args:
        out: contiguous [M, N] in BF16, FP16 or FP32.
        a, b: FP8 [M, K] and [N, K], contiguous; all sizes are multiples of 16. The last block along K may be shorter.
        scales_a, scales_b: from `quantize.blocks`, of blocks or tiles; the shape tells which. Not tiles for both.
        bias: [N] in `out`'s dtype, or None. It must be None with an FP32 `out`.
        addend: contiguous [M, N] in `out`'s dtype, or None.

    Raises:
        ValueError: see `check_block_scaled_mm`.
    """
    product = dequantize_blocks(a, scales_a) @ dequantize_blocks(b, scales_b).t()
    for summand in (bias, addend):
        if summand is not None:
            product += summand.float()
    out.copy_(product)
