"""The casts of one linear layer, two at a time where they do not wait for each other, in plain PyTorch.

On a GPU two of them share a launch. A launch takes the host longer than a small layer's kernels take the GPU.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from ..reference import amax, scale_from_amax
from ..registration import operator
from ..shapes import fp32, layouts, payload_like, taken_scale
from ..sizes import cdiv
from .blockwise import quantize_blockwise_
from .reference import cast_vector, quantize_current, quantize_with_scale, transpose

#: Rows of an output gradient whose sum is one partial sum.
SUM_ROWS = 128


@operator(
    gpu=".layer_triton",
    fake=lambda a: (
        *layouts(a.x, a.dtype, transposed=a.transposed),
        fp32(a.x, 1),
        payload_like(a.bias, a.bias.shape, a.bias_dtype),
    ),
)
def quantize_input_and_bias(
    x: Tensor, bias: Tensor, dtype: torch.dtype, bias_dtype: torch.dtype, power_of_two: bool, transposed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantise a layer's input `x` [M, K] with the scale of its amax, and cast the bias [N].

    Returns:
        payload [M, K], its transpose [K, M] (empty unless `transposed`), scale FP32 [1], the bias in `bias_dtype`.
    """
    return *quantize_current(x, dtype, power_of_two, True, transposed), cast_vector(bias, bias_dtype)


def _grad_and_weight(a: SimpleNamespace) -> tuple[Tensor, ...]:
    rows, columns = a.x.shape
    return (
        *layouts(a.x, a.dtype, transposed=a.transposed),
        fp32(a.x, cdiv(rows, SUM_ROWS) if a.column_sums else 0, columns),
        taken_scale(a.x, a.scale),
        layouts(a.weight, a.weight.dtype)[1],
    )


@operator(gpu=".layer_triton", fake=_grad_and_weight, mutates=["amax_out"])
def quantize_grad_and_transpose(
    x: Tensor,
    weight: Tensor,
    dtype: torch.dtype,
    scale: Tensor | None,
    power_of_two: bool,
    amax_out: Tensor | None,
    transposed: bool,
    column_sums: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Quantise a layer's output gradient `x` [M, N], and transpose its FP8 weight [N, K].

    Args:
        scale: FP32 [1]; None takes one from the amax of `x`.
        amax_out: see `reference.quantize_with_scale`.

    Returns:
        payload [M, N]; its transpose [N, M] (empty unless `transposed`); the sums of every `SUM_ROWS` rows, FP32
        [⌈M / SUM_ROWS⌉, N] ([0, N] unless `column_sums`); the scale taken FP32 [1] (empty if it was given); the
        weight's transpose [K, N].
    """
    taken = scale_from_amax(amax(x), dtype, power_of_two=power_of_two) if scale is None else None
    used = scale if scale is not None else taken
    assert used is not None
    payload, payload_t = quantize_with_scale(x, used, dtype, True, transposed, amax_out)
    parts = [part.sum(dim=0) for part in x.float().split(SUM_ROWS)] if column_sums else []
    sums = torch.stack(parts) if parts else x.new_empty((0, x.shape[1]), dtype=torch.float32)
    return payload, payload_t, sums, used.new_empty(0) if taken is None else taken, transpose(weight)


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
