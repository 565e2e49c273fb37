"""What can be quantised: a tensor, or a computation whose result is cast to FP8 without being written in 16 bits first.

Each gives its amax and its cast to a `Quantizer`, which decides where the scale comes from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from ..kernels import ops

Payloads = TypeVar("Payloads", covariant=True)


class Source(Protocol[Payloads]):
    """Gives its amax, and its payloads with the scale that was used (FP32 [1])."""

    def amax(self) -> Tensor:
        """FP32 [1], without writing the values."""

    def quantize(
        self, dtype: torch.dtype, scale: Tensor | None, *, power_of_two: bool, amax_out: Tensor | None
    ) -> tuple[Payloads, Tensor]:
        """Cast with `scale`, or with one taken from the values when it is None; record the amax in `amax_out`."""


class Layouts(NamedTuple):
    """payload [M, K] and its transpose [K, M]; what was not asked for is empty."""

    payload: Tensor
    payload_t: Tensor


class Grads(NamedTuple):
    """payload [M, K], its transpose [K, M] (empty if not asked for) and, for a bias, column sums FP32 [K]."""

    payload: Tensor
    payload_t: Tensor
    column_sums: Tensor | None


class Normed(NamedTuple):
    """payload [T, K] and the statistics of the rows, FP32 [T] (mean is empty under RMSNorm)."""

    payload: Tensor
    mean: Tensor
    rstd: Tensor


class ActivationGrads(NamedTuple):
    """Gradient of an activation's input [T, Z] and [Z, T], the activation again [F, T], column sums FP32 [Z]."""

    payload: Tensor
    payload_t: Tensor
    activation_t: Tensor
    column_sums: Tensor | None


@dataclass(frozen=True)
class TensorSource:
    """`x` [M, K] as it is."""

    x: Tensor
    rowwise: bool = True
    transposed: bool = False

    def amax(self) -> Tensor:
        return ops.amax(self.x)

    def quantize(
        self, dtype: torch.dtype, scale: Tensor | None, *, power_of_two: bool, amax_out: Tensor | None
    ) -> tuple[Layouts, Tensor]:
        layouts = {"rowwise": self.rowwise, "transposed": self.transposed}
        if scale is None:
            *payloads, taken = ops.quantize_current(self.x, dtype, power_of_two=power_of_two, **layouts)
            return Layouts(*payloads), taken
        return Layouts(*ops.quantize_with_scale(self.x, scale, dtype, amax_out=amax_out, **layouts)), scale


@dataclass(frozen=True)
class GradSource:
    """An output gradient `g` [M, K], in both layouts or with `transposed` off in its own; `column_sums` for a bias."""

    g: Tensor
    column_sums: bool = False
    transposed: bool = True

    def amax(self) -> Tensor:
        return ops.amax(self.g)

    def quantize(
        self, dtype: torch.dtype, scale: Tensor | None, *, power_of_two: bool, amax_out: Tensor | None
    ) -> tuple[Grads, Tensor]:
        if not self.column_sums:
            layouts, used = TensorSource(self.g, transposed=self.transposed).quantize(
                dtype, scale, power_of_two=power_of_two, amax_out=amax_out
            )
            return Grads(*layouts, None), used
        payload, payload_t, sums, taken = ops.quantize_grad_output(
            self.g, dtype, scale=scale, power_of_two=power_of_two, amax_out=amax_out, transposed=self.transposed
        )
        return Grads(payload, payload_t, sums), taken if scale is None else scale


@dataclass(frozen=True)
class QKVGradSource:
    """Gradients of query [s, b, groups, heads a group · d], key and value [s, b, groups, d], of any strides."""

    grads: list[Tensor]
    column_sums: bool = False

    def amax(self) -> Tensor:
        return torch.stack([ops.amax(grad) for grad in self.grads]).amax(dim=0)

    def quantize(
        self, dtype: torch.dtype, scale: Tensor | None, *, power_of_two: bool, amax_out: Tensor | None
    ) -> tuple[Grads, Tensor]:
        payload, payload_t, sums, taken = ops.quantize_qkv_grad(
            self.grads,
            dtype,
            scale=scale,
            power_of_two=power_of_two,
            amax_out=amax_out,
            column_sums=self.column_sums,
        )
        return Grads(payload, payload_t, sums if self.column_sums else None), taken if scale is None else scale


@dataclass(frozen=True)
class NormSource:
    """LayerNorm or RMSNorm of `x` [T, K]."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    eps: float
    rms: bool

    def amax(self) -> Tensor:
        return ops.norm_amax(self.x, self.weight, self.bias, eps=self.eps, rms=self.rms)

    def quantize(
        self, dtype: torch.dtype, scale: Tensor | None, *, power_of_two: bool, amax_out: Tensor | None
    ) -> tuple[Normed, Tensor]:
        payload, taken, mean, rstd = ops.norm_quantize(
            self.x,
            self.weight,
            self.bias,
            dtype,
            eps=self.eps,
            rms=self.rms,
            scale=scale,
            power_of_two=power_of_two,
            amax_out=amax_out,
        )
        return Normed(payload, mean, rstd), taken if scale is None else scale


@dataclass(frozen=True)
class ActivationSource:
    """The activation of `z` [T, F], or [T, 2F] under ``swiglu``."""

    z: Tensor
    kind: str

    def amax(self) -> Tensor:
        return ops.activation_amax(self.z, self.kind)

    def quantize(
        self, dtype: torch.dtype, scale: Tensor | None, *, power_of_two: bool, amax_out: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        payload, taken = ops.activation_quantize(
            self.z, self.kind, dtype, scale=scale, power_of_two=power_of_two, amax_out=amax_out
        )
        return payload, taken if scale is None else scale


@dataclass(frozen=True)
class ActivationGradSource:
    """The gradient of `z`, from the gradient [T, F] of its activation.

    `activation_dtype` and `activation_scale` quantise the activation again, for the weight gradient.
    """

    grad: Tensor
    z: Tensor
    kind: str
    activation_dtype: torch.dtype
    activation_scale: Tensor
    column_sums: bool

    def amax(self) -> Tensor:
        return ops.activation_backward_amax(self.grad, self.z, self.kind)

    def quantize(
        self, dtype: torch.dtype, scale: Tensor | None, *, power_of_two: bool, amax_out: Tensor | None
    ) -> tuple[ActivationGrads, Tensor]:
        payload, payload_t, activation_t, sums, taken = ops.activation_backward_quantize(
            self.grad,
            self.z,
            self.kind,
            dtype,
            scale=scale,
            power_of_two=power_of_two,
            amax_out=amax_out,
            activation_dtype=self.activation_dtype,
            activation_scale=self.activation_scale,
            column_sums=self.column_sums,
        )
        grads = ActivationGrads(payload, payload_t, activation_t, sums if self.column_sums else None)
        return grads, taken if scale is None else scale
