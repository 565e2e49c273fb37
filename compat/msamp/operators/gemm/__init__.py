"""FP8 matrix products."""

from .gemm import Gemm

__all__ = ["Gemm"]
