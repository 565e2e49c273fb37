"""The specification of the cast of a block-scaled weight to FP8, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from ..registration import operator
from ..shapes import payload_like
from .blockwise import dequantize_blockwise
from .reference import quantize_with_scale


def _check_weight(weight: Tensor, scales: Tensor) -> None:
    assert weight.ndim == 2 and weight.is_contiguous() and weight.dtype == torch.float16, (weight.shape, weight.dtype)
    assert scales.is_contiguous() and weight.numel() % scales.numel() == 0, (weight.shape, scales.shape)


@operator(
    gpu=".weight_triton",
    fake=lambda a: payload_like(a.weight, a.weight.shape[::-1] if a.transposed else a.weight.shape, a.dtype),
    check=_check_weight,
)
def quantize_weight(weight: Tensor, scales: Tensor, scale: Tensor, dtype: torch.dtype, *, transposed: bool) -> Tensor:
    """Cast a weight that is stored in FP16 with block scales, in one layout; values beyond `scale` saturate.

    Args:
        weight: FP16 [N, K], contiguous; scales: FP32 [N · K / block], of blocks of the flattened weight.
        scale: FP32 [1], of the result.
        transposed: whether the result is the transpose.

    Returns:
        payload [N, K] in `dtype`, or its transpose [K, N].
    """
    value = dequantize_blockwise(weight.reshape(-1), scales).view(weight.shape)
    payload, payload_t = quantize_with_scale(value, scale, dtype, rowwise=not transposed, transposed=transposed)
    return payload_t if transposed else payload
