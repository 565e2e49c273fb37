"""The specification of rotary position embedding (RoPE; arXiv 2104.09864, section 3.2.2), in plain PyTorch.

RoPE rotates pairs of a head's columns by an angle that grows with the token's position: (x₁, x₂) becomes
(x₁·cos − x₂·sin, x₂·cos + x₁·sin). The inverse turns the angle's sign. It is what backward does to a gradient.

All arithmetic is FP32. Products and sums are rounded separately, and the result is rounded to its dtype once.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from ..quantize.reference import interleaved as joined
from ..quantize.reference import quantize_grad_output
from ..reference import amax, decode
from ..registration import operator
from ..shapes import fp32, layouts, taken_scale


class Rotation(NamedTuple):
    """How query and key are rotated.

    Attributes:
        cos_sin: FP32 [s, 2, R/2], contiguous: cosine and sine of each pair's angle. Row i is for sequence index i.
        head_dim: columns d of a head. The first R of them are rotated.
        interleaved: pairs are neighbours (columns 2i and 2i + 1). Otherwise column i belongs to i + R/2.
    """

    cos_sin: Tensor
    head_dim: int
    interleaved: bool

    @property
    def turns(self) -> bool:
        """Whether there are angles: R > 0."""
        return self.cos_sin.shape[2] > 0


def rotated(x: Tensor, rotation: Rotation, *, inverse: bool = False) -> Tensor:
    """FP32 of the shape of `x`: query or key [s, b, groups, heads · d], every head rotated."""
    cos_sin, head_dim, interleaved = rotation
    half = cos_sin.shape[2]
    heads = x.float().reshape(*x.shape[:2], -1, head_dim)
    cos, sin = cos_sin[:, None, None, 0], cos_sin[:, None, None, 1]
    turned, rest = heads[..., : 2 * half], heads[..., 2 * half :]
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned[..., :half], turned[..., half:]
    if inverse:
        sin = -sin
    pair = first * cos - second * sin, second * cos + first * sin
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat([turned, rest], dim=-1).view(x.shape)


@operator(gpu=".triton", mutates=["y"])
def rotate_qk_(y: Tensor, rotation: Rotation, heads_per_group: int) -> None:
    """Rotate query and key in the QKV projection's output, in place; one launch.

    Moves 4 bytes of each rotated element and 8 bytes of each pair's angle per token; computes 3 flops an element.

    Args:
        y: BF16 or FP16 [T, groups · (heads_per_group + 2) · d], contiguous: of each group its query heads, its key and
            its value. T = s · b; token t is at sequence index t // b.
        heads_per_group: query heads that share one key.
    """
    head_dim = rotation.head_dim
    sequence = rotation.cos_sin.shape[0]
    grouped = y.view(sequence, y.shape[0] // sequence, -1, (heads_per_group + 2) * head_dim)
    query_key = grouped[..., : (heads_per_group + 1) * head_dim]
    query_key.copy_(rotated(query_key, rotation))


def _split_outputs(a: SimpleNamespace) -> tuple[Tensor, Tensor, Tensor]:
    tokens, columns = a.y.shape
    width = columns // (a.heads_per_group + 2)
    return a.y.new_empty((tokens, a.heads_per_group * width)), *(a.y.new_empty((tokens, width)) for _ in range(2))


@operator(gpu=".triton", fake=_split_outputs)
def split_rotated_qkv(y: Tensor, rotation: Rotation, heads_per_group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated query and key, and value, each in memory of its own; one launch.

    Grouped queries are not evenly spaced in `y`, and attention would copy them. Moves 4 bytes an element, and 8 bytes
    of each pair's angle per token.

    Args:
        y: as in `rotate_qk_`; only read.

    Returns:
        Query [T, groups · heads_per_group · d], key and value [T, groups · d].
    """
    head_dim = rotation.head_dim
    sequence, heads = rotation.cos_sin.shape[0], heads_per_group * head_dim
    grouped = y.view(sequence, y.shape[0] // sequence, -1, heads + 2 * head_dim)
    query, key, value = grouped.split([heads, head_dim, head_dim], dim=3)
    parts = rotated(query, rotation).to(y.dtype), rotated(key, rotation).to(y.dtype), value.clone()
    query, key, value = (part.reshape(y.shape[0], -1) for part in parts)
    return query, key, value


def _joined_outputs(a: SimpleNamespace) -> Tensor:
    query = a.grads[0]
    columns = query.shape[2] * sum(grad.shape[3] for grad in a.grads)
    return query.new_empty((query.shape[0] * query.shape[1], columns))


@operator(gpu=".triton", fake=_joined_outputs)
def unrotate_qkv_grad(grads: list[Tensor], rotation: Rotation) -> Tensor:
    """The gradient of the QKV projection's output [T, N], from those of the rotated query, the rotated key and value.

    Moves 4 bytes an element, and 8 bytes of each pair's angle per token.

    Args:
        grads: of query [s, b, groups, heads per group · d], key and value [s, b, groups, d], with any strides.
    """
    query, key, value = grads
    back = rotated(query, rotation, inverse=True), rotated(key, rotation, inverse=True), value
    return joined([grad.to(query.dtype) for grad in back])


def _unrotated(grads: list[Tensor], rotation: Rotation, grad_scales: list[Tensor]) -> Tensor:
    if grad_scales:
        grads = [decode(grad, scale) for grad, scale in zip(grads, grad_scales, strict=True)]
    query, key, value = grads
    return joined([rotated(query, rotation, inverse=True), rotated(key, rotation, inverse=True), value.float()])


@operator(gpu=".grad_triton", fake=lambda a: fp32(a.grads[0], 1))
def rotated_qkv_grad_amax(grads: list[Tensor], rotation: Rotation) -> Tensor:
    """Amax of what `quantize_rotated_qkv_grad` casts, FP32 [1], without writing it."""
    return amax(_unrotated(grads, rotation, []))


def _cast_outputs(a: SimpleNamespace) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    whole = _joined_outputs(a)
    sums = fp32(whole, whole.shape[1] if a.column_sums else 0)
    return *layouts(whole, a.dtype), sums, taken_scale(whole, a.scale)


@operator(gpu=".grad_triton", fake=_cast_outputs, mutates=["amax_out"])
def quantize_rotated_qkv_grad(
    grads: list[Tensor],
    rotation: Rotation,
    dtype: torch.dtype,
    scale: Tensor | None,
    power_of_two: bool,
    amax_out: Tensor | None,
    column_sums: bool,
    grad_scales: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`quantize_qkv_grad` of gradients that are rotated back first, in FP32, in the same read.

    With a given scale it moves 4 bytes an element, 3 of FP8 gradients, and 8 bytes of each pair's angle per token.

    Args:
        grads: of the rotated query [s, b, groups, heads per group · d], the rotated key and value [s, b, groups, d],
            with any strides.
        rotation: with R = 0, nothing is rotated.
        grad_scales: the dequantising scales of FP8 gradients, FP32 [1] each; empty for gradients in 16 or 32 bits.
            They need a given `scale`.

    Returns:
        payload [T, N], its transpose, column sums FP32 [N] (empty unless requested), the scale taken (empty if given).
    """
    payload, payload_t, sums, taken = quantize_grad_output(
        _unrotated(grads, rotation, grad_scales), dtype, scale, power_of_two, amax_out, transposed=True
    )
    return payload, payload_t, sums if column_sums else sums.new_empty(0), taken
