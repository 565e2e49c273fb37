"""The specification of block-scaled storage, in plain PyTorch: gradients, optimizer state in any dtype, and weights."""

from __future__ import annotations

import torch
from torch import Tensor

from ...dtypes import COMPANDED_DTYPES
from ..reference import decode, encode, scale_from_amax
from ..registration import operator
from ..shapes import fp32, payload_like


def check_storage(x: Tensor, payload: Tensor, scales: Tensor) -> None:
    assert x.numel() <= payload.numel() and payload.numel() % scales.numel() == 0, (x.shape, payload.shape)


@operator(gpu=".blockwise_triton", mutates=["payload", "scales"], check=check_storage)
def quantize_blockwise_(x: Tensor, payload: Tensor, scales: Tensor) -> None:
    """Quantise flat `x` [n] into `payload` [n] (FP8, FP16 or a companded integer) and its FP32 `scales`, in place.

    Args:
        x: may be shorter than `payload`; the rest of `payload` becomes zero.
        scales: [n / block]: powers of two, for integers the amax. The block is ``payload.numel() / scales.numel()``.
    """
    if x.numel() != payload.numel():
        x = torch.nn.functional.pad(x.reshape(-1), (0, payload.numel() - x.numel()))
    store_state_(x, payload, scales)


@operator(gpu=".blockwise_triton", fake=lambda payload: fp32(payload, payload.numel()))
def dequantize_blockwise(payload: Tensor, scales: Tensor) -> Tensor:
    """Flat payload [n] with FP32 `scales` [n / block] → FP32 [n]."""
    return decode(payload.view(scales.numel(), -1), scales[:, None]).view(-1)


def load_state(payload: Tensor, scales: Tensor | None) -> Tensor:
    """Optimizer state [n] in any storage dtype → FP32 [n]; `scales` is None for unscaled dtypes."""
    return payload.float() if scales is None else dequantize_blockwise(payload, scales)


def store_state_(value: Tensor, payload: Tensor, scales: Tensor | None, noise: Tensor | None = None) -> None:
    """[n] → optimizer state [n] in its storage dtype, in place; `scales` is None for unscaled dtypes.

    Args:
        noise: FP32 [n], for stochastic rounding to an integer; None rounds to nearest.
    """
    if scales is None:
        payload.copy_(value)
        return
    blocks = value.reshape(scales.numel(), -1).float()
    # The scale of companded integers is the amax itself (their largest code decodes to 1 · scale).
    power_of_two = payload.dtype not in COMPANDED_DTYPES
    scale = scale_from_amax(blocks.abs().amax(dim=1), payload.dtype, power_of_two=power_of_two)
    scales.copy_(scale)
    noise = None if noise is None else noise.view_as(blocks)
    payload.copy_(encode(blocks, scale[:, None], payload.dtype, noise).view(-1))


def restore_state_(value: Tensor, payload: Tensor, scales: Tensor | None) -> None:
    """Store FP32 `value` [n] unchanged in those blocks of companded integers [n] in which a step has stored it.

    `payload` holds it rounded by its blocks' amaxes. A step on a GPU may store the largest value of a block with the
    second largest code. The scale is then larger than that value, by a known factor and the rounding of one product.
    It is found if it gives back every value of the block. Other blocks, and other dtypes, stay as they are.
    """
    if scales is None or payload.dtype not in COMPANDED_DTYPES:
        return
    blocks, codes = value.to(payload.device).view(scales.numel(), -1), payload.view(scales.numel(), -1)
    left = (load_state(payload, scales).view_as(blocks) != blocks).any(dim=1).nonzero().squeeze(1)
    second = torch.tensor(torch.iinfo(payload.dtype).max - 1, dtype=payload.dtype, device=payload.device)
    nearest = blocks[left].abs().amax(dim=1) / decode(second, torch.ones((), device=payload.device))
    for ulps in (0, -1, 1, -2, 2):
        rows, scale = left, (nearest.view(torch.int32) + ulps).view(torch.float32)
        for columns in (8, blocks.shape[1]):  # a few values tell nearly all blocks that no step has stored so
            x = blocks[rows, :columns]
            found = encode(x, scale[:, None], payload.dtype)
            is_same = (decode(found, scale[:, None]) == x).all(dim=1)
            rows, scale, found = rows[is_same], scale[is_same], found[is_same]
        codes[rows], scales[rows] = found, scale
        is_left = ~torch.isin(left, rows)
        left, nearest = left[is_left], nearest[is_left]


@operator(gpu=".blockwise_triton", fake=lambda payload: fp32(payload, 1))
def squared_norm(payload: Tensor, scales: Tensor | None) -> Tensor:
    """Σ x² of flat `payload` [n] (with its block scales, if any), FP32 [1]; NaN or inf where any element is."""
    # Not torch.dot: some processors' BLAS adds sequentially, with an error that grows with n.
    return load_state(payload, scales).square().sum().reshape(1)


def _check_weight(weight: Tensor, scales: Tensor) -> None:
    assert weight.ndim in (2, 3) and weight.is_contiguous(), weight.shape
    assert weight.dtype == torch.float16, weight.dtype
    assert scales.is_contiguous() and weight.numel() % scales.numel() == 0, (weight.shape, scales.shape)


@operator(
    gpu=".blockwise_triton",
    fake=lambda weight, dtype, transposed: payload_like(weight, (weight.mT if transposed else weight).shape, dtype),
    check=_check_weight,
)
def quantize_weight(weight: Tensor, scales: Tensor, scale: Tensor, dtype: torch.dtype, *, transposed: bool) -> Tensor:
    """Cast a weight that is stored in FP16 with block scales, in one layout; values beyond `scale` saturate.

    Args:
        weight: FP16 [N, K] or [E, N, K], contiguous; scales: FP32 [numel / block], of blocks of the flattened weight.
        scale: FP32 [1] or [E], of the result; any stride.
        transposed: whether the result is the transpose.

    Returns:
        payload [N, K] or [E, N, K] in `dtype`, or its transpose [K, N] or [E, K, N].
    """
    value = dequantize_blockwise(weight.reshape(-1), scales).view(weight.shape)
    payload = encode(value, scale.view(-1, *(1 for _ in weight.shape[1:])), dtype)
    return payload.mT.contiguous() if transposed else payload
