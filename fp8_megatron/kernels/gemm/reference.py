"""The specification of the FP8 GEMM in plain PyTorch. The limits of Hopper's GEMM hold on every device."""

from __future__ import annotations

import torch
from torch import Tensor

from ...dtypes import E5M2, FP8_DTYPES, FP8_GEMM_MULTIPLE
from ..reference import decode, encode
from ..registration import operator

#: Dtypes and shapes that passed, with the product's shape: the check would take the host longer than the launch.
_fine: dict[tuple[torch.dtype, torch.dtype, torch.Size, torch.Size], tuple[int, int]] = {}


def check_scaled_mm(a: Tensor, b: Tensor) -> tuple[int, int]:
    """Check a GEMM a [M, K] · b [N, K]ᵀ against Hopper's limits, on every device (a CPU would accept more). Returns the
    product's shape, (M, N).

    Raises:
        ValueError: operands not FP8, both E5M2, not K-major, or a size that is not a multiple of 16.
    """
    key = (a.dtype, b.dtype, a.shape, b.shape)
    shape = _fine.get(key)
    if shape is not None and a.is_contiguous() and b.is_contiguous():
        return shape
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
    _fine[key] = (m, n)
    return m, n


@operator(
    gpu=".cuda", fake=lambda a: a.a.new_empty((a.a.shape[0], a.b.shape[0]), dtype=a.out_dtype), check=check_scaled_mm
)
def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
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


def _check_output(out: Tensor, a: Tensor, b: Tensor, addend: Tensor | None) -> None:
    shape = check_scaled_mm(a, b)
    assert out.shape == shape and out.is_contiguous(), (out.shape, shape)
    if addend is not None:
        check_addend(out, addend)


def check_addend(out: Tensor, addend: Tensor) -> None:
    assert addend.shape == out.shape and addend.dtype == out.dtype, (addend.shape, addend.dtype)
    assert addend.is_contiguous(), addend.stride()


@operator(gpu=".cuda", mutates=["out"], check=_check_output)
def scaled_mm_into_(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    bias: Tensor | None = None,
    use_fast_accum: bool = False,
    addend: Tensor | None = None,
) -> None:
    """`scaled_mm` plus `addend` (in `out`'s dtype, or None) written to contiguous `out` [M, N], rounded once.

    `addend` may be `out` itself.
    """
    dtype = out.dtype if addend is None else torch.float32
    product = scaled_mm(a, b, scale_a, scale_b, bias=bias, out_dtype=dtype, use_fast_accum=use_fast_accum)
    out.copy_(product if addend is None else product + addend)


def _check_fp8_output(out: Tensor, amax: Tensor, a: Tensor, b: Tensor, inverse: Tensor) -> None:
    _check_output(out, a, b, None)
    assert out.dtype in FP8_DTYPES and amax.shape == (1,) and inverse.shape == (1,), (out.dtype, amax, inverse)


@operator(gpu=".cuda", mutates=["out", "amax"], check=_check_fp8_output)
def scaled_mm_to_fp8_(
    out: Tensor, amax: Tensor, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, inverse: Tensor
) -> None:
    """`scaled_mm` with its FP32 result cast to FP8 by the given scale, saturated, in place.

    Args:
        out: FP8 [M, N]; the product times `inverse` is written to it.
        amax: FP32 [1]; the amax of the product is written to it.
        inverse: FP32 [1], the reciprocal of the scale that decodes `out`.
    """
    product = scaled_mm(a, b, scale_a, scale_b, out_dtype=torch.float32)
    amax.copy_(product.abs().amax())
    out.copy_(encode(product, inverse.reciprocal(), out.dtype))
