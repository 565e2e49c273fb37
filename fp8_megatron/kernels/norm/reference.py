"""The specification of normalisation fused with its cast to FP8, in plain PyTorch.

LayerNorm: y = (x − mean) · rstd · weight + bias. RMSNorm: y = x · rstd · weight (+ bias if there is one). Statistics
and everything up to the cast are FP32; y is never written in 16 bits. Only x and the statistics are kept for backward.
The weight gradient quantises y again, with the scale of the forward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...dtypes import FP8_DTYPES
from ..quantize.blocks import blocks_like, check_block_columns, quantize_blocks
from ..quantize.reference import quantize_grad_output, quantize_with_or_without_scale
from ..reference import amax, encode
from ..registration import operator
from ..shapes import fp32, layouts, payload_like, taken_scale
from ..wire.reference import sum_of_rows


def _normalized(x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    values = x.float()
    if mean.numel():
        values = values - mean[:, None]
    return values * rstd[:, None]


def _affine(normalized: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    values = normalized * weight.float()
    return values if bias is None else values + bias.float()


def statistics(x: Tensor, eps: float, rms: bool) -> tuple[Tensor, Tensor]:
    """Mean (empty under `rms`) and 1 / √(variance + eps), FP32 [T], of the rows of `x` [T, K]."""
    values = x.float()
    mean = values.new_empty(0) if rms else values.mean(dim=1)
    centred = values if rms else values - mean[:, None]
    return mean, 1.0 / torch.sqrt(centred.square().mean(dim=1) + eps)


def _check_norm(x: Tensor, weight: Tensor, bias: Tensor | None, rms: bool) -> None:
    assert x.ndim == 2 and weight.shape == x.shape[1:] and not (rms and bias is not None), (x.shape, weight.shape, rms)


@operator(
    gpu=".cuda",
    fake=lambda x, rms: (x.new_empty(x.shape), fp32(x, 0 if rms else len(x)), fp32(x, len(x))),
    check=_check_norm,
)
def norm(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, rms: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise `x` [T, K], for readers in 16 bits.

    Args:
        weight: [K]. bias: [K] or None, which it is under `rms`.

    Returns:
        y [T, K] in the dtype of `x`; mean (empty under `rms`) and rstd, FP32 [T], for `norm_backward`.
    """
    mean, rstd = statistics(x, eps, rms)
    return _affine(_normalized(x, mean, rstd), weight, bias).to(x.dtype), mean, rstd


@operator(gpu=".triton", fake=lambda x: fp32(x, 1))
def norm_amax(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, rms: bool) -> Tensor:
    """Amax of the normalised `x` [T, K], FP32 [1], without writing it."""
    mean, rstd = statistics(x, eps, rms)
    return amax(_affine(_normalized(x, mean, rstd), weight, bias))


def _check_norm_cast(x: Tensor, weight: Tensor, dtype: torch.dtype) -> None:
    assert x.ndim == 2 and weight.shape == x.shape[1:] and dtype in FP8_DTYPES, (x.shape, weight.shape, dtype)


@operator(
    gpu=".triton",
    fake=lambda x, dtype, rms, scale: (
        payload_like(x, x.shape, dtype),
        taken_scale(x, scale),
        fp32(x, 0 if rms else len(x)),
        fp32(x, len(x)),
    ),
    mutates=["amax_out"],
    check=_check_norm_cast,
)
def norm_quantize(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    eps: float,
    rms: bool,
    scale: Tensor | None,
    power_of_two: bool = False,
    amax_out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalise `x` [T, K] and quantise the result.

    Args:
        weight: [K]. bias: [K] or None.
        scale: FP32 [1]; None takes one from the amax of the result (current scaling).
        amax_out: FP32 [1], raised to the amax of the result when given.

    Returns:
        payload [T, K]; the scale taken, FP32 [1] (empty if it was given); mean (empty under `rms`) and rstd, FP32 [T].
    """
    mean, rstd = statistics(x, eps, rms)
    y = _affine(_normalized(x, mean, rstd), weight, bias)
    quantized, taken = quantize_with_or_without_scale(y, dtype, scale, power_of_two, amax_out)
    return quantized, taken, mean, rstd


@operator(gpu=".triton", fake=lambda x, dtype, transposed: layouts(x, dtype)[transposed])
def norm_requantize(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    *,
    transposed: bool,
) -> Tensor:
    """Recompute the payload of `norm_quantize` from its statistics and scale: [T, K], or with `transposed` [K, T]."""
    quantized = encode(_affine(_normalized(x, mean, rstd), weight, bias), scale, dtype)
    return quantized.t().contiguous() if transposed else quantized


def _check_blocks(x: Tensor, weight: Tensor, dtype: torch.dtype) -> None:
    _check_norm_cast(x, weight, dtype)
    check_block_columns(x.shape[1], "a norm")


@operator(
    gpu=".blocks_triton",
    fake=lambda x, dtype, rms: (*blocks_like(x, x.shape, dtype), fp32(x, 0 if rms else len(x)), fp32(x, len(x))),
    check=_check_blocks,
)
def norm_quantize_blocks(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    eps: float,
    rms: bool,
    power_of_two: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`norm_quantize` with a scale for each block of 128 along a row.

    Returns:
        payload [T, K], T a multiple of 16 and K of 128; its scales FP32 [K / 128, T], as `quantize.blocks` lays them
        out; mean (empty under `rms`) and rstd, FP32 [T].
    """
    mean, rstd = statistics(x, eps, rms)
    y = _affine(_normalized(x, mean, rstd), weight, bias)
    payload, scales, *_ = quantize_blocks(y, dtype, power_of_two=power_of_two)
    return payload, scales, mean, rstd


@operator(
    gpu=".blocks_triton",
    fake=lambda x, dtype: blocks_like(x, x.shape[::-1], dtype),
    check=_check_blocks,
)
def norm_requantize_blocks(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    dtype: torch.dtype,
    *,
    power_of_two: bool = False,
) -> tuple[Tensor, Tensor]:
    """The transpose [K, T] of the norm that `norm_quantize_blocks` cast, from its statistics, and the scales of its own
    blocks [⌈T / 128⌉, K]."""
    y = _affine(_normalized(x, mean, rstd), weight, bias)
    return quantize_blocks(y, dtype, rowwise=False, transposed=True, power_of_two=power_of_two)[2:4]


def _check_rows(x: Tensor, rstd: Tensor, row_scales: Tensor) -> None:
    assert row_scales.shape == rstd.shape == x.shape[:1], (row_scales.shape, rstd.shape, x.shape)


@operator(gpu=".triton", fake=lambda x: fp32(x, 1), check=_check_rows)
def norm_amax_scaled(
    x: Tensor, weight: Tensor, bias: Tensor | None, mean: Tensor, rstd: Tensor, row_scales: Tensor
) -> Tensor:
    """Amax of what `norm_quantize_scaled` casts, FP32 [1], without writing it."""
    return amax(_scaled(x, weight, bias, mean, rstd, row_scales))


@operator(
    gpu=".triton",
    fake=lambda x, dtype, scale, transposed: (layouts(x, dtype)[transposed], taken_scale(x, scale)),
    check=_check_rows,
)
def norm_quantize_scaled(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    row_scales: Tensor,
    dtype: torch.dtype,
    *,
    scale: Tensor | None,
    power_of_two: bool = False,
    transposed: bool = False,
) -> tuple[Tensor, Tensor]:
    """Normalise `x` [T, K] with known statistics, multiply each row by its `row_scales` FP32 [T], and quantise.

    Args:
        scale: FP32 [1]; None takes one from the amax of the result (current scaling).

    Returns:
        payload [T, K], or with `transposed` [K, T]; the scale taken, FP32 [1] (empty if it was given).
    """
    value = _scaled(x, weight, bias, mean, rstd, row_scales)
    quantized, taken = quantize_with_or_without_scale(value, dtype, scale, power_of_two, None)
    return quantized.t().contiguous() if transposed else quantized, taken


def _scaled(x: Tensor, weight: Tensor, bias: Tensor | None, mean: Tensor, rstd: Tensor, row_scales: Tensor) -> Tensor:
    """FP32 [T, K]."""
    values = _normalized(x, mean, rstd * row_scales) * weight.float()
    return values if bias is None else values + row_scales[:, None] * bias.float()


def _gradients(x: Tensor, has_bias: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Of x, weight and bias, without values."""
    columns = x.shape[1]
    return x.new_empty(x.shape), fp32(x, columns), fp32(x, columns if has_bias else 0)


def _check_summands(grad: Tensor, x: Tensor) -> None:
    assert grad.shape[1:] == x.shape and grad.ndim == 3, (grad.shape, x.shape)


@operator(gpu=".triton", fake=_gradients, check=_check_summands)
def norm_backward(
    grad: Tensor, residual_grad: Tensor | None, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, *, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the norm. The residual branch's gradient is added in the same pass.

    Args:
        grad: the gradient of y, [d, T, K], to be summed over d as `wire.reference.sum_of_rows` does.
        residual_grad: [T, K], the gradient that reaches x through the residual branch; None if there is none.

    Returns:
        grad of x [T, K] in its dtype; of the weight FP32 [K]; of the bias FP32 [K] (empty unless `has_bias`).
    """
    g = sum_of_rows(grad).float()
    normalized = _normalized(x, mean, rstd)
    weighted = g * weight.float()
    projection = (normalized * weighted).mean(dim=1, keepdim=True)
    grad_x = weighted - normalized * projection
    if mean.numel():
        grad_x = grad_x - weighted.mean(dim=1, keepdim=True)
    grad_x = grad_x * rstd[:, None]
    if residual_grad is not None:
        grad_x = grad_x + residual_grad.float()
    grad_bias = g.sum(dim=0) if has_bias else g.new_empty(0)
    return grad_x.to(x.dtype), (g * normalized).sum(dim=0), grad_bias


@operator(
    gpu=".cuda",
    fake=lambda x, dtype, has_bias, transposed: (
        *_gradients(x, has_bias),
        *layouts(x, dtype, transposed=transposed),
        fp32(x, x.shape[1]),
    ),
    mutates=["amax_out"],
    check=_check_summands,
)
def norm_backward_quantize(
    grad: Tensor,
    residual_grad: Tensor | None,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    dtype: torch.dtype,
    *,
    has_bias: bool,
    scale: Tensor,
    amax_out: Tensor | None,
    transposed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`norm_backward`, and its gradient of x cast as in `quantize.reference.quantize_grad_output`, with a known scale.

    Args:
        scale: FP32 [1]. amax_out: FP32 [1], raised to the gradient's amax when given.

    Returns:
        The outputs of `norm_backward`; the gradient of x in FP8 [T, K]; its transpose [K, T] (empty unless
        `transposed`); its column sums FP32 [K].
    """
    grads = norm_backward(grad, residual_grad, x, weight, mean, rstd, has_bias=has_bias)
    quantized, quantized_t, column_sums, _ = quantize_grad_output(
        grads[0], dtype, scale=scale, amax_out=amax_out, transposed=transposed
    )
    return *grads, quantized, quantized_t, column_sums
