"""Ranks that share sequences exchange them for heads around attention, which then is any attention over whole
sequences (DeepSpeed-Ulysses, arXiv 2309.14509)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..collectives.context_exchange import gather_sequence, scatter_sequence
from ..device.group import Group
from .first_order import once_differentiable


def sequences_of_heads(query: Tensor, key: Tensor, value: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Whole sequences of 1 / n of the heads, of each head's group.

    Called by all ranks of `group`, in the same order of layers.

    Args:
        query: [s / n, b, heads, d], this rank's two chunks. key, value: [s / n, b, groups, d]. n divides both numbers.

    Returns:
        [s, b, heads / n, d] and twice [s, b, groups / n, d].
    """
    return _SequencesOfHeads.apply(group, query, key, value)


def heads_of_sequence(x: Tensor, group: Group) -> Tensor:
    """All heads of this rank's two chunks: x [s, b, heads / n, d] → [s / n, b, heads, d], contiguous."""
    return _HeadsOfSequence.apply(group, x)


class _SequencesOfHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(gather_sequence(parts, group))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *scatter_sequence(grads, ctx.group)


class _HeadsOfSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, x: Tensor) -> Tensor:
        ctx.group = group
        return scatter_sequence([x], group)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, gather_sequence([grad], ctx.group)[0]
