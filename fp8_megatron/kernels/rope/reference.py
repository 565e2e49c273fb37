"""The specification of rotary position embedding (RoPE; arXiv 2104.09864, section 3.2.2), in plain PyTorch.

RoPE rotates pairs of a head's columns by an angle that grows with the token's position: (x₁, x₂) becomes
(x₁·cos − x₂·sin, x₂·cos + x₁·sin). The inverse turns the angle's sign. It is what backward does to a gradient.

All arithmetic is FP32. Products and sums are rounded separately, and the result is rounded to its dtype once.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from ...dtypes import FP8_DTYPES
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


def check_projection(y: Tensor, rotation: Rotation, heads_per_group: int) -> None:
    """Check the output of a QKV projection."""
    assert y.ndim == 2 and y.is_contiguous() and y.shape[0] % rotation.cos_sin.shape[0] == 0, (y.shape, rotation)
    assert y.shape[1] % ((heads_per_group + 2) * rotation.head_dim) == 0, (y.shape, heads_per_group)
    _check_rotation(rotation)


def check_rotated(grads: list[Tensor], rotation: Rotation) -> None:
    """Check the gradients of query, key and value."""
    assert len(grads) == 3 and grads[1].shape == grads[2].shape, [grad.shape for grad in grads]
    assert grads[1].shape[3] == rotation.head_dim, (grads[1].shape, rotation.head_dim)
    assert grads[0].shape[0] == rotation.cos_sin.shape[0], (grads[0].shape, rotation.cos_sin.shape)
    _check_rotation(rotation)


def _check_rotation(rotation: Rotation) -> None:
    cos_sin = rotation.cos_sin
    assert cos_sin.dtype == torch.float32 and cos_sin.is_contiguous() and cos_sin.shape[1] == 2, cos_sin.shape
    assert 2 * cos_sin.shape[2] <= rotation.head_dim and rotation.head_dim % 2 == 0, (cos_sin.shape, rotation.head_dim)


@operator(gpu=".triton", mutates=["y"], check=check_projection)
def rotate_qk_(y: Tensor, rotation: Rotation, *, heads_per_group: int) -> None:
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


@operator(gpu=".triton", fake=_split_outputs, check=check_projection)
def split_rotated_qkv(y: Tensor, rotation: Rotation, *, heads_per_group: int) -> tuple[Tensor, Tensor, Tensor]:
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


@operator(gpu=".triton", fake=_joined_outputs, check=check_rotated)
def unrotate_qkv_grad(grads: list[Tensor], rotation: Rotation) -> Tensor:
    """The gradient of the QKV projection's output [T, N], from those of the rotated query, the rotated key and value.

    Moves 4 bytes an element, and 8 bytes of each pair's angle per token.

    Args:
        grads: of query [s, b, groups, heads per group · d], key and value [s, b, groups, d], with any strides.
    """
    query, key, value = grads
    back = rotated(query, rotation, inverse=True), rotated(key, rotation, inverse=True), value
    return joined([grad.to(query.dtype) for grad in back])


def _unrotated(grads: list[Tensor], rotation: Rotation, grad_scales: Sequence[Tensor]) -> Tensor:
    if grad_scales:
        grads = [decode(grad, scale) for grad, scale in zip(grads, grad_scales, strict=True)]
    query, key, value = grads
    return joined([rotated(query, rotation, inverse=True), rotated(key, rotation, inverse=True), value.float()])


@operator(gpu=".grad_triton", fake=lambda a: fp32(a.grads[0], 1), check=check_rotated)
def rotated_qkv_grad_amax(grads: list[Tensor], rotation: Rotation) -> Tensor:
    """Amax of what `quantize_rotated_qkv_grad` casts, FP32 [1], without writing it."""
    return amax(_unrotated(grads, rotation, []))


def _cast_outputs(a: SimpleNamespace) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    whole = _joined_outputs(a)
    sums = fp32(whole, whole.shape[1] if a.column_sums else 0)
    return *layouts(whole, a.dtype), sums, taken_scale(whole, a.scale)


def _check_rotated_cast(
    grads: list[Tensor], rotation: Rotation, scale: Tensor | None, grad_scales: Sequence[Tensor]
) -> None:
    check_rotated(grads, rotation)
    assert (grads[0].dtype in FP8_DTYPES) == (len(grad_scales) == 3) and (scale is not None or not grad_scales)


@operator(gpu=".grad_triton", fake=_cast_outputs, mutates=["amax_out"], check=_check_rotated_cast)
def quantize_rotated_qkv_grad(
    grads: list[Tensor],
    rotation: Rotation,
    dtype: torch.dtype,
    *,
    scale: Tensor | None,
    power_of_two: bool = False,
    amax_out: Tensor | None = None,
    column_sums: bool,
    grad_scales: Sequence[Tensor] = (),
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
        _unrotated(grads, rotation, grad_scales), dtype, scale=scale, power_of_two=power_of_two, amax_out=amax_out
    )
    return payload, payload_t, sums if column_sums else sums.new_empty(0), taken
