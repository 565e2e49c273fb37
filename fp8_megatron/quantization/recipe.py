"""How each operand of a linear layer's three GEMMs is quantised: roles, formats and scaling.

fprop: y = x·Wᵀ; dgrad: grad_input = g·W; wgrad: grad_weight = gᵀ·x, with x and W in E4M3 and g in E5M2
(arXiv 2209.05433; FP8-LM, arXiv 2310.18313, section 2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ..formats import E4M3, E5M2
from ..kernels.reference import scale_from_amax
from .amax_history import AmaxHistory
from .early_cast import EarlyCast
from .sources import Payloads, Source, TensorSource
from .weight_grad import DelayedGradScale

INPUT_DTYPE = E4M3
WEIGHT_DTYPE = E4M3
GRAD_OUTPUT_DTYPE = E5M2
WEIGHT_GRAD_DTYPE = E4M3
#: What a weight gradient may grow by over the amaxes of the last steps before it saturates.
WEIGHT_GRAD_HEADROOM = 4.0

#: Raises an amax FP32 [1] to its maximum over the ranks that will share the scale, in place.
AmaxSync = Callable[[Tensor], None]


@dataclass(frozen=True)
class QuantizedOperand:
    """A 2-D operand in FP8: payload [M, K] and/or its transpose [K, M] (empty when not asked for), scale FP32 [1]."""

    payload: Tensor
    payload_t: Tensor
    scale: Tensor


@dataclass(frozen=True)
class Quantizer:
    """Quantises one role of one layer; with a history its scale is delayed, else current."""

    dtype: torch.dtype
    power_of_two: bool
    history: AmaxHistory | None = None
    slot: int = 0

    def quantize(self, source: Source[Payloads], *, sync: AmaxSync | None = None) -> tuple[Payloads, Tensor]:
        """Cast `source`; returns its payloads and the scale, FP32 [1].

        Args:
            sync: shares the amax over a tensor-parallel group whose ranks hold parts of one tensor. Delayed scales
                are shared already, because the history is reduced over that group.
        """
        history, power_of_two = self.history, self.power_of_two
        known = self.known_scale()
        if known is not None:
            scale, amax_out = known
            payloads, _ = source.quantize(self.dtype, scale, power_of_two=power_of_two, amax_out=amax_out)
            return payloads, scale
        if sync is None and history is None:
            return source.quantize(self.dtype, None, power_of_two=power_of_two, amax_out=None)
        amax = source.amax()
        if sync is not None:
            sync(amax)
        if history is not None and history.amax is not None:
            history.raise_amax(self.slot, amax)
        scale = scale_from_amax(amax, self.dtype, power_of_two=power_of_two)
        return source.quantize(self.dtype, scale, power_of_two=power_of_two, amax_out=None)

    def known_scale(self) -> tuple[Tensor, Tensor] | None:
        """The delayed scale and where the amax is to be recorded, FP32 [1] each; None where the values come first."""
        if self.history is None or not self.history.is_warm:
            return None
        return self.history.scale_of(self.slot), self.history.amax_of(self.slot)

    def __call__(
        self, x: Tensor, *, rowwise: bool = True, transposed: bool = False, sync: AmaxSync | None = None
    ) -> QuantizedOperand:
        """Quantise `x` [M, K] in one read, in the layouts asked for."""
        layouts, scale = self.quantize(TensorSource(x, rowwise, transposed), sync=sync)
        return QuantizedOperand(layouts.payload, layouts.payload_t, scale)


@dataclass(frozen=True)
class LinearQuantizers:
    """The quantisers of one linear layer, by GEMM role; without `weight_grad` blocks of its gradient have scales.

    `early_cast`: what `grad_output` would do, done by who makes the gradient.
    """

    input: Quantizer
    grad_output: Quantizer
    weight_grad: DelayedGradScale | None = None
    early_cast: EarlyCast = field(default_factory=EarlyCast, compare=False)


@dataclass(frozen=True)
class Recipe:
    """Scaling of activations and output gradients, shared by all layers of a model chunk.

    `history` is None under tensorwise current scaling. `delays_weight_grads`: weight gradients have a delayed scale
    each, too.
    """

    name: Literal["tensorwise", "delayed"]
    power_of_two: bool
    history: AmaxHistory | None = None
    delays_weight_grads: bool = False

    def linear_quantizers(self) -> LinearQuantizers:
        """Quantisers of a new layer; under delayed scaling they take two or three slots of the history."""
        return LinearQuantizers(
            self.quantizer(INPUT_DTYPE), self.quantizer(GRAD_OUTPUT_DTYPE), self._weight_grad_scale()
        )

    def _weight_grad_scale(self) -> DelayedGradScale | None:
        if self.history is None or not self.delays_weight_grads:
            return None
        slot = self.history.add_slot(WEIGHT_GRAD_DTYPE, headroom=WEIGHT_GRAD_HEADROOM)
        return DelayedGradScale(self.history, slot)

    def quantizer(self, dtype: torch.dtype) -> Quantizer:
        """A new quantiser; under delayed scaling it takes a slot of the history."""
        if self.history is None:
            return Quantizer(dtype, self.power_of_two)
        return Quantizer(dtype, self.power_of_two, self.history, self.history.add_slot(dtype))
