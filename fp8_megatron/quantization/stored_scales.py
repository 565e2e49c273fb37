"""FP8 weights of other programs: which elements a scale belongs to, and their values.

A scale dequantises (x ≈ payload · scale), whatever its name says: ``weight_scale_inv`` of DeepSeek-V3 and Qwen3, and
``weight_scale`` of compressed-tensors, FBGEMM and ModelOpt.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

#: Rows and columns that share a scale in DeepSeek-V3's layout.
TILE = 128


def block_of_scale(payload: tuple[int, ...], scale: tuple[int, ...]) -> tuple[int, int] | None:
    """The rows and columns of a matrix that one scale belongs to.

    Args:
        payload: the matrix's shape, [N, K].
        scale: [] or one element; [N], [N, 1]; [⌈N/128⌉, ⌈K/128⌉], also with sizes 1 between and behind (ModelOpt);
            [2, 1] of gate above up.

    Returns:
        None if a scale of this shape is none of these.
    """
    if len(payload) != 2:
        return None
    rows, columns = payload
    if prod(scale) == 1:
        return rows, columns
    if len(scale) == 4 and scale[1] == scale[3] == 1:
        scale = scale[::2]
    if scale == (-(-rows // TILE), -(-columns // TILE)):
        return TILE, TILE
    if scale in ((rows,), (rows, 1)):
        return 1, columns
    return (rows // 2, columns) if scale == (2, 1) and rows % 2 == 0 else None


def dequantize(payload: Tensor, scale: Tensor) -> Tensor:
    """The values of a matrix [N, K], or of one after the other of [M, N, K], in FP32. There is no other copy.

    Raises:
        ValueError: the scale has none of the shapes that `block_of_scale` knows.
    """
    if payload.ndim == 3:
        values = torch.empty(payload.shape, dtype=torch.float32, device=payload.device)
        for index, matrix in enumerate(payload):
            values[index] = dequantize(matrix, scale if scale.numel() == 1 else scale[index])
        return values
    block = block_of_scale(tuple(payload.shape), tuple(scale.shape))
    if block is None:
        raise ValueError(f"{tuple(scale.shape)} is no shape of a scale of a weight of shape {tuple(payload.shape)}")
    values, (rows, columns) = payload.float(), block
    scales = scale.float().reshape(-(-payload.shape[0] // rows), -1)
    if columns == payload.shape[1]:
        return values.mul_(scales.repeat_interleave(rows, 0)[: payload.shape[0]])
    for index, stripe in enumerate(values.split(rows)):
        stripe.mul_(scales[index].repeat_interleave(columns)[: payload.shape[1]])
    return values
