"""The specification of rotary position embedding (RoPE; arXiv 2104.09864, section 3.2.2), in plain PyTorch.

RoPE rotates pairs of a head's columns by an angle that grows with the token's position: (x₁, x₂) becomes
(x₁·cos − x₂·sin, x₂·cos + x₁·sin). The inverse turns the angle's sign. It is what backward does to a gradient.

All arithmetic is FP32. Products and sums are rounded separately, and the result is rounded to its dtype once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...dtypes import E4M3, FP8_DTYPES
from ..quantize.reference import interleaved as joined
from ..quantize.reference import quantize_grad_output, record_
from ..reference import amax, decode, encode
from ..registration import operator
from ..shapes import fp32, layouts, payload_like, taken_scale


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


def _split_outputs(y: Tensor, heads_per_group: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens, columns = y.shape
    width = columns // (heads_per_group + 2)
    query, key, value = (y.new_empty((tokens, own * width)) for own in (heads_per_group, 1, 1))
    return query, key, value


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


def _joined_outputs(grads: list[Tensor]) -> Tensor:
    query = grads[0]
    columns = query.shape[2] * sum(grad.shape[3] for grad in grads)
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


@operator(gpu=".grad_triton", fake=lambda grads: fp32(grads[0], 1), check=check_rotated)
def rotated_qkv_grad_amax(grads: list[Tensor], rotation: Rotation) -> Tensor:
    """Amax of what `quantize_rotated_qkv_grad` casts, FP32 [1], without writing it."""
    return amax(_unrotated(grads, rotation, []))


def _cast_outputs(
    grads: list[Tensor], dtype: torch.dtype, scale: Tensor | None, column_sums: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    whole = _joined_outputs(grads)
    sums = fp32(whole, whole.shape[1] if column_sums else 0)
    return *layouts(whole, dtype), sums, taken_scale(whole, scale)


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


class KnownCast(NamedTuple):
    """A cast whose scale is known before.

    Attributes:
        scale: the dequantising scale, FP32 [1].
        record: where the cast records what it sees (`quantize.reference.record_`), FP32 [1] or [3]; None: nowhere.
    """

    scale: Tensor
    record: Tensor | None


class QKVCasts(NamedTuple):
    """The casts of query, key and value."""

    query: KnownCast
    key: KnownCast
    value: KnownCast


def _payloads(y: Tensor, heads_per_group: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens, columns = y.shape
    width = columns // (heads_per_group + 2)
    query, key, value = (payload_like(y, (tokens, own * width), E4M3) for own in (heads_per_group, 1, 1))
    return query, key, value


def _check_casts(y: Tensor, rotation: Rotation, casts: QKVCasts, heads_per_group: int) -> None:
    check_projection(y, rotation, heads_per_group)
    assert len({0 if cast.record is None else cast.record.numel() for cast in casts}) == 1, casts


@operator(gpu=".quantized_triton", fake=_payloads, mutates=["record"], check=_check_casts)
def quantize_rotated_qkv(
    y: Tensor, rotation: Rotation, casts: QKVCasts, *, heads_per_group: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Query and key, rotated, and value of the QKV projection's output, each in E4M3 in memory of its own; one launch.

    The rotation is FP32. Its result is rounded once, to E4M3. Moves 3 bytes an element, and 8 bytes of each pair's
    angle per token.

    Args:
        y: BF16 or FP16 [T, groups · (heads_per_group + 2) · d], contiguous, only read: of each group its query heads,
            its key and its value. T = s · b; token t is at sequence index t // b.
        rotation: with R = 0, nothing is rotated.
        heads_per_group: query heads that share one key.

    Returns:
        Query [T, groups · heads_per_group · d], key and value [T, groups · d].
    """
    head_dim = rotation.head_dim
    sequence, heads = rotation.cos_sin.shape[0], heads_per_group * head_dim
    grouped = y.view(sequence, y.shape[0] // sequence, -1, heads + 2 * head_dim)
    query, key, value = grouped.split([heads, head_dim, head_dim], dim=3)
    return (
        _cast(rotated(query, rotation), casts.query),
        _cast(rotated(key, rotation), casts.key),
        _cast(value.float(), casts.value),
    )


def _cast(x: Tensor, cast: KnownCast) -> Tensor:
    """[s, b, groups, width] → E4M3 [T, groups · width]."""
    if cast.record is not None:
        record_(cast.record, x, cast.scale, E4M3)
    payload: Tensor = encode(x, cast.scale, E4M3).reshape(x.shape[0] * x.shape[1], -1)
    return payload


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


def _query_and_key(y: Tensor, heads_per_group: int) -> tuple[Tensor, Tensor]:
    width = y.shape[1] // (heads_per_group + 2)
    return y.new_empty((len(y), heads_per_group * width)), y.new_empty((len(y), width))


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


def _gradients(y: Tensor, rotation: Rotation, norm: QKNorm) -> tuple[Tensor, Tensor, Tensor]:
    has_bias = norm.query_bias is not None
    return y.new_empty(y.shape), fp32(y, 2, rotation.head_dim), fp32(y, 2 * has_bias, rotation.head_dim)


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
