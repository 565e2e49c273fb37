"""The specification of query, key and value in FP8, rotated and cast where the QKV projection's output is split.

RoPE is that of `reference`. A rotation without angles only splits and casts.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

from torch import Tensor

from ...dtypes import E4M3
from ..quantize.reference import record_
from ..reference import encode
from ..registration import operator
from ..shapes import payload_like
from .reference import Rotation, check_projection, rotated


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


def _payloads(a: SimpleNamespace) -> tuple[Tensor, Tensor, Tensor]:
    tokens, columns = a.y.shape
    width = columns // (a.heads_per_group + 2)
    query, key, value = (payload_like(a.y, (tokens, own * width), E4M3) for own in (a.heads_per_group, 1, 1))
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
