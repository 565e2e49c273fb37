"""Optimizer state in 8-bit integers: companding before rounding, and rounding that is exact on average.

A block of state spans orders of magnitude, and Adam divides by the root of its second moment. Eight bits spread evenly
over a block lose its small values. A code is therefore a root of its value. (FlashOptim, arXiv 2602.23349, section 3.2,
uses other maps for blocks of 32; they are 2 and 5 dB worse on blocks of 256.)

- ``int8``, the first moment: x ≈ c·|c| · scale with c = payload / 127;
- ``uint8``, the second moment: x ≈ c⁴ · scale with c = payload / 255, so that √x, which Adam divides by, goes as c².

The scale of a block is its amax; the largest code decodes to it exactly. A block that decays as a whole therefore keeps
its codes, and encoding an unchanged value again is exact.

A moving average moves by (1 - beta) of the new value, often less than half a step between two codes. Rounded to
nearest, it would stand still or only rise. The optimizer step therefore rounds **stochastically** (see `rounding`). A
first moment is exact on average. A second moment's code is, so that Adam's update is: rounding leaves a second moment v
with a relative variance s², by which the mean of 1/√v is 1 + 3/8 · s² too large. A code that is exact on average
raises the mean of v by 3/4 · s², which lowers 1/√v by the same 3/8 · s² (docs/optimizer.md).
"""

from __future__ import annotations

import torch
from torch import Tensor


def encode(x: Tensor, scale: Tensor, dtype: torch.dtype, noise: Tensor | None = None) -> Tensor:
    """Codes of FP32 `x`.

    The code below |x| is raised by one if `noise` is below x's relative position between two codes: for int8 between
    their values, for uint8 between the codes themselves.

    Args:
        scale: FP32, broadcasts against `x`; NaN gives code 0, which decodes to NaN. Magnitudes above it saturate.
        dtype: torch.int8, or torch.uint8 for `x` ≥ 0 (values below 0 become 0). With uint8, no `x` above 0 becomes 0:
            a second moment of 0 would make the update as large as the first moment over eps.
        noise: FP32 in [0, 1), the shape of `x`, for stochastic rounding; None rounds to the nearest value.

    Returns:
        Codes in `dtype`.
    """
    largest = torch.iinfo(dtype).max
    magnitude = x.abs() if dtype is torch.int8 else x.clamp_min(0.0)
    share = (magnitude / scale).nan_to_num_(nan=0.0)
    root = square_root(share) if dtype is torch.int8 else square_root(square_root(share))
    root = root * largest
    code = root.floor().clamp_(0, largest - 1)
    # The root may be rounded to the wrong side of a code; the comparison is with the values that will be decoded.
    below = _expand(code, dtype) * scale
    place = (magnitude - below) / (_expand(code + 1.0, dtype) * scale - below)
    if noise is not None and dtype is torch.uint8:
        place = torch.where((place > 0.0) & (place < 1.0), root - code, place)
    code += (place > 0.5) if noise is None else (noise < place)
    if dtype is torch.int8:
        return torch.copysign(code, x).to(dtype)
    return torch.where((magnitude > 0.0) & ~scale.isnan(), code.clamp_min(1.0), code).to(dtype)


def decode(payload: Tensor, scale: Tensor) -> Tensor:
    """FP32 values of codes; `scale` (FP32) broadcasts."""
    return _expand(payload.float(), payload.dtype) * scale


def _expand(code: Tensor, dtype: torch.dtype) -> Tensor:
    """FP32 codes of `dtype` → values in [-1, 1]."""
    code = code / torch.full_like(code, torch.iinfo(dtype).max)  # see reference.scale_from_amax
    return code * code.abs() if dtype is torch.int8 else (code * code) * (code * code)


def square_root(x: Tensor) -> Tensor:
    """√x of FP32, correctly rounded. (torch uses MKL's on a CPU, which is one unit off for one number in a hundred.)"""
    return x.double().sqrt().float()
