"""The specification of the FP8 GEMMs in plain PyTorch: with a scale for each tensor, of blocks, of tiles, and of MX
blocks.

The limits of Hopper's GEMMs hold on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...dtypes import E5M2, FP8_DTYPES, FP8_GEMM_MULTIPLE, MX_BLOCK
from ..quantize.blocks import dequantize_blocks, has_tile_scales
from ..quantize.mx import E8M0, dequantize_mx
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
    shape = _fine[key] = _checked("FP8 GEMM", a, b)
    return shape


def _checked(name: str, a: Tensor, b: Tensor) -> tuple[int, int]:
    """The shape of the product of operands that every FP8 GEMM takes."""
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
    return m, n


@operator(
    gpu=".cuda",
    fake=lambda a, b, out_dtype: a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype),
    check=check_scaled_mm,
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
        _check_addend(out, addend)


def _check_addend(out: Tensor, addend: Tensor) -> None:
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


#: Operands that passed: the check would take the host longer than the launch.
_fine_blocks: set[tuple[object, ...]] = set()


def check_block_scaled_mm(a: Tensor, b: Tensor, scales_a: Tensor, scales_b: Tensor) -> None:
    """Check a GEMM a [M, K] · b [N, K]ᵀ against cuBLASLt's limits, on every device (a CPU would accept more).

    Raises:
        ValueError: operands that are not FP8, both E5M2, not contiguous, of sizes that cuBLASLt does not take, with
            scales of another shape than in `quantize.blocks`, or both with scales of tiles.
    """
    key = (a.dtype, b.dtype, a.shape, b.shape, scales_a.shape, scales_b.shape)
    if key in _fine_blocks and all(tensor.is_contiguous() for tensor in (a, b, scales_a, scales_b)):
        return
    _checked("block-scaled GEMM", a, b)
    if has_tile_scales(a, scales_a) and has_tile_scales(b, scales_b):
        raise ValueError("block-scaled GEMM takes 128×128 tiles on one side only: cast a or b with quantize_blocks")
    _fine_blocks.add(key)


def _check_sum(out: Tensor, shape: tuple[int, int], bias: Tensor | None, addend: Tensor | None) -> None:
    assert out.shape == shape and out.is_contiguous(), (out.shape, shape)
    assert bias is None or out.dtype == bias.dtype != torch.float32, (bias, out.dtype)
    if addend is not None:
        _check_addend(out, addend)


def _write_sum_(out: Tensor, product: Tensor, bias: Tensor | None, addend: Tensor | None) -> None:
    """``product + bias + addend``, FP32 as `product` is, rounded to `out`'s dtype once."""
    for summand in (bias, addend):
        if summand is not None:
            product += summand.float()
    out.copy_(product)


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
    _check_sum(out, (a.shape[0], b.shape[0]), bias, addend)


@operator(gpu=".cuda", mutates=["out"], check=_check_block_scaled_mm_into)
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
    _write_sum_(out, dequantize_blocks(a, scales_a) @ dequantize_blocks(b, scales_b).t(), bias, addend)


def check_mx_mm(a: Tensor, b: Tensor, scales_a: Tensor, scales_b: Tensor) -> None:
    """Check a GEMM a [M, K] · b [N, K]ᵀ.

    Raises:
        ValueError: operands that are not FP8, both E5M2, not contiguous, of sizes that are no multiples of 32, or with
            other scales than `quantize.mx` makes.
    """
    _checked("MX GEMM", a, b)
    for letter, operand, scales in (("a", a, scales_a), ("b", b, scales_b)):
        rows, columns = operand.shape
        if rows % MX_BLOCK or columns % MX_BLOCK:
            raise ValueError(f"MX GEMM sizes are multiples of {MX_BLOCK}; {letter} is [{rows}, {columns}]")
        if scales.dtype != E8M0 or scales.shape != (rows, columns // MX_BLOCK):
            raise ValueError(
                f"scales of {letter} [{rows}, {columns}] are {E8M0} [{rows}, {columns // MX_BLOCK}], not "
                f"{scales.dtype} {list(scales.shape)}"
            )
        assert scales.is_contiguous(), scales.stride()


def _check_mx_mm_into(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    scales_a: Tensor,
    scales_b: Tensor,
    bias: Tensor | None,
    addend: Tensor | None,
) -> None:
    check_mx_mm(a, b, scales_a, scales_b)
    _check_sum(out, (a.shape[0], b.shape[0]), bias, addend)


@operator(gpu=".mx_cuda", mutates=["out"], check=_check_mx_mm_into)
def mx_mm_into_(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    scales_a: Tensor,
    scales_b: Tensor,
    *,
    bias: Tensor | None = None,
    addend: Tensor | None = None,
) -> None:
    """``a · bᵀ (+ bias) (+ addend)`` into `out`, accumulated in FP32 and rounded to `out`'s dtype once.

    Args:
        out: contiguous [M, N] in BF16, FP16 or FP32.
        a, b: FP8 [M, K] and [N, K], with `scales_a` and `scales_b` from `quantize.mx`.
        bias: [N] in `out`'s dtype, or None. It must be None with an FP32 `out`.
        addend: contiguous [M, N] in `out`'s dtype, or None.

    Raises:
        ValueError: see `check_mx_mm`.
    """
    _write_sum_(out, dequantize_mx(a, scales_a) @ dequantize_mx(b, scales_b).t(), bias, addend)
