"""The specification of query-key normalisation with RoPE behind it, in plain PyTorch.

Every head of query and key is normalised over its d columns by LayerNorm or RMSNorm, with one weight for all query
heads and one for all key heads (arXiv 2302.05442, section 2; as megatron-core's ``q_layernorm``). RoPE then rotates it.
Statistics, norm and rotation are FP32, rounded once. Backward needs the projection's output alone: it computes the
statistics again.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from ..registration import operator
from ..shapes import fp32
from .reference import Rotation, check_projection, check_rotated, rotated


class QKNorm(NamedTuple):
    """The norms of query and key.

    Attributes:
        query_weight, key_weight: [d]. query_bias, key_bias: [d], or None.
        eps: added to the variance.
        rms: RMSNorm, not LayerNorm.
    """

    query_weight: Tensor
    key_weight: Tensor
    query_bias: Tensor | None
    key_bias: Tensor | None
    eps: float
    rms: bool


def _normalized(heads: Tensor, eps: float, rms: bool) -> tuple[Tensor, Tensor]:
    """FP32 heads [..., d], centred (not with `rms`) and scaled; and 1 / √(variance + eps) [..., 1]."""
    centred = heads if rms else heads - heads.mean(dim=-1, keepdim=True)
    rstd = 1.0 / torch.sqrt(centred.square().mean(dim=-1, keepdim=True) + eps)
    return centred * rstd, rstd


def _parts(y: Tensor, rotation: Rotation, heads_per_group: int) -> list[Tensor]:
    """Query, key and value of y [T, N], each [s, b, groups, heads · d]."""
    sequence, head_dim = rotation.cos_sin.shape[0], rotation.head_dim
    grouped = y.view(sequence, y.shape[0] // sequence, -1, (heads_per_group + 2) * head_dim)
    return list(grouped.split([heads_per_group * head_dim, head_dim, head_dim], dim=3))


def _query_and_key(a: SimpleNamespace) -> tuple[Tensor, Tensor]:
    width = a.y.shape[1] // (a.heads_per_group + 2)
    return a.y.new_empty((len(a.y), a.heads_per_group * width)), a.y.new_empty((len(a.y), width))


@operator(gpu=".normed_triton", fake=_query_and_key, check=check_projection)
def norm_rotate_qk(y: Tensor, rotation: Rotation, norm: QKNorm, *, heads_per_group: int) -> tuple[Tensor, Tensor]:
    """Query and key of the QKV projection's output, normalised and rotated, in memory of their own; one launch.

    Moves 4 bytes of each of their elements, and 8 bytes of each pair's angle per token; about 10 flops an element.

    Args:
        y: BF16 or FP16 [T, groups · (heads_per_group + 2) · d], contiguous; only read. T = s · b.
        rotation: with R = 0, nothing is rotated.

    Returns:
        Query [T, groups · heads_per_group · d] and key [T, groups · d], in the dtype of `y`.
    """
    query, key, _ = _parts(y, rotation, heads_per_group)

    def normed(part: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        heads, _ = _normalized(part.float().unflatten(3, (-1, rotation.head_dim)), norm.eps, norm.rms)
        heads = heads * weight.float() if bias is None else heads * weight.float() + bias.float()
        return rotated(heads.flatten(3), rotation).to(y.dtype).reshape(len(y), -1)

    return normed(query, norm.query_weight, norm.query_bias), normed(key, norm.key_weight, norm.key_bias)


def _gradients(a: SimpleNamespace) -> tuple[Tensor, Tensor, Tensor]:
    has_bias = a.norm.query_bias is not None
    return a.y.new_empty(a.y.shape), fp32(a.y, 2, a.rotation.head_dim), fp32(a.y, 2 * has_bias, a.rotation.head_dim)


@operator(gpu=".normed_triton", fake=_gradients, check=check_rotated)
def norm_rotate_qk_backward(
    grads: list[Tensor], y: Tensor, rotation: Rotation, norm: QKNorm
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `norm_rotate_qk`, and the value's copied beside them.

    Moves 6 bytes of an element of query and key and 4 of value. The sums over tokens and heads have one order.

    Args:
        grads: of the rotated query [s, b, groups, heads per group · d], the rotated key and value [s, b, groups, d],
            with any strides.

    Returns:
        The gradient of y [T, N] in its dtype; those of the two weights FP32 [2, d] and of the two biases FP32 [2, d]
        ([0, d] without biases), query first.
    """
    heads_per_group = grads[0].shape[3] // rotation.head_dim
    *parts, _ = _parts(y, rotation, heads_per_group)
    back, of_weights, of_biases = [], [], []
    for part, grad, weight in zip(parts, grads[:2], (norm.query_weight, norm.key_weight), strict=True):
        g = rotated(grad, rotation, inverse=True).unflatten(3, (-1, rotation.head_dim))
        heads, rstd = _normalized(part.float().unflatten(3, (-1, rotation.head_dim)), norm.eps, norm.rms)
        weighted = g * weight.float()
        of_input = weighted - heads * (heads * weighted).mean(dim=-1, keepdim=True)
        if not norm.rms:
            of_input = of_input - weighted.mean(dim=-1, keepdim=True)
        back.append((of_input * rstd).flatten(3).to(y.dtype))
        of_weights.append((g * heads).sum(dim=(0, 1, 2, 3)))
        of_biases.append(g.sum(dim=(0, 1, 2, 3)))
    joined = torch.cat([*back, grads[2].to(y.dtype)], dim=3).reshape(y.shape)
    biases = torch.stack(of_biases) if norm.query_bias is not None else y.new_empty((0, rotation.head_dim)).float()
    return joined, torch.stack(of_weights), biases
