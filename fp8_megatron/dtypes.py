"""The dtypes this project stores and computes in, and their limits.

The sign convention everywhere is that a **scale dequantises**: ``x ≈ payload · scale``
(FP8-LM, arXiv 2310.18313, writes the reciprocal; ``torch._scaled_mm`` takes this one).
"""

from __future__ import annotations

import torch

from .storage import (
    CHUNK,
    FP8_GEMM_MULTIPLE,
    GEMM_BLOCK,
    GRAD_BLOCK,
    GROUP_ROWS,
    LEVELS,
    MX_BLOCK,
    NV_BLOCK,
    STATE_BLOCK,
    GradReduceMode,
    RecipeName,
    StorageDtype,
    StorageFormats,
)

__all__ = [
    "CHUNK",
    "CLAMPED_ABOVE",
    "COMPANDED_DTYPES",
    "DTYPE_NAMES",
    "E4M3",
    "E5M2",
    "FP8_DTYPES",
    "FP8_GEMM_MULTIPLE",
    "GEMM_BLOCK",
    "GRAD_BLOCK",
    "GROUP_ROWS",
    "LEVELS",
    "MAX_FINITE",
    "MX_BLOCK",
    "NV_BLOCK",
    "STATE_BLOCK",
    "GradReduceMode",
    "RecipeName",
    "StorageDtype",
    "StorageFormats",
]

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2

FP8_DTYPES = (E4M3, E5M2)
#: The FP8 dtypes' names in text.
DTYPE_NAMES = {E4M3: "E4M3", E5M2: "E5M2"}
#: Integers that hold companded optimizer state (`kernels.companding`): torch.int8 is signed, torch.uint8 is not.
COMPANDED_DTYPES = (torch.int8, torch.uint8)

#: Largest finite magnitude of each storage dtype; a companded one decodes to at most 1 · scale.
MAX_FINITE: dict[torch.dtype, float] = {
    E4M3: 448.0,
    E5M2: 57344.0,
    torch.float16: 65504.0,
    torch.bfloat16: torch.finfo(torch.bfloat16).max,
    torch.float32: torch.finfo(torch.float32).max,
    torch.int8: 1.0,
    torch.uint8: 1.0,
}
#: Magnitudes above these lose more to the clamp than rounding would take: half a unit beyond the largest finite number.
CLAMPED_ABOVE = {E4M3: 464.0, E5M2: 61440.0}
