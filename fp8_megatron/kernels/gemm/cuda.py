"""The FP8 GEMM on CUDA: cuBLASLt's (see `cublaslt`), or ``torch._scaled_mm`` if cuBLASLt cannot be called directly."""

from __future__ import annotations

import torch
from torch import Tensor

from ..memory import empty
from ..reference import encode
from . import cublaslt


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
    out = empty(a.shape[0], b.shape[0], out_dtype, a.device)
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
    product = out if addend is None else torch.empty_like(out)
    torch._scaled_mm(a, b.t(), **scales, bias=bias, out_dtype=out.dtype, use_fast_accum=use_fast_accum, out=product)
    if addend is not None:
        torch.add(product, addend, out=out)


def scaled_mm_to_fp8_(
    out: Tensor, amax: Tensor, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, inverse: Tensor
) -> None:
    """`reference.scaled_mm_to_fp8_` on cuBLASLt: the cast is the GEMM's epilogue."""
    if not cublaslt.is_available():
        product = torch._scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.float32)
        amax.copy_(product.abs().amax())
        out.copy_(encode(product, inverse.reciprocal(), out.dtype))
        return
    cublaslt.matmul(a, b, scale_a, scale_b, None, out, use_fast_accum=False, inverse=inverse, amax=amax)
