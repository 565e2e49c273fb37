"""Outputs without values, for the fake versions of operators."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def fp32(like: Tensor, *shape: int) -> Tensor:
    """FP32 of this shape on `like`'s device."""
    return like.new_empty(shape, dtype=torch.float32)


def payload_like(like: Tensor, shape: Sequence[int], dtype: torch.dtype, *, wanted: bool = True) -> Tensor:
    """A contiguous payload; empty if it is not `wanted`."""
    return like.new_empty(shape if wanted else (0,), dtype=dtype)


def layouts(x: Tensor, dtype: torch.dtype, *, rowwise: bool = True, transposed: bool = True) -> tuple[Tensor, Tensor]:
    """The payloads [M, K] and [K, M] of `x` [M, K]. Layouts that were not requested are empty."""
    rows, columns = x.shape
    return (
        payload_like(x, (rows, columns), dtype, wanted=rowwise),
        payload_like(x, (columns, rows), dtype, wanted=transposed),
    )


def taken_scale(like: Tensor, given: Tensor | None) -> Tensor:
    """The scale that a cast took, FP32 [1]; empty if it was `given`."""
    return fp32(like, 1 if given is None else 0)
