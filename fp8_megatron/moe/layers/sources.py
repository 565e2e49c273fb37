"""Sources of the casts of experts' rows, as `quantization.sources` has those of an MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ...activation_functions import Activation
from ...formats.format import Format, Quantized
from ...kernels import ops
from ...quantization import unfused
from ...quantization.sample import Sample, rows_to_compute, sample_of_rows


class CastExpertGrad(NamedTuple):
    """As `CastActivationGrad`, of experts' rows: the gradient of z [R, Z] in both layouts, the weighted activation's
    transpose [F, R], and the gradient of the rows' probabilities FP32 [R]."""

    operand: Quantized
    activation: Quantized
    grad_probs: Tensor


@dataclass(frozen=True)
class ExpertActivationSource:
    """The activation of experts' rows `z` [R, F], or [R, 2F] if it is gated, times each row's probability.

    Attributes:
        probs: FP32 [R], 0 for a row without a token.
        offsets: int32 [E + 1] of the groups. Rows behind the last group are left out.
    """

    z: Tensor
    probs: Tensor
    offsets: Tensor
    activation: Activation

    @property
    def experts(self) -> ops.ExpertRows:
        """As operators take them."""
        return ops.ExpertRows(self.probs, self.offsets)

    def amax(self) -> Tensor:
        return ops.activation_amax(self.z, self.activation, self.experts)

    def quantize(self, format: Format, scale: Tensor | None, *, amax_out: Tensor | None = None) -> Quantized:
        if not format.takes_scale:
            operands = (self.z, self.probs, self.offsets, self.activation, format.dtype)
            payload, scales = ops.expert_activation_quantize_blocks(*operands, power_of_two=format.power_of_two)
            return Quantized(payload, None, scales, format)
        payload, taken = ops.activation_quantize(
            self.z,
            self.activation,
            format.dtype,
            self.experts,
            scale=scale,
            power_of_two=format.power_of_two,
            amax_out=amax_out,
        )
        return Quantized(payload, None, taken if scale is None else scale, format)

    def sample(self, operand: Quantized, step: int) -> Sample:
        value = self.probs[::step, None] * unfused.activated(rows_to_compute(self.z, operand, step), self.activation)
        return sample_of_rows(operand, step, value, self.has_token(step))

    def has_token(self, step: int) -> Tensor:
        """bool [⌈R / step⌉, 1], of every `step`-th row."""
        return self.probs[::step, None] != 0.0


@dataclass(frozen=True)
class ExpertActivationGradSource:
    """The gradient of `ExpertActivationSource`'s z, from the gradient [R, F] of its weighted activation.

    The weighted activation is cast again for the weight gradient. Its scale is that of the first cast, FP32 [1], or
    None if the values give it; then its format is that of the gradient.
    """

    grad: Tensor
    forward: ExpertActivationSource
    activation_format: Format
    activation_scale: Tensor | None

    @property
    def offsets(self) -> Tensor:
        """int32 [E + 1] of the groups."""
        return self.forward.offsets

    def amax(self) -> Tensor:
        forward = self.forward
        return ops.activation_backward_amax(self.grad, forward.z, forward.activation, forward.experts)

    def quantize(self, format: Format, scale: Tensor | None, *, amax_out: Tensor | None = None) -> CastExpertGrad:
        if self.activation_scale is None:
            return self._quantize_blocks(format)
        forward = self.forward
        payload, payload_t, activation_t, grad_probs, taken = ops.activation_backward_quantize(
            self.grad,
            forward.z,
            forward.activation,
            format.dtype,
            forward.experts,
            scale=scale,
            power_of_two=format.power_of_two,
            amax_out=amax_out,
            activation_dtype=self.activation_format.dtype,
            activation_scale=self.activation_scale,
        )
        return CastExpertGrad(
            Quantized(payload, payload_t, taken if scale is None else scale, format),
            Quantized(None, activation_t, self.activation_scale, self.activation_format),
            grad_probs,
        )

    def _quantize_blocks(self, format: Format) -> CastExpertGrad:
        assert self.activation_format == format, (self.activation_format, format)
        forward = self.forward
        operands = (self.grad, forward.z, forward.probs, forward.offsets, forward.activation, format.dtype)
        payload, scales, payload_t, scales_t, activation_t, its_scales, grad_probs = (
            ops.expert_activation_backward_quantize_blocks(*operands, power_of_two=format.power_of_two)
        )
        operand = Quantized(payload, payload_t, scales, format, scales_t)
        return CastExpertGrad(operand, Quantized(None, activation_t, its_scales, format, its_scales), grad_probs)

    def sample(self, operand: Quantized, step: int) -> Sample:
        forward = self.forward
        grad, z = (rows_to_compute(x, operand, step) for x in (self.grad, forward.z))
        value = unfused.activation_backward(grad * forward.probs[::step, None], z, forward.activation)
        return sample_of_rows(operand, step, value, forward.has_token(step))
