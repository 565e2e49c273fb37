"""Sums with FP8 tensors."""

from .arithmetic import Arithmetic

__all__ = ["Arithmetic"]
