"""The block-scaled GEMM on Hopper: cuBLASLt's 128-element and 128×128-element scaling, with plans kept (`cublaslt`)."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ...device.device import UnsupportedDeviceError
from ...dtypes import GEMM_BLOCK
from ..sizes import cdiv
from . import cublaslt


def block_scaled_mm_into_(
    out: Tensor, a: Tensor, b: Tensor, scales_a: Tensor, scales_b: Tensor, bias: Tensor | None, addend: Tensor | None
) -> None:
    """`block_scaled.block_scaled_mm_into_` on cuBLASLt. The GEMM adds bias and addend.

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
