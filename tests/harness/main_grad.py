"""A `main_grad` that keeps what layers give it."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8_megatron.quantization.weight_grad import GradPlace, WeightGrad


class KeptGrads:
    """A `nn.operands.MainGrad` that keeps a list of gradients.

    Args:
        numel: elements of a place that weights' gradients are written to in FP8 where they can be; 0: there is none.

    Attributes:
        grads: all gradients, in 16 or 32 bits.
        fp8: the last one that was written in FP8, decoded.
    """

    is_wanted = True

    def __init__(self, numel: int = 0) -> None:
        self.grads: list[Tensor] = []
        self.fp8: Tensor | None = None
        self._numel = numel
        self._place: GradPlace | None = None

    def note_forward(self) -> None:
        pass

    def place(self, *, fp8: bool) -> GradPlace | None:
        if self._numel and fp8:
            self._place = GradPlace(torch.empty(self._numel, dtype=torch.float8_e4m3fn), torch.empty(1))
        return self._place

    def written(self, grad: WeightGrad) -> None:
        assert self._place is not None and self._place.scales is not None
        self.fp8 = self._place.payload.float() * self._place.scales
        self.grads.append(grad.wide())

    def accumulate_(self, grad: Tensor) -> None:
        self.grads.append(grad.clone())
