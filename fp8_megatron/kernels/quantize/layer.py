"""The casts of one linear layer, in plain PyTorch: its input or its output's gradient, beside its weight and its bias.

None of a layer's casts waits for the weight's or the bias's. On a GPU they share launches. A launch takes the host
longer than a small layer's kernels take the GPU.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from ...dtypes import E4M3
from ..reference import amax, scale_from_amax
from ..registration import operator
from ..shapes import fp32, layouts, payload_like, taken_scale
from ..sizes import cdiv
from .blockwise import quantize_blockwise_
from .reference import cast_vector, quantize_with_scale, transpose
from .weight import quantize_weight

#: Rows of an output gradient whose sum is one partial sum.
SUM_ROWS = 128


class StoredWeight(NamedTuple):
    """A weight [N, K] as it is stored.

    Attributes:
        payload: FP8, or FP16 with `scales` of blocks, which is cast to E4M3.
        scales: FP32.
        cast_scale: FP32 [1], what FP16 is cast with; None for FP8.
    """

    payload: Tensor
    scales: Tensor
    cast_scale: Tensor | None


def _input(a: SimpleNamespace) -> tuple[Tensor, ...]:
    weight, casts_bias = a.weight, a.bias is not None and a.bias.dtype != a.output_dtype
    return (
        *layouts(a.x, a.dtype, transposed=a.transposed),
        taken_scale(a.x, a.scale),
        payload_like(weight.payload, weight.payload.shape, E4M3, wanted=weight.cast_scale is not None),
        payload_like(a.x, a.bias.shape if casts_bias else (0,), a.output_dtype),
    )


@operator(gpu=".layer_triton", fake=_input, mutates=["amax_out"])
def quantize_layer_input(
    x: Tensor,
    weight: StoredWeight,
    bias: Tensor | None,
    dtype: torch.dtype,
    output_dtype: torch.dtype,
    scale: Tensor | None,
    power_of_two: bool,
    amax_out: Tensor | None,
    transposed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Quantise a layer's input `x` [M, K], and cast what its GEMM needs of the weight [N, K] and the bias [N].

    Args:
        scale: FP32 [1]; None takes one from the amax of `x`.
        amax_out: see `reference.quantize_with_scale`.

    Returns:
        payload [M, K]; its transpose [K, M] (empty unless `transposed`); the scale taken FP32 [1] (empty if it was
        given); the weight in E4M3 (empty if it is FP8); the bias in `output_dtype` (empty if it has it).
    """
    payload, payload_t, taken = _cast(x, dtype, scale, power_of_two, amax_out, transposed)
    weight_cast, bias_cast = x.new_empty(0, dtype=E4M3), x.new_empty(0, dtype=output_dtype)
    if weight.cast_scale is not None:
        weight_cast = quantize_weight(weight.payload, weight.scales, weight.cast_scale, E4M3, False)
    if bias is not None and bias.dtype != output_dtype:
        bias_cast = cast_vector(bias, output_dtype)
    return payload, payload_t, taken, weight_cast, bias_cast


def _grad(a: SimpleNamespace) -> tuple[Tensor, ...]:
    rows, columns = a.x.shape
    weight = a.weight.payload
    return (
        *layouts(a.x, a.dtype, transposed=a.transposed),
        fp32(a.x, cdiv(rows, SUM_ROWS) if a.column_sums else 0, columns),
        taken_scale(a.x, a.scale),
        layouts(weight, weight.dtype if a.weight.cast_scale is None else E4M3)[1],
    )


@operator(gpu=".layer_triton", fake=_grad, mutates=["amax_out"])
def quantize_layer_grad(
    x: Tensor,
    weight: StoredWeight,
    dtype: torch.dtype,
    scale: Tensor | None,
    power_of_two: bool,
    amax_out: Tensor | None,
    transposed: bool,
    column_sums: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Quantise the gradient `x` [M, N] of a layer's output, and transpose its weight [N, K] in FP8.

    Args:
        scale: FP32 [1]; None takes one from the amax of `x`.
        amax_out: see `reference.quantize_with_scale`.

    Returns:
        payload [M, N]; its transpose [N, M] (empty unless `transposed`); the sums of every `SUM_ROWS` rows, FP32
        [⌈M / SUM_ROWS⌉, N] ([0, N] unless `column_sums`); the scale taken FP32 [1] (empty if it was given); the
        weight's transpose [K, N].
    """
    payload, payload_t, taken = _cast(x, dtype, scale, power_of_two, amax_out, transposed)
    parts = [part.sum(dim=0) for part in x.float().split(SUM_ROWS)] if column_sums else []
    sums = torch.stack(parts) if parts else x.new_empty((0, x.shape[1]), dtype=torch.float32)
    if weight.cast_scale is None:
        weight_t = transpose(weight.payload)
    else:
        weight_t = quantize_weight(weight.payload, weight.scales, weight.cast_scale, E4M3, True)
    return payload, payload_t, sums, taken, weight_t


@operator(gpu=".layer_triton", fake=lambda a: fp32(a.partial_sums, a.partial_sums.shape[1]))
def sum_partial_sums(partial_sums: Tensor) -> Tensor:
    """Partial sums FP32 [R, N] → sums FP32 [N]."""
    return partial_sums.sum(dim=0)


@operator(
    gpu=".layer_triton",
    fake=lambda a: fp32(a.partial_sums, a.partial_sums.shape[1]),
    mutates=["payload", "scales"],
)
def quantize_blockwise_and_sum_(x: Tensor, payload: Tensor, scales: Tensor, partial_sums: Tensor) -> Tensor:
    """`blockwise.quantize_blockwise_` of a weight's gradient, and `sum_partial_sums` of its bias's."""
    quantize_blockwise_(x, payload, scales)
    return sum_partial_sums(partial_sums)


def _cast(
    x: Tensor, dtype: torch.dtype, scale: Tensor | None, power_of_two: bool, amax_out: Tensor | None, transposed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Payload, its transpose, and the scale that was taken."""
    taken = x.new_empty(0, dtype=torch.float32)
    if scale is None:
        scale = taken = scale_from_amax(amax(x), dtype, power_of_two=power_of_two)
    payload, payload_t = quantize_with_scale(x, scale, dtype, True, transposed, amax_out)
    return payload, payload_t, taken
