"""The three GEMMs of a linear layer.

fprop   y = x·Wᵀ            fast accumulation
dgrad   grad_input = g·W    Wᵀ is made from the FP8 weight on demand; split accumulation
wgrad   grad_weight = gᵀ·x  both K-major over tokens; split accumulation; written to `weight.main_grad` if it exists
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..collectives.row_exchange import RowSum
from ..dtypes import FP8_DTYPES
from ..formats.format import Quantized
from ..kernels import ops
from ..kernels.ops import WrittenCast
from ..quantization.cast_health import CastProbe
from ..quantization.recipe import LinearQuantizers
from ..quantization.scaled_tensor import ScaledTensor
from ..quantization.weight_grad import WeightGrad
from ..quantization.weight_products import without_products
from .links import LinearLinks
from .operands import MainGrad
from .parallelism import LOCAL, Local, PendingSum
from .recomputed import Recomputations
from .rows import OperandRows
from .shared_cast import InputSharing


class LinearParams(NamedTuple):
    """One linear layer.

    Attributes:
        weight, bias: [N, K], and [N] or None.
        quantizers: of its operands.
        parallelism: how ranks share it.
        links: what it hands to other layers.
        sharing: what it knows of layers with the same input.
        recomputations: what finds inputs that backward computes again.
        scales_grad_rows: whether each row of the output's gradient has a scale of its own (`row_scaled`).
    """

    weight: ScaledTensor
    bias: Tensor | None
    quantizers: LinearQuantizers
    parallelism: Local = LOCAL
    links: LinearLinks | None = None
    sharing: InputSharing | None = None
    recomputations: Recomputations | None = None
    scales_grad_rows: bool = False

    def cast_grad(self, grad_output: Tensor, *, transposed: bool = True) -> tuple[OperandRows, Tensor | None]:
        """See `Local.cast_grad`."""
        early_cast = None if self.links is None else self.links.early_cast
        quantizer, has_bias = self.quantizers.grad_output, self.bias is not None
        return self.parallelism.cast_grad(grad_output, quantizer, early_cast, has_bias=has_bias, transposed=transposed)


class Product:
    """a [T, K] · w [N, K]ᵀ + bias [N] in `dtype`, computed on demand. A `parallelism.Summand`."""

    __slots__ = ("_a", "_bias", "_use_fast_accum", "_w", "device", "dtype", "shape")

    def __init__(
        self,
        a: OperandRows,
        w: Quantized,
        dtype: torch.dtype,
        *,
        bias: Tensor | None = None,
        use_fast_accum: bool = False,
    ) -> None:
        self._a, self._w, self._bias, self._use_fast_accum = a, w, bias, use_fast_accum
        self.dtype, self.device = dtype, w.payload.device
        self.shape = (a.num_rows, w.payload.shape[0])

    def compute(self, addend: Tensor | None = None) -> Tensor:
        """See `Summand.compute`. Each part of `a` is multiplied when it arrives."""
        num_rows, num_columns = self.shape
        y = torch.empty(num_rows, num_columns, dtype=self.dtype, device=self.device)
        if addend is not None:
            addend = addend.contiguous().view(num_rows, num_columns)
        for part, rows in self._a.parts():
            out, added = y, addend
            if rows.payload.shape[0] != num_rows:  # a view costs the host more than this test
                out, added = y[part], None if addend is None else addend[part]
            rows.multiply_into_(out, self._w, bias=self._bias, use_fast_accum=self._use_fast_accum, addend=added)
        return y

    def write(self, rows: slice, out: Tensor, adds_bias: bool) -> None:
        """See `Summand.write`."""
        bias = self._bias if adds_bias else None
        self._a.whole().rows(rows).multiply_into_(out, self._w, bias=bias, use_fast_accum=self._use_fast_accum)


class Computed:
    """A matrix [T, K] that is already computed. A `parallelism.Summand`."""

    __slots__ = ("_value", "device", "dtype", "shape")

    def __init__(self, value: Tensor) -> None:
        self._value, self.dtype, self.device = value, value.dtype, value.device
        self.shape = (value.shape[0], value.shape[1])

    def compute(self, addend: Tensor | None = None) -> Tensor:
        """See `Summand.compute`."""
        return self._value if addend is None else self._value + addend.view(self.shape)

    def write(self, rows: slice, out: Tensor, adds_bias: bool) -> None:
        """See `Summand.write`."""
        out.copy_(self._value[rows])


def fprop(
    x: OperandRows,
    linear: LinearParams,
    dtype: torch.dtype,
    addend: Tensor | None = None,
    *,
    recomputes: bool = False,
) -> Tensor:
    """y [T, N] in `dtype`, or this rank's part [T/tp, N] of the sum over ranks; plus `addend` [..., N].

    Args:
        recomputes: y was computed before, so that its weight's cast has been measured.
    """
    weight, bias = weight_operand(linear, recomputes=recomputes), bias_operand(linear, dtype)
    return linear.parallelism.sum(Product(x, weight, dtype, bias=bias, use_fast_accum=True), addend)


def weight_operand(linear: LinearParams, *, recomputes: bool = False) -> Quantized:
    """The weight [N, K] as `fprop` takes it."""
    weight = linear.weight.gemm_operand(linear.quantizers.weight)
    probe = linear.quantizers.weight_probe
    if probe is not None and probe.is_due and not recomputes:
        _measure_weight(probe, linear.weight, weight)
    return weight


def bias_operand(linear: LinearParams, dtype: torch.dtype) -> Tensor | None:
    """The bias [N] as `fprop` takes it: the GEMM adds one of its output's dtype, and another one is cast."""
    bias = linear.bias
    if bias is None or (bias.dtype is dtype and bias.is_contiguous()):
        return bias
    return bias.detach().to(dtype).contiguous()


def start_dgrad(g: OperandRows, linear: LinearParams, dtype: torch.dtype) -> RowSum | PendingSum:
    """Start grad_input: [T, K], or this rank's part [T/tp, K] of the sum over ranks."""
    return linear.parallelism.start_grad_sum(Product(g, transposed_weight(linear), dtype))


def dgrad_to_fp8(g: Quantized, linear: LinearParams, dtype: torch.dtype, cast: WrittenCast) -> Tensor:
    """grad_input [T, K] in FP8 `dtype`, cast inside the GEMM. The layer's ranks must not share the sum.

    Args:
        cast: its scale; the amax is written.
    """
    weight = transposed_weight(linear)
    out = g.payload.new_empty((g.payload.shape[0], weight.payload.shape[0]), dtype=dtype)
    ops.scaled_mm_to_fp8_(out, cast.amax, g.payload, weight.payload, g.scale, weight.scale, cast.inverse)
    return out


def wgrad(g: OperandRows, x_t: Quantized, linear: LinearParams, dtype: torch.dtype) -> Tensor | None:
    """Write grad_weight [N, K] to `main_grad`. If the weight has none, return it in `dtype`, for autograd.

    Args:
        x_t: the input's columns [K, T].
    """
    return deliver_wgrad(g.columns(), x_t, linear, dtype)


def deliver_wgrad(g_t: Quantized, x_t: Quantized, linear: LinearParams, dtype: torch.dtype) -> Tensor | None:
    """`wgrad` of the columns [N, T] of the output's gradient."""
    return delivered_wgrad(WeightGrad(g_t, x_t, dtype, linear.quantizers.weight_grad), linear)


def delivered_wgrad(grad: Tensor | WeightGrad, linear: LinearParams) -> Tensor | None:
    """Give a weight's gradient [N, K] to its `main_grad`. If it has none, or hooks that are to see the gradient
    (``register_hook``), return it, for autograd."""
    main_grad: MainGrad | None = getattr(linear.weight, "main_grad", None)
    with without_products():
        has_hooks = bool(linear.weight._backward_hooks)
    if main_grad is None or has_hooks:
        return grad.wide() if isinstance(grad, WeightGrad) else grad
    if not main_grad.is_wanted:
        return None
    if isinstance(grad, WeightGrad):
        place = main_grad.place(fp8=grad.writes_fp8)
        if place is not None:
            grad.write_(place)
            main_grad.written(grad)
            return None
        grad = grad.wide()
    main_grad.accumulate_(grad)
    return None


def note_forward(linear: LinearParams) -> None:
    """A forward begins whose backward will give the weight a gradient."""
    main_grad: MainGrad | None = getattr(linear.weight, "main_grad", None)
    if main_grad is not None:
        main_grad.note_forward()


def _measure_weight(probe: CastProbe, weight: ScaledTensor, operand: Quantized) -> None:
    if weight.payload.dtype in FP8_DTYPES:
        probe.measure_stored(operand)
    else:
        probe.measure_weight(weight.dequantize(), operand)


def transposed_weight(linear: LinearParams) -> Quantized:
    """The weight [K, N] as dgrad takes it."""
    kept = None if linear.links is None else linear.links.kept_transpose
    if kept is None:
        return linear.weight.gemm_operand(linear.quantizers.weight, transposed=True)
    return kept.of(linear.weight, linear.quantizers.weight)
