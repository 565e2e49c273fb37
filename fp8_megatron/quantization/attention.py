"""The casts of one layer's FP8 attention. All have delayed scales: cuDNN's kernels take scales before they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..formats import E4M3, E5M2
from ..kernels import ops
from .amax_history import AmaxHistory
from .cast_report import Role
from .operand import Format
from .recipe import Quantizer, Recipe
from .sources import TensorSource

#: A gradient that a kernel casts may exceed the amaxes of the last steps by this factor before it saturates.
WRITTEN_HEADROOM = 4.0


@dataclass(frozen=True)
class AttentionQuantizers:
    """The casts of attention: query, key, value and the output's gradient by quantisers; dS, dQ, dK and dV, which the
    backward kernel casts, by slots of the history.

    The output takes the value's scale: its rows are means of the value's.
    """

    query: Quantizer
    key: Quantizer
    value: Quantizer
    grad_output: Quantizer
    history: AmaxHistory
    written: tuple[int, ...]
    """The slots of dS, dQ, dK and dV."""

    @classmethod
    def of(cls, recipe: Recipe) -> AttentionQuantizers:
        """New casts of one layer; they take eight slots of the recipe's history.

        Raises:
            ValueError: the recipe's scaling is not delayed.
        """
        history = recipe.history
        if history is None:
            raise ValueError(f"FP8 attention needs delayed scaling; recipe {recipe.name} takes scales from the values")
        forward, backward = (Format(dtype, power_of_two=recipe.power_of_two) for dtype in (E4M3, E5M2))
        query, key, value = (recipe.quantizer(forward, Role.ATTENTION_INPUT) for _ in range(3))
        grad_output = recipe.quantizer(backward, Role.ATTENTION_GRAD)
        slots = tuple(history.add_slot(E5M2, headroom=WRITTEN_HEADROOM, role=Role.ATTENTION_GRAD) for _ in range(4))
        return cls(query, key, value, grad_output, history, slots)

    def slots(self) -> Iterator[int]:
        """Its slots of the history."""
        for quantizer in (self.query, self.key, self.value, self.grad_output):
            yield from quantizer.slots()
        yield from self.written

    def cast_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> ops.AttentionInputs:
        """Query [s, b, heads, d], key and value [s, b, groups, d] in E4M3, contiguous."""
        pairs = zip((self.query, self.key, self.value), (query, key, value), strict=True)
        casts = [quantizer.quantize(TensorSource(_as_matrix(x))) for quantizer, x in pairs]
        payloads = [cast.payload.view(x.shape) for cast, x in zip(casts, (query, key, value), strict=True)]
        return ops.AttentionInputs(*payloads, *(cast.scale for cast in casts))

    def backward(
        self,
        grad: Tensor,
        inputs: ops.AttentionInputs,
        out: Tensor,
        log_sum_exp: Tensor,
        softmax_scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dQ, dK and dV in the dtype of `grad` [s, b, heads, d]."""
        cast = self.grad_output.quantize(TensorSource(_as_matrix(grad)))

        def compute(casts: ops.AttentionGradCasts) -> tuple[Tensor, Tensor, Tensor]:
            return ops.fp8_attention_backward(
                inputs,
                cast.payload.view(grad.shape),
                cast.scale,
                out,
                inputs.scale_value,
                log_sum_exp,
                casts,
                softmax_scale=softmax_scale,
            )

        casts = self._delayed_casts() if self.history.is_warm else self._first_casts(compute, grad.device)
        query, key, value = compute(casts)
        if not self.history.is_warm:
            for slot, (_, _, amax) in zip(self.written, casts, strict=True):
                self.history.raise_amax(slot, amax)
        return (
            query.to(grad.dtype).mul_(casts.query.scale),
            key.to(grad.dtype).mul_(casts.key.scale),
            value.to(grad.dtype).mul_(casts.value.scale),
        )

    def _delayed_casts(self) -> ops.AttentionGradCasts:
        history = self.history
        return ops.AttentionGradCasts(
            *(
                ops.WrittenCast(history.scale_of(slot), history.inverse_of(slot), history.written_amax_of(slot))
                for slot in self.written
            )
        )

    def _first_casts(
        self, compute: Callable[[ops.AttentionGradCasts], object], device: torch.device
    ) -> ops.AttentionGradCasts:
        """Casts before the history has scales.

        Two passes find the scales: the first gives the amax of dS, the second those of the others.
        """
        one = torch.ones(1, device=device)
        casts = ops.AttentionGradCasts(*(ops.WrittenCast(one, one, torch.empty_like(one)) for _ in self.written))
        for _ in range(2):
            compute(casts)
            casts = ops.AttentionGradCasts(*(self._from_amax(amax) for _, _, amax in casts))
        return casts

    def _from_amax(self, amax: Tensor) -> ops.WrittenCast:
        scale = ops.scale_from_amax(amax * WRITTEN_HEADROOM, E5M2, power_of_two=self.history.power_of_two)
        return ops.WrittenCast(scale, scale.reciprocal(), torch.empty_like(amax))


def _as_matrix(x: Tensor) -> Tensor:
    """[s, b, heads, d] → [s · b, heads · d]."""
    return x.reshape(x.shape[0] * x.shape[1], -1)
