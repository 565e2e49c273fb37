"""Rotary position embedding (RoPE): the angles of a model, and the query and key of a layer in 16 bits.

An FP8 layer rotates inside its QKV projection (`nn.qkv`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..kernels import ops
from ..kernels.ops import Rotation


def rope_frequencies(rotary_dim: int, base: float) -> Tensor:
    """base^(−2i / R) for each pair i of the R = `rotary_dim` rotated columns, float64 [R / 2] (arXiv 2104.09864,
    section 3.2.2)."""
    return base ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)


def cos_sin_table(frequencies: Tensor, num_positions: int) -> Tensor:
    """Cosine and sine of position · frequency: FP32 [num_positions, 2, R / 2], computed in float64.

    Args:
        frequencies: float64 [R / 2], in radians a position.
    """
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float64), frequencies)
    return torch.stack([angles.cos(), angles.sin()], dim=1).float()


def rotated_parts(y: Tensor, rotation: Rotation, widths: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Query and key (rotated) and value of the QKV projection's output, without autograd.

    With one query head a group they are views of `y`, rotated in place. Grouped queries are written to memory of their
    own, because attention could not read them between keys and values; nothing then refers to `y`.

    Args:
        y: [s, b, groups · sum of widths], contiguous.
        widths: columns of query, key and value in one group.

    Returns:
        [s, b, groups, width] each.
    """
    heads_per_group = widths[0] // rotation.head_dim
    flat, shape = y.view(-1, y.shape[-1]), (*y.shape[:2], y.shape[-1] // sum(widths))
    if heads_per_group == 1:
        ops.rotate_qk_(flat, rotation, heads_per_group=1)
        query, key, value = y.view(*shape, -1).split(widths, dim=-1)
    else:
        parts = ops.split_rotated_qkv(flat, rotation, heads_per_group=heads_per_group)
        query, key, value = (part.view(*shape, -1) for part in parts)
    return query, key, value


def split_rotated(y: Tensor, rotation: Rotation, widths: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """`rotated_parts` of a 16-bit QKV projection's output. Nobody else may need the values of `y`."""
    query, key, value = _SplitRotated.apply(y, rotation, widths)
    return query, key, value


class _SplitRotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, rotation: Rotation, widths: tuple[int, int, int]) -> tuple[Tensor, ...]:
        ctx.rotation, ctx.shape = rotation, y.shape
        return rotated_parts(y.detach(), rotation, widths)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ops.unrotate_qkv_grad(list(grads), ctx.rotation).view(ctx.shape), None, None
