"""Rotary position embedding (RoPE) and query-key norms: the angles of a model, and the query and key of 16-bit layers.

An FP8 layer computes both inside its QKV projection (`nn.qkv`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kernels import ops
from ..kernels.ops import QKNorm, Rotation
from .first_order import once_differentiable
from .operands import delivered

#: Of Llama 3.1's scaling: the original context, and how often a pair turns within it where blending begins and ends.
_LLAMA3_CONTEXT, _LLAMA3_FEW_TURNS, _LLAMA3_MANY_TURNS = 8192, 1.0, 4.0


@dataclass(frozen=True)
class Yarn:
    """Scaling of RoPE for a longer context by YaRN (arXiv 2309.00071), with megatron-core's arithmetic.

    Attributes:
        factor: how many times longer the context becomes, s in the paper; at least 1.
        original_context: positions of the context that the model was trained with.
        beta_fast: pairs that turn more often than this within the original context keep their frequency.
        beta_slow: pairs that turn less often have it divided by `factor`. Pairs between are blended.
        rounds_range: the first and the last blended pair are whole numbers.
    """

    factor: float
    original_context: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    rounds_range: bool = True

    def scaled(self, frequencies: Tensor, base: float) -> Tensor:
        """The frequencies blended with those divided by `factor` ("NTK-by-parts", section 3.2), float64 [R / 2].

        Args:
            frequencies: of `base`, which is above 1.
        """
        num_pairs = len(frequencies)

        def pair_of(turns: float) -> float:
            """The pair, between whole numbers too, that turns this often within the original context."""
            return num_pairs * math.log(self.original_context / (turns * 2 * math.pi)) / math.log(base)

        first, last = pair_of(self.beta_fast), pair_of(self.beta_slow)
        if self.rounds_range:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * num_pairs - 1)
        pairs = torch.arange(num_pairs, dtype=torch.float64)
        divided = ((pairs - first) / (last - first or 0.001)).clamp(0.0, 1.0)
        return frequencies * (divided / self.factor + 1.0 - divided)


def rope_frequencies(
    rotary_dim: int,
    base: float,
    *,
    interpolation: float = 1.0,
    llama3_factor: float | None = None,
    yarn: Yarn | None = None,
) -> Tensor:
    """base^(−2i / R) for each pair i of the R = `rotary_dim` rotated columns, float64 [R / 2] (arXiv 2104.09864,
    section 3.2.2).

    Args:
        interpolation: divides every frequency (linear scaling, arXiv 2306.15595).
        llama3_factor: scale as Llama 3.1, whose original context is 8,192. Frequencies with wavelengths above 8,192
            positions are divided by this factor, those below 2,048 are kept, and those between are blended. None: no
            scaling.
        yarn: scale by YaRN. None: no scaling.
    """
    frequencies = base ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    if llama3_factor is not None:
        turns = _LLAMA3_CONTEXT * frequencies / (2 * math.pi)  # within the original context
        kept = ((turns - _LLAMA3_FEW_TURNS) / (_LLAMA3_MANY_TURNS - _LLAMA3_FEW_TURNS)).clamp(0.0, 1.0)
        frequencies = frequencies * (kept + (1.0 - kept) / llama3_factor)
    if yarn is not None:
        frequencies = yarn.scaled(frequencies, base)
    return frequencies / interpolation


def cos_sin_table(frequencies: Tensor, num_positions: int, magnitude: float = 1.0) -> Tensor:
    """Cosine and sine of position · frequency, times `magnitude`: FP32 [num_positions, 2, R / 2], computed in float64.

    Args:
        frequencies: float64 [R / 2], in radians a position.
        magnitude: multiplies them, under YaRN.
    """
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float64), frequencies)
    return torch.stack([angles.cos(), angles.sin()], dim=1).mul_(magnitude).float()


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


def normed_parts(
    y: Tensor, rotation: Rotation, norm: QKNorm, widths: tuple[int, int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Query and key, normalised and rotated into memory of their own, and value, a view of `y`; without autograd.

    Backward needs `y` unchanged (`qk_norm_backward`). The rest is as in `rotated_parts`.
    """
    heads_per_group = widths[0] // rotation.head_dim
    shape = (*y.shape[:2], y.shape[-1] // sum(widths))
    query, key = ops.norm_rotate_qk(y.view(-1, y.shape[-1]), rotation, norm, heads_per_group=heads_per_group)
    value = y.view(*shape, -1)[..., -widths[2] :]
    return query.view(*shape, -1), key.view(*shape, -1), value


def qk_norm_backward(
    grads: list[Tensor], y: Tensor, rotation: Rotation, norm: QKNorm
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """The gradient of y [T, N], and those of query's and key's weight and bias (see `operands.delivered`)."""
    grad, of_weights, of_biases = ops.norm_rotate_qk_backward(grads, y.view(-1, y.shape[-1]), rotation, norm)
    summed = [*of_weights.unbind(), *(of_biases.unbind() if len(of_biases) else (None, None))]
    return grad, tuple(delivered(one, param) for one, param in zip(summed, norm[:4], strict=True))


def split_rotated(
    y: Tensor, rotation: Rotation, widths: tuple[int, int, int], norm: QKNorm | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`rotated_parts` of a 16-bit QKV projection's output, or with `norm` its `normed_parts`.

    Nobody else may need the values of `y`: they are overwritten or kept.
    """
    params = (None,) * 4 if norm is None else norm[:4]
    query, key, value = _SplitRotated.apply(y, rotation, widths, norm, *params)
    return query, key, value


class _SplitRotated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        rotation: Rotation,
        widths: tuple[int, int, int],
        norm: QKNorm | None,
        *params: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.rotation, ctx.shape, ctx.norm = rotation, y.shape, norm
        if norm is None:
            return rotated_parts(y.detach(), rotation, widths)
        ctx.save_for_backward(y)
        return normed_parts(y.detach(), rotation, norm, widths)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.norm is None:
            return ops.unrotate_qkv_grad(list(grads), ctx.rotation).view(ctx.shape), *[None] * 7
        (y,) = ctx.saved_tensors
        grad, of_params = qk_norm_backward(list(grads), y, ctx.rotation, ctx.norm)
        return grad.view(ctx.shape), None, None, None, *of_params
