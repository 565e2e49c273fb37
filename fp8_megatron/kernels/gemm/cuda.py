"""The FP8 GEMMs on CUDA: cuBLASLt's (see `cublaslt`).

With a scale for each tensor, ``torch._scaled_mm`` serves where cuBLASLt cannot be called directly. Scales of 128
elements and of 128×128 tiles are Hopper's.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ...device.device import UnsupportedDeviceError
from ...dtypes import GEMM_BLOCK
from ..reference import encode
from ..shapes import cdiv, empty
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


def block_scaled_mm_into_(
    out: Tensor, a: Tensor, b: Tensor, scales_a: Tensor, scales_b: Tensor, bias: Tensor | None, addend: Tensor | None
) -> None:
    """`reference.block_scaled_mm_into_` on cuBLASLt. The GEMM adds bias and addend.

    Raises:
        UnsupportedDeviceError: the GPU is no Hopper, or cuBLASLt has no block scaling.
    """
    check_device(a.get_device())
    cublaslt.matmul(
        a,
        b,
        scales_a,
        scales_b,
        bias,
        out,
        use_fast_accum=False,
        addend=addend,
        scale_mode_a=_scale_mode(a, scales_a),
        scale_mode_b=_scale_mode(b, scales_b),
    )


def _scale_mode(payload: Tensor, scales: Tensor) -> int:
    # The caller has checked the scales: they have one of two shapes.
    rows, columns = payload.shape
    of_blocks = scales.shape == (cdiv(columns, GEMM_BLOCK), rows)
    return cublaslt.BLOCK_SCALES if of_blocks else cublaslt.TILE_SCALES


@cache
def check_device(device: int) -> None:
    """Refuse a GPU that has no block scaling.

    Raises:
        UnsupportedDeviceError: no Hopper, or a cuBLASLt without block scaling.
    """
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) != (9, 0):
        raise UnsupportedDeviceError(
            f"the block-scaled GEMM runs on GPUs of compute capability 9.0 (Hopper), not {major}.{minor}: take another "
            "FP8 recipe than blockwise"
        )
    if cublaslt.version() < cublaslt.BLOCK_SCALES_VERSION:
        raise UnsupportedDeviceError(
            f"the block-scaled GEMM needs cuBLASLt 12.9 or newer, and torch {torch.__version__} has loaded version "
            f"{cublaslt.version()}: install a torch for CUDA 12.9 or newer"
        )
