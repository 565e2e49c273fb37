"""The FP8 GEMM on CUDA, and the limits of Hopper's FP8 tensor cores.

It is cuBLASLt's (see `cublaslt`); where that cannot be reached directly, through ``torch._scaled_mm``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...formats import E5M2, FP8_DTYPES, FP8_GEMM_MULTIPLE
from .. import reference
from . import cublaslt

#: Dtypes and shapes that passed: the check would take the host longer than the launch.
_fine: set[tuple[torch.dtype, torch.dtype, torch.Size, torch.Size]] = set()


def check_scaled_mm(a: Tensor, b: Tensor) -> None:
    """Hold a GEMM a [M, K] · b [N, K]ᵀ to what Hopper runs, on every device (a CPU would accept more).

    Raises:
        ValueError: operands not FP8, both E5M2, not K-major, or a size that is not a multiple of 16.
    """
    key = (a.dtype, b.dtype, a.shape, b.shape)
    if key in _fine and a.is_contiguous() and b.is_contiguous():
        return
    if a.dtype not in FP8_DTYPES or b.dtype not in FP8_DTYPES or (a.dtype == E5M2 and b.dtype == E5M2):
        raise ValueError(f"FP8 GEMM takes E4M3×E4M3, E4M3×E5M2 or E5M2×E4M3, not {a.dtype} × {b.dtype}")
    if not (a.is_contiguous() and b.is_contiguous()):
        raise ValueError(f"FP8 GEMM takes contiguous (K-major) operands, not strides {a.stride()} × {b.stride()}")
    m, k = a.shape
    n, k_of_b = b.shape
    if k != k_of_b:
        raise ValueError(f"FP8 GEMM operands differ in K: a is [{m}, {k}], b is [{n}, {k_of_b}]")
    for name, size in (("M", m), ("N", n), ("K", k)):
        if size % FP8_GEMM_MULTIPLE:
            sizes = f"M={m} N={n} K={k}"
            raise ValueError(f"FP8 GEMM size {name}={size} is not a multiple of {FP8_GEMM_MULTIPLE} ({sizes})")
    _fine.add(key)


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> Tensor:
    """`reference.scaled_mm` on cuBLASLt: tensorwise scales, FP32 (or, fast, shortened) accumulation."""
    out = torch.empty((a.shape[0], b.shape[0]), dtype=out_dtype, device=a.device)
    scaled_mm_into_(out, a, b, scale_a, scale_b, bias, use_fast_accum, None)
    return out


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
    """`scaled_mm` plus `addend` written to `out`; both are contiguous."""
    if cublaslt.is_available():
        cublaslt.matmul(a, b, scale_a, scale_b, bias, out, use_fast_accum=use_fast_accum, addend=addend)
        return
    scales = {"scale_a": scale_a, "scale_b": scale_b}
    torch._scaled_mm(a, b.t(), **scales, bias=bias, out_dtype=out.dtype, use_fast_accum=use_fast_accum, out=out)
    if addend is not None:
        out += addend


def scaled_mm_to_fp8_(
    out: Tensor, amax: Tensor, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, inverse: Tensor
) -> None:
    """`reference.scaled_mm_to_fp8_` on cuBLASLt: the cast is the GEMM's epilogue."""
    if not cublaslt.is_available():
        product = torch._scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.float32)
        amax.copy_(product.abs().amax())
        out.copy_(reference.encode(product, inverse.reciprocal(), out.dtype))
        return
    cublaslt.matmul(a, b, scale_a, scale_b, None, out, use_fast_accum=False, inverse=inverse, amax=amax)
