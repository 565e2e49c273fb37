"""A linear layer that ranks do not share and that has no links, as straight calls: what the layers of other models are.

The bits are those of `linear`'s function with `Local`. Rows that may be on their way and sums over ranks would cost the
host 10 µs a layer. On a GPU, what forward and backward launch is queued by one call each (`kernels.launch_list`).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from ..dtypes import FP8_DTYPES
from ..kernels import ops
from ..kernels.ops import StoredWeight
from ..quantization.operand import Format, Quantized, multiply
from ..quantization.recipe import Quantizer
from ..quantization.sources import GradSource, TensorSource
from ..quantization.weight_grad import GradPlace, WeightGrad
from .gemms import LinearParams, bias_operand, deliver_wgrad, delivered_wgrad, taken_place, weight_operand
from .operands import as_matrix, as_whole_rows, without_padding
from .parallelism import LOCAL

_forwards, _products, _backwards = ops.LaunchLists(), ops.LaunchLists(), ops.LaunchLists()


def is_local(linear: LinearParams) -> bool:
    """Whether these functions compute the layer."""
    return linear.parallelism is LOCAL and linear.links is None


def forward(
    x: Tensor, linear: LinearParams, dtype: torch.dtype, *, keeps_columns: bool, keeps_rows: bool = False
) -> tuple[Tensor, Quantized]:
    """y [..., N] in `dtype` from x [..., K], and the input in FP8.

    The input in FP8 has its columns, for `backward`, if `keeps_columns`; its rows, for `forward_of_cast`, if
    `keeps_rows`; and rows of padding where the format needs them.
    """
    quantizer, shape = linear.quantizers.input, x.shape
    x = as_whole_rows(x, quantizer.format.size_multiple)
    known, bias = _known_parts(x, linear, quantizer), linear.bias
    if known is None or not (bias is None or bias.is_contiguous()):
        made, operand = _forward(x, linear, dtype, keeps_columns)
        return without_padding(made, shape), operand

    def compute() -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        y, operand = _forward_together(x, linear, dtype, keeps_columns)
        return y, operand.payload_t, operand.scale, operand.payload if keeps_rows else None

    key = (dtype, keeps_columns, keeps_rows, None if bias is None else bias.dtype, known.key)
    y_shape = (*x.shape[:-1], linear.weight._payload.shape[0])
    y, columns, scale, rows = _forwards.run(key, (bias, *known.tensors), compute, y_shape)
    assert y is not None and scale is not None
    return without_padding(y, shape), Quantized(rows, columns, scale, quantizer.format)


def forward_of_cast(operand: Quantized, linear: LinearParams, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """y [..., N] in `dtype` from an input of `shape` [..., K], whose rows [T, K] are in FP8, those of padding too."""
    rows, bias = operand.payload, linear.bias
    known = _known_weight(rows, operand.format, linear)
    if known is None or not (bias is None or bias.is_contiguous()):
        return without_padding(_multiply(operand, linear, dtype), shape)
    key = (dtype, None if bias is None else bias.dtype, known.key)
    y_shape = (*shape[:-1], linear.weight._payload.shape[0]) if rows.numel() == shape.numel() else None
    tensors = (bias, operand.scale, *known.tensors)
    (y,) = _products.run(key, tensors, lambda: (_multiply(operand, linear, dtype),), y_shape)
    assert y is not None
    return without_padding(y, shape)


def backward(
    grad_output: Tensor, x_t: Quantized | None, linear: LinearParams, *, needs_grad_input: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of the input [..., K]; of the weight [N, K] if it has no `main_grad`; of the bias, FP32 [N].

    Args:
        grad_output: [..., N].
        x_t: the input's columns [K, T], those of padding too; None: nobody needs the weight's gradient.
    """
    shape = grad_output.shape
    grad_output = as_whole_rows(grad_output, linear.quantizers.grad_output.format.size_multiple)
    known = _known_parts(grad_output, linear, linear.quantizers.grad_output)
    if known is None or linear.quantizers.weight_grad is not None:
        grad_input, g, grad_bias = _start_backward(grad_output, x_t, linear, needs_grad_input)
        grad_weight = None if x_t is None else deliver_wgrad(g.t, x_t, linear, grad_output.dtype)
        return None if grad_input is None else without_padding(grad_input, shape), grad_weight, grad_bias
    place = None if x_t is None else taken_place(linear)

    def compute() -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        stored = _stored_weight(linear) if needs_grad_input else None
        if stored is not None:
            return _backward_together(grad_output, x_t, linear, stored, place)
        grad_input, g, grad_bias = _start_backward(grad_output, x_t, linear, needs_grad_input)
        if x_t is None:
            return grad_input, None, grad_bias
        grad_weight = _wgrad(g.t, x_t, grad_output.dtype, place)
        if grad_weight is not None and place is not None and place.scales is not None:
            ops.quantize_blockwise_(grad_weight.view(-1), place.payload, place.scales)
            grad_weight = None
        return grad_input, grad_weight, grad_bias

    columns, scale = (None, None) if x_t is None else (x_t.payload, x_t.scale)
    payload, scales, adds = (None, None, False) if place is None else place
    storage = None if payload is None else (payload.dtype, adds)
    key = (needs_grad_input, None if columns is None else columns.dtype, linear.bias is None, storage, known.key)
    grad_shape = (*grad_output.shape[:-1], linear.weight._payload.shape[1])
    tensors = (columns, scale, payload, scales, *known.tensors)
    grad_input, grad_weight, grad_bias = _backwards.run(key, tensors, compute, grad_shape)
    if grad_weight is not None:
        grad_weight = delivered_wgrad(grad_weight, linear)
    return None if grad_input is None else without_padding(grad_input, shape), grad_weight, grad_bias


def _forward(x: Tensor, linear: LinearParams, dtype: torch.dtype, keeps_columns: bool) -> tuple[Tensor, Quantized]:
    operand = linear.quantizers.input.quantize(TensorSource(as_matrix(x), True, keeps_columns))
    return _multiply(operand, linear, dtype), operand


def _forward_together(
    x: Tensor, linear: LinearParams, dtype: torch.dtype, keeps_columns: bool
) -> tuple[Tensor, Quantized]:
    """`_forward` with known parts, in few launches."""
    stored, quantizer, bias = _stored_weight(linear), linear.quantizers.input, linear.bias
    if stored is None:
        return _forward(x, linear, dtype, keeps_columns)
    format, weight_format = quantizer.format, linear.quantizers.weight
    scale, record = quantizer.known_scale() or (None, None)
    payload, payload_t, taken, weight, bias_cast = ops.quantize_layer_input(
        as_matrix(x),
        stored,
        bias,
        format.dtype,
        output_dtype=dtype,
        scale=scale,
        power_of_two=format.power_of_two,
        amax_out=record,
        transposed=keeps_columns,
    )
    operand = Quantized(payload, payload_t if keeps_columns else None, taken if scale is None else scale, format)
    w = Quantized(stored.payload, None, stored.scales, weight_format)
    if stored.cast_scale is not None:
        w = Quantized(weight, None, stored.cast_scale, weight_format)
    if bias is not None and bias.dtype is not dtype:
        bias = bias_cast
    return multiply(operand, w, dtype, bias=bias, use_fast_accum=True), operand


def _multiply(operand: Quantized, linear: LinearParams, dtype: torch.dtype) -> Tensor:
    weight, bias = weight_operand(linear), bias_operand(linear, dtype)
    return multiply(operand, weight, dtype, bias=bias, use_fast_accum=True)


def _start_backward(
    grad_output: Tensor, x_t: Quantized | None, linear: LinearParams, needs_grad_input: bool
) -> tuple[Tensor | None, Quantized, Tensor | None]:
    """`backward` but for the weight's gradient: the input's gradient, the output's in FP8, the bias's gradient."""
    source = GradSource(as_matrix(grad_output), linear.bias is not None, x_t is not None)
    g, grad_bias = linear.quantizers.grad_output.quantize(source)
    if not needs_grad_input:
        return None, g, grad_bias
    weight = linear.weight.transposed_gemm_operand(linear.quantizers.weight)
    return multiply(g, weight, grad_output.dtype), g, grad_bias


def _backward_together(
    grad_output: Tensor,
    x_t: Quantized | None,
    linear: LinearParams,
    stored: StoredWeight,
    place: GradPlace | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of the input, the weight and the bias, with known parts, in few launches.

    Args:
        place: where the weight's gradient goes; then None is returned for it.
    """
    quantizer, dtype, has_bias = linear.quantizers.grad_output, grad_output.dtype, linear.bias is not None
    scale, record = quantizer.known_scale() or (None, None)
    payload, payload_t, partial_sums, taken, weight_t = ops.quantize_layer_grad(
        as_matrix(grad_output),
        stored,
        quantizer.format.dtype,
        scale=scale,
        power_of_two=quantizer.format.power_of_two,
        amax_out=record,
        transposed=x_t is not None,
        column_sums=has_bias,
    )
    columns = None if x_t is None else payload_t
    g = Quantized(payload, columns, taken if scale is None else scale, quantizer.format)
    weight_scale = stored.scales if stored.cast_scale is None else stored.cast_scale
    grad_input = multiply(g, Quantized(weight_t, None, weight_scale, linear.quantizers.weight), dtype)
    del payload, weight_t
    grad_weight = None if x_t is None else _wgrad(g.t, x_t, dtype, place)
    if grad_weight is None or place is None or place.scales is None:
        return grad_input, grad_weight, ops.sum_partial_sums(partial_sums) if has_bias else None
    if has_bias:
        flat = grad_weight.view(-1)
        return grad_input, None, ops.quantize_blockwise_and_sum_(flat, place.payload, place.scales, partial_sums)
    ops.quantize_blockwise_(grad_weight.view(-1), place.payload, place.scales)
    return grad_input, None, None


def _wgrad(g_t: Quantized, x_t: Quantized, dtype: torch.dtype, place: GradPlace | None) -> Tensor | None:
    """grad_weight [N, K] in `dtype`; None if the GEMM wrote it to a wide place."""
    if place is None or place.scales is not None:
        return multiply(g_t, x_t, dtype)
    WeightGrad(g_t, x_t, dtype).write_wide_(place.payload, adds=place.adds)
    return None


def _stored_weight(linear: LinearParams) -> StoredWeight | None:
    """A known weight as its casts take it; None if it is stored in another way."""
    weight = linear.weight
    if weight._payload.dtype in FP8_DTYPES:
        return StoredWeight(weight._payload, weight._scale, None)
    if weight._payload.dtype is torch.float16 and weight._scale.numel() > 1:
        return StoredWeight(weight._payload, weight._scale, weight.current_cast_scale)
    return None


class _KnownParts(NamedTuple):
    """What a layer's launches depend on: tensors whose addresses change from call to call, and everything else."""

    key: Hashable
    tensors: tuple[Tensor | None, ...]


def _known_parts(x: Tensor, linear: LinearParams, quantizer: Quantizer) -> _KnownParts | None:
    """Those of a GEMM's operands: `x`, cast by `quantizer`, and the weight. None: torch's operations have a part in it,
    or the layer is not on a GPU.
    """
    history = quantizer.history
    if quantizer.probe is not None or (history is not None and not history.knows(quantizer.slot)):
        return None
    known = _known_weight(x, quantizer.format, linear)
    if known is None:
        return None
    scale = record = None
    if history is not None:
        scale, record = history.scale_of(quantizer.slot), history.record_of(quantizer.slot)
    return _KnownParts((history is None, known.key), (*known.tensors, scale, record))


def _known_weight(x: Tensor, format: Format, linear: LinearParams) -> _KnownParts | None:
    """Those of `x` and the weight: `x` is multiplied in `format`, which it may have already."""
    if type(x) is not Tensor or not ops.LaunchLists.take(x) or not x.is_contiguous():
        return None
    weight, weight_format = linear.weight, linear.quantizers.weight
    if linear.quantizers.weight_probe is not None or not (format.has_one_scale and weight_format.has_one_scale):
        return None
    cast_scale, payload, scales = None, weight._payload, weight._scale
    if not payload.is_contiguous():
        return None
    if payload.dtype not in FP8_DTYPES:
        cast_scale = weight.current_cast_scale
        if cast_scale is None:
            return None
    key = (
        *(x.shape, x.dtype, payload.shape, payload.dtype, scales.shape),
        *(format.dtype, format.power_of_two, weight_format.dtype, weight_format.power_of_two),
    )
    return _KnownParts(key, (x, payload, scales, cast_scale))
