"""The specification of MX operands: FP8 with an E8M0 scale, a power of two, for each 32 elements along the GEMM's K.

The format is OCP's Microscaling (MX 1.0, section 5). The scale of a block is the smallest power of two by which its
amax fits into the payload's dtype: ``amax / fp_max`` rounded up, as Transformer Engine does and torchao calls RCEIL.
So nothing saturates. MX 1.0's own rule rounds the amax down to a power of two first (FLOOR), and clamps up to an eighth
of the largest values away.

Scales are ``float8_e8m0fnu`` [R, K / 32] for an operand [R, K]. The byte e stands for 2^(e − 127); 255 is NaN. A block
with an inf or a NaN has that scale. A block whose scale would be 2⁻¹²⁷ or less has byte 0, and its values are 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...dtypes import FP8_DTYPES, MAX_FINITE, MX_BLOCK
from ..reference import decode, encode
from ..registration import operator
from ..shapes import payload_like

E8M0 = torch.float8_e8m0fnu
#: The scale of a block that holds an inf or a NaN.
E8M0_NAN = 255
_INF_BITS = 0x7F800000


def _blocks(x: Tensor, dtype: torch.dtype, *, wanted: bool) -> tuple[Tensor, Tensor]:
    """A cast of `x` without values; empty unless `wanted`."""
    rows, columns = x.shape
    scales = x.new_empty((rows, columns // MX_BLOCK) if wanted else (0,), dtype=E8M0)
    return payload_like(x, x.shape, dtype, wanted=wanted), scales


def _check(x: Tensor, dtype: torch.dtype, rowwise: bool, transposed: bool) -> None:
    assert dtype in FP8_DTYPES, dtype
    if x.shape[0] % MX_BLOCK or x.shape[1] % MX_BLOCK:
        raise ValueError(f"MX operands have sizes in multiples of {MX_BLOCK}, not {x.shape[0]} × {x.shape[1]}")
    if not (rowwise or transposed):
        raise ValueError("quantisation into no layout: set rowwise, transposed or both")


@operator(
    gpu=".mx_triton",
    fake=lambda x, dtype, rowwise, transposed: (
        *_blocks(x, dtype, wanted=rowwise),
        *_blocks(x.t(), dtype, wanted=transposed),
    ),
    check=_check,
)
def quantize_mx(
    x: Tensor, dtype: torch.dtype, *, rowwise: bool = True, transposed: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantise `x` [M, K] with a scale for each 32 along K, and its transpose with one for each 32 along M.

    Args:
        x: BF16, FP16 or FP32; M and K are multiples of 32.

    Returns:
        payload [M, K], its scales [M, K / 32] (both empty unless `rowwise`), transpose [K, M], its scales [K, M / 32]
        (both empty unless `transposed`).

    Raises:
        ValueError: M or K is not a multiple of 32, or neither layout is requested.
    """
    along_k = _cast(x, dtype) if rowwise else _blocks(x, dtype, wanted=False)
    along_m = _cast(x.t(), dtype) if transposed else _blocks(x, dtype, wanted=False)
    return *along_k, *along_m


def _cast(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    blocks = x.float().contiguous().view(rows, columns // MX_BLOCK, MX_BLOCK)
    exponents = mx_exponents(blocks.abs().amax(dim=2), dtype)
    # Of byte 0 the reciprocal would be no FP32 number; every dtype rounds these values to 0.
    scales = torch.where(exponents == 0, 1.0, exponents.view(E8M0).float())
    return encode(blocks, scales[:, :, None], dtype).view(rows, columns), exponents.view(E8M0)


def mx_exponents(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The E8M0 bytes, uint8, of blocks with this `amax`, FP32: ``⌈log₂(amax / fp_max)⌉ + 127``, exactly."""
    bits = amax.view(torch.int32)
    largest = torch.tensor(MAX_FINITE[dtype]).view(torch.int32)
    # Both mantissas are whole numbers: a larger one than fp_max's takes the next power of two.
    above = (bits & 0x7FFFFF) > (largest & 0x7FFFFF)
    exponents = ((bits >> 23) - ((largest >> 23) - 127) + above).clamp_min(0)
    return torch.where(bits < _INF_BITS, exponents, E8M0_NAN).to(torch.uint8)


def dequantize_mx(payload: Tensor, scales: Tensor) -> Tensor:
    """An operand [R, K] and its scales → FP32 [R, K]."""
    return decode(payload) * scales.float().repeat_interleave(MX_BLOCK, dim=1)
