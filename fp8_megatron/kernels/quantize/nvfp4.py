"""The specification of NVFP4 operands (arXiv 2509.25149): E2M1 with an E4M3 scale for each 16 elements along the GEMM's
K, and one FP32 scale a matrix.

The scale of the matrix is amax / (448 · 6); that of a block, in its units, its amax / 6, rounded to nearest, at least
2⁻⁶. Scaled values are clamped to ± 6. These are torchao's bits. E2M1's numbers are numbers of E4M3: payloads are in
that dtype, one byte an element, and `packed_e2m1` makes what Blackwell's GEMM takes.

It is plain PyTorch on every device; there are no kernels yet.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ...dtypes import E4M3, MAX_FINITE, NV_BLOCK

#: The largest number of E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6.
E2M1_MAX = 6.0
#: The smallest scale of a block: E4M3's smallest normal number.
_SMALLEST_SCALE = 2.0**-6
#: Signs of the random Hadamard rotation's rows, 1: negative. Transformer Engine's.
_SIGNS = (0, 0, 0, 1, 0, 1, 1, 1, 1, 1, 1, 0, 1, 0, 1, 1)


def quantize_nvfp4(
    x: Tensor, *, tiles: bool = False, stochastic: bool = False, rotates: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise `x` [M, K] with scales of 16 elements along K.

    Args:
        x: BF16, FP16 or FP32; K is a multiple of 16, of tiles M too.
        tiles: 16 × 16 elements share a scale, so that the transpose has the same numbers.
        stochastic: a value between two numbers goes up with the probability that makes the average exact. The bits are
            torch's generator's. Otherwise it is rounded to the nearest, half to even.
        rotates: by `hadamard` first. A product of two matrices that are both rotated along its sum is the same.

    Returns:
        payload E4M3 [M, K] with numbers of E2M1; scales E4M3 [M, K / 16], of tiles [M / 16, K / 16]; the matrix's
        scale, FP32 []. Where x has an inf or a NaN, products with the result are not finite.

    Raises:
        ValueError: a size that is no multiple of 16.
    """
    rows, columns = x.shape
    if columns % NV_BLOCK or (tiles and rows % NV_BLOCK):
        raise ValueError(f"NVFP4 operands have sizes in multiples of {NV_BLOCK}, not {rows} × {columns}")
    height = NV_BLOCK if tiles else 1
    value = x.float().contiguous().view(-1, NV_BLOCK)
    value = (value @ hadamard(x.device) if rotates else value).view(rows // height, height, -1, NV_BLOCK)
    amax = value.abs().amax(dim=(1, 3))
    largest = amax.amax() if amax.numel() else amax.new_zeros(())
    total = (largest / (MAX_FINITE[E4M3] * E2M1_MAX)).clamp_min(torch.finfo(torch.float32).tiny)
    scales = (amax / E2M1_MAX / total).clamp(_SMALLEST_SCALE, MAX_FINITE[E4M3]).to(E4M3)
    inverse = (1.0 / total) / scales.float()
    scaled = (value * inverse[:, None, :, None]).clamp(-E2M1_MAX, E2M1_MAX)
    return _rounded(scaled, stochastic=stochastic).view(rows, columns).to(E4M3), scales, total


def _rounded(x: Tensor, *, stochastic: bool) -> Tensor:
    """`x`, at most 6 in magnitude, to numbers of E2M1. Two steps are a binade, so whole steps are its numbers, and an
    even number of steps is an even mantissa."""
    magnitude = x.abs()
    step = torch.where(magnitude < 2.0, 0.5, torch.where(magnitude < 4.0, 1.0, 2.0))
    steps = magnitude / step
    steps = (steps + torch.rand_like(steps)).floor() if stochastic else steps.round()
    return (steps * step).copysign(x)


@cache
def hadamard(device: torch.device) -> Tensor:
    """The orthogonal matrix FP32 [16, 16] of the random Hadamard rotation: Sylvester's, its rows with fixed random
    signs, over 4. One for all matrices, so that both operands of a product have it."""
    matrix = torch.ones(1, 1)
    while len(matrix) < NV_BLOCK:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    signs = 1.0 - 2.0 * torch.tensor(_SIGNS)
    return (signs[:, None] * matrix / NV_BLOCK**0.5).to(device)


def dequantize_nvfp4(payload: Tensor, scales: Tensor) -> Tensor:
    """An operand [R, K] and FP32 scales [R, K / 16] or [R / 16, K / 16], with the matrix's, → FP32 [R, K]."""
    wide = scales.repeat_interleave(payload.shape[0] // scales.shape[0], dim=0).repeat_interleave(NV_BLOCK, dim=1)
    return payload.float() * wide


def packed_e2m1(payload: Tensor) -> Tensor:
    """A payload [R, K] as ``float4_e2m1fn_x2``'s bytes, uint8 [R, K / 2]: the first of two in the low half."""
    doubled = (payload.float().abs() * 2.0).to(torch.int32)  # 0, 1, 2, 3, 4, 6, 8, 12
    codes = torch.where(doubled <= 4, doubled, torch.where(doubled == 6, 5, torch.where(doubled == 8, 6, 7)))
    codes = codes + payload.view(torch.uint8).bitwise_right_shift(7).int() * 8
    return (codes[:, ::2] + codes[:, 1::2] * 16).to(torch.uint8)
