"""Specifications that all kernel families share, in plain PyTorch: amax, scales, and the codecs of every storage dtype.

A family's own specification is the `reference` module of its folder. Variants are tested against these functions.

Rounding is to nearest even everywhere. Every cast first clamps to the format's finite range, because overflowing casts
differ between devices: a CPU saturates, CUDA gives NaN. A NaN stays NaN through every cast.

There are two kinds of scale:

- **tensorwise**: one FP32 scale for the tensor, ``amax / fp_max``, optionally rounded up to a power of two;
- **blockwise**: one FP32 power-of-two scale for each run of `block` elements of the flattened tensor. A power of two
  makes encoding an unchanged value again exact. A block of zeros has scale 1. A block whose amax is not finite has
  scale NaN, so that everything decoded from it is NaN.

Optimizer state in int8 and uint8 is companded and always blockwise. Its scale is the amax: see `companding`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..dtypes import COMPANDED_DTYPES, FP8_DTYPES, MAX_FINITE
from . import companding
from .registration import operator
from .shapes import fp32

_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


@operator(gpu=".quantize.triton", fake=lambda x: fp32(x, 1))
def amax(x: Tensor) -> Tensor:
    """Largest magnitude of `x` (any shape) as FP32 of shape [1]; NaN where `x` holds a NaN."""
    low, high = torch.aminmax(x.detach().reshape(-1))
    return torch.maximum(-low, high).float().reshape(1)


def round_up_to_power_of_two(scale: Tensor) -> Tensor:
    """Smallest power of two ≥ `scale` (FP32, positive), at least 2⁻¹²⁶; inf and NaN stay as they are."""
    bits = (scale.clamp_min(_SMALLEST_NORMAL).view(torch.int32) + 0x007FFFFF) & 0x7F800000
    return torch.where(torch.isfinite(scale), bits.view(torch.float32), scale)


def scale_from_amax(amax: Tensor, dtype: torch.dtype, *, power_of_two: bool) -> Tensor:
    """Dequantising scale ``amax / fp_max`` in FP32, elementwise.

    An amax of 0 gives 1. An amax that is not finite gives NaN. Values quantised with NaN are NaN, so the step's
    non-finite check finds them.
    """
    # Divided by a tensor: CUDA turns division by a Python number into multiplication by its rounded reciprocal.
    scale = (amax / torch.full_like(amax, MAX_FINITE[dtype])).clamp_min(_SMALLEST_NORMAL)
    if power_of_two:
        scale = round_up_to_power_of_two(scale)
    scale = torch.where(amax == 0, torch.ones_like(scale), scale)
    return torch.where(torch.isfinite(amax), scale, torch.full_like(scale, torch.nan))


def encode(x: Tensor, scale: Tensor, dtype: torch.dtype, noise: Tensor | None = None) -> Tensor:
    """``cast(clamp(x / scale))`` to `dtype`; `scale` (FP32) broadcasts against `x`. Saturates, keeps NaN.

    Integers are companded, and rounded stochastically where `noise` is given: see `companding.encode`.
    """
    if dtype in COMPANDED_DTYPES:
        return companding.encode(x.float(), scale, dtype, noise)
    assert noise is None, dtype
    limit = MAX_FINITE[dtype]
    return (x.float() * scale.reciprocal()).clamp_(-limit, limit).to(dtype)


def decode(payload: Tensor, scale: Tensor | None = None) -> Tensor:
    """``payload · scale`` in FP32; `scale` (FP32) broadcasts. Integers are companded: see `companding.decode`."""
    if payload.dtype in COMPANDED_DTYPES:
        assert scale is not None
        return companding.decode(payload, scale)
    if payload.dtype in FP8_DTYPES and payload.device.type == "cpu":
        value = _decode_fp8_by_table(payload)
    else:
        value = payload.float()
    return value if scale is None else value * scale


def _decode_fp8_by_table(payload: Tensor) -> Tensor:
    # A CPU's own float8 → float32 cast is scalar; a 256-entry table is equally exact and three times as fast.
    codes = torch.arange(256, dtype=torch.uint8, device=payload.device).view(payload.dtype).float()
    index = payload.contiguous().view(torch.uint8).view(-1).int()
    return codes.index_select(0, index).view(payload.shape)
