"""The specification of casts to FP8 with one scale for the tensor, in plain PyTorch.

The QKV projection's output holds, group by group, the group's query heads, its key and its value (megatron-core's
layout). Attention returns the three gradients separately; `quantize_qkv_grad` casts them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...dtypes import CLAMPED_ABOVE, FP8_DTYPES
from ..reference import amax, encode, scale_from_amax
from ..registration import operator
from ..shapes import fp32, layouts, taken_scale


def record_(record: Tensor, x: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
    """Record what a cast of `x` with a given scale sees (delayed scaling), in place.

    Args:
        record: FP32 [1], raised to the amax of `x`. Or FP32 [3]: then the number of elements that the cast clamps
            (`dtypes.CLAMPED_ABOVE`) and the number of all elements are added to the others.
    """
    largest = amax(x)
    torch.maximum(record[:1], largest, out=record[:1])
    if record.numel() == 1:
        return
    inverse, limit = scale.reciprocal(), CLAMPED_ABOVE[dtype]
    if not bool(largest * inverse <= limit):
        record[1] += ((x.float() * inverse).abs() > limit).sum()
    record[2] += x.numel()


def check_matrix(x: Tensor, dtype: torch.dtype) -> None:
    assert x.ndim == 2 and dtype in FP8_DTYPES, (x.shape, dtype)


@operator(
    gpu=".triton",
    fake=lambda x, dtype, rowwise, transposed: (*layouts(x, dtype, rowwise=rowwise, transposed=transposed), fp32(x, 1)),
    check=check_matrix,
)
def quantize_current(
    x: Tensor, dtype: torch.dtype, *, power_of_two: bool = False, rowwise: bool = True, transposed: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise `x` [M, K] with a scale taken from its own amax, in either layout or both.

    Returns:
        payload [M, K] (empty unless `rowwise`), its transpose [K, M] (empty unless `transposed`), scale FP32 [1].
    """
    scale = scale_from_amax(amax(x), dtype, power_of_two=power_of_two)
    payload, payload_t = quantize_with_scale(x, scale, dtype, rowwise=rowwise, transposed=transposed)
    return payload, payload_t, scale


@operator(
    gpu=".triton",
    fake=lambda x, dtype, rowwise, transposed: layouts(x, dtype, rowwise=rowwise, transposed=transposed),
    mutates=["amax_out"],
    check=check_matrix,
)
def quantize_with_scale(
    x: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    *,
    rowwise: bool = True,
    transposed: bool = False,
    amax_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantise `x` [M, K] with a given FP32 scale [1], in either layout or both; values beyond it saturate.

    Args:
        amax_out: FP32 [1] or [3]; if given, what the cast sees is recorded there (`record_`), in the same pass.

    Returns:
        payload [M, K] (empty unless `rowwise`), its transpose [K, M] (empty unless `transposed`).
    """
    if amax_out is not None:
        record_(amax_out, x, scale, dtype)
    payload = encode(x.contiguous(), scale, dtype)
    empty = payload.new_empty(0)
    return payload if rowwise else empty, payload.t().contiguous() if transposed else empty


@operator(
    gpu=".grad_output_triton",
    fake=lambda x, dtype, scale, transposed: (
        *layouts(x, dtype, transposed=transposed),
        fp32(x, x.shape[1]),
        taken_scale(x, scale),
    ),
    mutates=["amax_out"],
    check=check_matrix,
)
def quantize_grad_output(
    x: Tensor,
    dtype: torch.dtype,
    *,
    scale: Tensor | None,
    power_of_two: bool = False,
    amax_out: Tensor | None = None,
    transposed: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantise an output gradient `x` [M, K] and sum its columns (a bias's gradient) in one read.

    Args:
        scale: FP32 [1]; None takes one from the amax of `x`.

    Returns:
        payload [M, K], its transpose [K, M] (empty unless `transposed`), column sums FP32 [K], the scale taken FP32 [1]
        (empty if it was given).
    """
    taken = scale_from_amax(amax(x), dtype, power_of_two=power_of_two) if scale is None else None
    used = scale if scale is not None else taken
    assert used is not None
    payload, payload_t = quantize_with_scale(x, used, dtype, transposed=transposed, amax_out=amax_out)
    return payload, payload_t, x.float().sum(dim=0), used.new_empty(0) if taken is None else taken


def _check_payload(payload: Tensor) -> None:
    assert payload.ndim in (2, 3) and payload.dtype in FP8_DTYPES, (payload.shape, payload.dtype)


@operator(
    gpu=".triton",
    fake=lambda payload: payload.new_empty((*payload.shape[:-2], payload.shape[-1], payload.shape[-2])),
    check=_check_payload,
)
def transpose(payload: Tensor) -> Tensor:
    """[M, K] FP8 bytes → contiguous [K, M]; of several matrices [E, M, K] → [E, K, M]."""
    return payload.mT.contiguous()


def quantize_with_or_without_scale(
    values: Tensor, dtype: torch.dtype, scale: Tensor | None, power_of_two: bool, amax_out: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Payload of FP32 `values`, and the scale that was taken from their amax (empty if one was given)."""
    if scale is None:
        taken = scale_from_amax(amax(values), dtype, power_of_two=power_of_two)
        return encode(values, taken, dtype), taken
    if amax_out is not None:
        record_(amax_out, values, scale, dtype)
    return encode(values, scale, dtype), scale.new_empty(0)


def interleaved(grads: Sequence[Tensor]) -> Tensor:
    """Gradients [s, b, groups, width] of query, key and value → [s · b, groups · (sum of widths)]."""
    seq, batch = grads[0].shape[:2]
    return torch.cat(list(grads), dim=3).reshape(seq * batch, -1)


def _outputs(
    grads: list[Tensor], dtype: torch.dtype, scale: Tensor | None, column_sums: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    query = grads[0]
    seq, batch, groups, _ = query.shape
    tokens, columns = seq * batch, groups * sum(grad.shape[3] for grad in grads)
    sums = fp32(query, columns if column_sums else 0)
    return *layouts(query.new_empty((tokens, columns)), dtype), sums, taken_scale(query, scale)


def _check_grads(grads: list[Tensor]) -> None:
    assert len(grads) == 3 and grads[1].shape == grads[2].shape, [grad.shape for grad in grads]


@operator(gpu=".grad_output_triton", fake=_outputs, mutates=["amax_out"], check=_check_grads)
def quantize_qkv_grad(
    grads: list[Tensor],
    dtype: torch.dtype,
    *,
    scale: Tensor | None,
    power_of_two: bool = False,
    amax_out: Tensor | None = None,
    column_sums: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`quantize_grad_output` of the interleaved gradients [T, N], in one read of each.

    Args:
        grads: of query [s, b, groups, heads per group · d], key and value [s, b, groups, d], with any strides.

    Returns:
        payload [T, N], its transpose, column sums FP32 [N] (empty unless requested), the scale taken (empty if given).
    """
    payload, payload_t, sums, taken = quantize_grad_output(
        interleaved(grads), dtype, scale=scale, power_of_two=power_of_two, amax_out=amax_out
    )
    return payload, payload_t, sums if column_sums else sums.new_empty(0), taken
