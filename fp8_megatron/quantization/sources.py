"""Sources of a cast: a tensor, or a computation whose result becomes FP8 without being written in 16 bits first.

A `recipe.Quantizer` decides where the scale comes from and asks its source for the cast. The kernels that compute and
cast in one pass write one scale for the whole tensor, or scales of blocks. For formats without such kernels
(`Format.fuses`) the computation runs in 16 bits (`unfused`), and its result is then cast.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from ..activation_functions import Activation
from ..formats.format import Format, Quantized
from ..kernels import ops
from ..kernels.ops import Rotation
from . import unfused
from .sample import Sample, rows_to_compute, sample_of_rows

Cast = TypeVar("Cast", covariant=True)


class Source(Protocol[Cast]):
    """Computes its amax, casts itself to FP8, and says what its cast was made of."""

    def amax(self) -> Tensor:
        """FP32 [1], without writing the values."""

    def quantize(self, format: Format, scale: Tensor | None, *, amax_out: Tensor | None = None) -> Cast:
        """Cast with `scale` FP32 [1], or with scales from the values if it is None.

        Args:
            amax_out: FP32 [1], raised to the amax of the values; only with a given scale.
        """

    def sample(self, operand: Quantized, step: int) -> Sample:
        """Every `step`-th row of the values, computed again if no kernel wrote them, and of the cast made of them.

        Args:
            operand: the cast.
        """


class CastGrad(NamedTuple):
    """An output gradient [T, N] in FP8 and, for a bias, its column sums FP32 [N]."""

    operand: Quantized
    column_sums: Tensor | None


class NormStatistics(NamedTuple):
    """What is needed to cast a norm's output again from its input: mean (empty under RMSNorm) and rstd, FP32 [T], and
    the scale of the first cast, FP32 [1], or None if the values give it."""

    mean: Tensor
    rstd: Tensor
    scale: Tensor | None


class CastNorm(NamedTuple):
    """A norm's output [T, K] in FP8, and the statistics to cast it again."""

    operand: Quantized
    statistics: NormStatistics


class CastActivationGrad(NamedTuple):
    """The gradient of an activation's input [T, Z] in both layouts, the activation's transpose [F, T] and, for a bias,
    column sums FP32 [Z]."""

    operand: Quantized
    activation: Quantized
    column_sums: Tensor | None


class TensorSource(NamedTuple):
    """A tensor `x` [M, K], cast in the requested layouts."""

    x: Tensor
    rowwise: bool = True
    transposed: bool = False

    def amax(self) -> Tensor:
        return ops.amax(self.x)

    def quantize(self, format: Format, scale: Tensor | None, *, amax_out: Tensor | None = None) -> Quantized:
        return format.cast(self.x, scale, amax_out=amax_out, rowwise=self.rowwise, transposed=self.transposed)

    def sample(self, operand: Quantized, step: int) -> Sample:
        return sample_of_rows(operand, step, self.x[::step])


class GradSource(NamedTuple):
    """An output gradient `g` [M, K], in both layouts, or in its own without `transposed`. `column_sums`: for a bias."""

    g: Tensor
    column_sums: bool = False
    transposed: bool = True

    def amax(self) -> Tensor:
        return ops.amax(self.g)

    def quantize(self, format: Format, scale: Tensor | None, *, amax_out: Tensor | None = None) -> CastGrad:
        if self.column_sums:
            return CastGrad(*format.cast_and_sum(self.g, scale, amax_out=amax_out, transposed=self.transposed))
        return CastGrad(format.cast(self.g, scale, amax_out=amax_out, transposed=self.transposed), None)

    def sample(self, operand: Quantized, step: int) -> Sample:
        return sample_of_rows(operand, step, self.g[::step])


@dataclass(frozen=True)
class QKVGradSource:
    """Gradients of query [s, b, groups, heads per group · d], key and value [s, b, groups, d], with any strides.

    With a `rotation` they are those of the rotated query and key. The cast is of the gradient before the rotation.
    FP8 gradients have `grad_scales`, FP32 [1] each, and a rotation (which may have no angles).
    """

    grads: list[Tensor]
    column_sums: bool = False
    rotation: Rotation | None = None
    grad_scales: tuple[Tensor, ...] = ()

    def amax(self) -> Tensor:
        grads = self._wide()
        if self.rotation is not None and self.rotation.turns:
            return ops.rotated_qkv_grad_amax(grads, self.rotation)
        return torch.stack([ops.amax(grad) for grad in grads]).amax(dim=0)

    def every(self, step: int) -> QKVGradSource:
        """The source of every `step`-th sequence index; in FP32 if it rotates, as the cast reads it."""
        rows = replace(self, grads=[grad[::step] for grad in self.grads])
        if self.rotation is None:
            return rows
        rotation = self.rotation._replace(cos_sin=self.rotation.cos_sin[::step].contiguous())
        return replace(rows, grads=[grad.float() for grad in rows._wide()], rotation=rotation, grad_scales=())

    def joined(self) -> Tensor:
        """The gradient of the projection's output [T, N], in the dtype of the gradients."""
        grads = self._wide()
        if self.rotation is not None and self.rotation.turns:
            return ops.unrotate_qkv_grad(grads, self.rotation)
        joined = torch.cat(grads, dim=-1)
        return joined.view(joined.shape[0] * joined.shape[1], -1)

    def _wide(self) -> list[Tensor]:
        """The gradients in 16 or 32 bits."""
        if not self.grad_scales:
            return self.grads
        return [ops.decode(grad, scale) for grad, scale in zip(self.grads, self.grad_scales, strict=True)]

    def quantize(self, format: Format, scale: Tensor | None, *, amax_out: Tensor | None = None) -> CastGrad:
        if not format.takes_scale:
            return GradSource(self.joined(), column_sums=self.column_sums).quantize(format, None)
        settings: dict[str, Any] = dict(
            scale=scale, power_of_two=format.power_of_two, amax_out=amax_out, column_sums=self.column_sums
        )
        if self.rotation is None:
            cast = ops.quantize_qkv_grad(self.grads, format.dtype, **settings)
        else:
            settings["grad_scales"] = self.grad_scales
            cast = ops.quantize_rotated_qkv_grad(self.grads, self.rotation, format.dtype, **settings)
        payload, payload_t, sums, taken = cast
        operand = Quantized(payload, payload_t, taken if scale is None else scale, format)
        return CastGrad(operand, sums if self.column_sums else None)

    def sample(self, operand: Quantized, step: int) -> Sample:
        """Of whole sequence indices, which have a row a sequence; at most one in `step`."""
        length, columns = self.grads[0].shape[0], operand.payload.shape[1]
        step = min(step, length)
        payload = operand.payload.view(torch.uint8).view(length, -1, columns)[::step].reshape(-1, columns)
        scales = operand.format.row_scales(operand, 1)
        scales = scales.reshape(length, -1, scales.shape[1])[::step].reshape(-1, scales.shape[1])
        return Sample(self.every(step).joined(), payload.view(operand.payload.dtype), scales)


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

    def quantize(self, format: Format, scale: Tensor | None, *, amax_out: Tensor | None = None) -> CastNorm:
        if not format.fuses:
            value, mean, rstd = unfused.norm(self.x, self.weight, self.bias, eps=self.eps, rms=self.rms)
            return CastNorm(format.cast(value), NormStatistics(mean, rstd, None))
        settings: dict[str, Any] = dict(eps=self.eps, rms=self.rms, power_of_two=format.power_of_two)
        operands = (self.x, self.weight, self.bias, format.dtype)
        if not format.takes_scale:
            payload, scales, mean, rstd = ops.norm_quantize_blocks(*operands, **settings)
            return CastNorm(Quantized(payload, None, scales, format), NormStatistics(mean, rstd, None))
        payload, taken, mean, rstd = ops.norm_quantize(*operands, scale=scale, amax_out=amax_out, **settings)
        used = taken if scale is None else scale
        return CastNorm(Quantized(payload, None, used, format), NormStatistics(mean, rstd, used))

    def sample(self, operand: Quantized, step: int) -> Sample:
        x = rows_to_compute(self.x, operand, step)
        return sample_of_rows(operand, step, unfused.norm(x, self.weight, self.bias, eps=self.eps, rms=self.rms)[0])

    def again(self, statistics: NormStatistics, format: Format, *, transposed: bool) -> Quantized:
        """Repeat the cast bit for bit: only the rows [T, K], or with `transposed` only the columns [K, T]."""
        mean, rstd, scale = statistics
        if scale is None and format.fuses:
            if not transposed:
                return self.quantize(format, None).operand
            payload_t, scales_t = ops.norm_requantize_blocks(
                *(self.x, self.weight, self.bias, mean, rstd, format.dtype), power_of_two=format.power_of_two
            )
            return Quantized(None, payload_t, scales_t, format, scales_t)
        if scale is None:
            value = unfused.norm_of_statistics(self.x, self.weight, self.bias, mean, rstd)
            return format.cast(value, rowwise=not transposed, transposed=transposed)
        payload = ops.norm_requantize(
            self.x, self.weight, self.bias, mean, rstd, scale, format.dtype, transposed=transposed
        )
        return Quantized(None, payload, scale, format) if transposed else Quantized(payload, None, scale, format)


@dataclass(frozen=True)
class ActivationSource:
    """The activation of `z` [T, F], or [T, 2F] if it is gated."""

    z: Tensor
    activation: Activation

    def amax(self) -> Tensor:
        return ops.activation_amax(self.z, self.activation)

    def quantize(self, format: Format, scale: Tensor | None, *, amax_out: Tensor | None = None) -> Quantized:
        if not format.fuses:
            return format.cast(unfused.activated(self.z, self.activation))
        if not format.takes_scale:
            payload, scales = ops.activation_quantize_blocks(
                self.z, self.activation, format.dtype, power_of_two=format.power_of_two
            )
            return Quantized(payload, None, scales, format)
        payload, taken = ops.activation_quantize(
            self.z, self.activation, format.dtype, scale=scale, power_of_two=format.power_of_two, amax_out=amax_out
        )
        return Quantized(payload, None, taken if scale is None else scale, format)

    def sample(self, operand: Quantized, step: int) -> Sample:
        value = unfused.activated(rows_to_compute(self.z, operand, step), self.activation)
        return sample_of_rows(operand, step, value)


@dataclass(frozen=True)
class ActivationGradSource:
    """The gradient of `z`, from the gradient [T, F] of its activation.

    The activation is cast again for the weight gradient, in `activation_format`. Its scale is that of the first cast,
    FP32 [1], or None if the values give it.
    """

    grad: Tensor
    z: Tensor
    activation: Activation
    activation_format: Format
    activation_scale: Tensor | None
    column_sums: bool

    def amax(self) -> Tensor:
        return ops.activation_backward_amax(self.grad, self.z, self.activation)

    def quantize(self, format: Format, scale: Tensor | None, *, amax_out: Tensor | None = None) -> CastActivationGrad:
        if self.activation_scale is None and format.fuses:
            return self._quantize_blocks(format)
        if self.activation_scale is None:
            value = unfused.activated(self.z, self.activation)
            operand = self.activation_format.cast(value, rowwise=False, transposed=True)
            del value
            grad = unfused.activation_backward(self.grad, self.z, self.activation)
            cast = GradSource(grad, column_sums=self.column_sums).quantize(format, None)
            return CastActivationGrad(cast.operand, operand, cast.column_sums)
        payload, payload_t, activation_t, sums, taken = ops.activation_backward_quantize(
            self.grad,
            self.z,
            self.activation,
            format.dtype,
            scale=scale,
            power_of_two=format.power_of_two,
            amax_out=amax_out,
            activation_dtype=self.activation_format.dtype,
            activation_scale=self.activation_scale,
            column_sums=self.column_sums,
        )
        return CastActivationGrad(
            Quantized(payload, payload_t, taken if scale is None else scale, format),
            Quantized(None, activation_t, self.activation_scale, self.activation_format),
            sums if self.column_sums else None,
        )

    def _quantize_blocks(self, format: Format) -> CastActivationGrad:
        assert self.activation_format == format, (self.activation_format, format)
        payload, scales, payload_t, scales_t, activation_t, its_scales, sums = ops.activation_backward_quantize_blocks(
            *(self.grad, self.z, self.activation, format.dtype),
            column_sums=self.column_sums,
            power_of_two=format.power_of_two,
        )
        return CastActivationGrad(
            Quantized(payload, payload_t, scales, format, scales_t),
            Quantized(None, activation_t, its_scales, format, its_scales),
            sums if self.column_sums else None,
        )

    def sample(self, operand: Quantized, step: int) -> Sample:
        grad, z = (rows_to_compute(x, operand, step) for x in (self.grad, self.z))
        return sample_of_rows(operand, step, unfused.activation_backward(grad, z, self.activation))
