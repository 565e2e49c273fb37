"""The casts of one layer's FP8 attention. All have delayed scales: cuDNN's kernels take scales before they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..dtypes import E4M3, E5M2
from ..formats.format import Quantized
from ..formats.tensorwise import Tensorwise
from ..kernels import ops
from ..kernels.ops import Rotation
from .amax_history import AmaxHistory
from .cast_health import CastProbe, row_step
from .cast_report import Role
from .recipe import AmaxSync, Quantizer, Recipe
from .sources import TensorSource

#: A gradient that a kernel casts may exceed the amaxes of the last steps by this factor before it saturates.
WRITTEN_HEADROOM = 4.0


class AttentionGrads(NamedTuple):
    """dQ [s, b, heads, d], dK and dV [s, b, groups, d] in E5M2, and their dequantising scales FP32 [1]."""

    query: Tensor
    key: Tensor
    value: Tensor
    scales: tuple[Tensor, Tensor, Tensor]

    def wide(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The gradients in `dtype`."""
        return tuple(grad.to(dtype).mul_(scale) for grad, scale in zip(self[:3], self.scales, strict=True))


@dataclass(frozen=True)
class AttentionQuantizers:
    """The casts of attention: query, key, value and the output's gradient by quantisers; dS, dQ, dK and dV, which the
    backward kernel casts, by slots of the history. The GEMM that computes the output's gradient may cast it, too.

    The output takes the value's scale: its rows are means of the value's.
    """

    query: Quantizer
    key: Quantizer
    value: Quantizer
    grad_output: Quantizer
    history: AmaxHistory
    written: tuple[int, ...]
    """The slots of dS, dQ, dK and dV."""
    sync: AmaxSync | None = None
    """How ranks that exchange heads share their first scales; the history is reduced over them later."""

    @classmethod
    def of(cls, recipe: Recipe, sync: AmaxSync | None = None) -> AttentionQuantizers:
        """New casts of one layer; they take eight slots of the recipe's history.

        Raises:
            ValueError: the recipe's scaling is not delayed.
        """
        history = recipe.history
        if history is None:
            raise ValueError(f"FP8 attention needs delayed scaling; recipe {recipe.name} takes scales from the values")
        forward, backward = (Tensorwise(dtype, recipe.power_of_two) for dtype in (E4M3, E5M2))
        query, key, value = (recipe.quantizer(forward, Role.ATTENTION_INPUT) for _ in range(3))
        grad_output = recipe.quantizer(backward, Role.ATTENTION_GRAD, headroom=WRITTEN_HEADROOM)
        slots = tuple(history.add_slot(E5M2, headroom=WRITTEN_HEADROOM, role=Role.ATTENTION_GRAD) for _ in range(4))
        return cls(query, key, value, grad_output, history, slots, sync)

    def slots(self) -> Iterator[int]:
        """Its slots of the history."""
        for quantizer in (self.query, self.key, self.value, self.grad_output):
            yield from quantizer.slots()
        yield from self.written

    def cast_projection(self, y: Tensor, rotation: Rotation, *, heads_per_group: int) -> ops.AttentionInputs:
        """Query, key (both rotated) and value of the QKV projection's output y [s, b, N] in E4M3, contiguous."""
        sequence, batch, columns = y.shape
        flat = y.view(-1, columns)
        casts = self._known_casts()
        if casts is None:
            casts = self._first_casts_of_inputs(_rotated_parts(flat, rotation, heads_per_group))
        payloads = ops.quantize_rotated_qkv(flat, rotation, casts, heads_per_group=heads_per_group)
        for part, quantizer in enumerate(self._of_inputs()):
            if quantizer.probe is not None and quantizer.probe.is_due:
                cast = Quantized(payloads[part], None, casts[part].scale, quantizer.format)
                _measure_part(quantizer.probe, cast, y, rotation, heads_per_group, part)
        heads = (payload.view(sequence, batch, -1, rotation.head_dim) for payload in payloads)
        return ops.AttentionInputs(*heads, *(cast.scale for cast in casts))

    def inverse_of_value(self, inputs: ops.AttentionInputs) -> Tensor:
        """FP32 [1], the reciprocal of the value's scale in this step."""
        if self.history.knows(*self._input_slots):
            return self.history.inverse_of(self.value.slot)
        return inputs.scale_value.reciprocal()

    def _of_inputs(self) -> tuple[Quantizer, Quantizer, Quantizer]:
        return self.query, self.key, self.value

    @property
    def _input_slots(self) -> list[int]:
        return [quantizer.slot for quantizer in self._of_inputs()]

    def _known_casts(self) -> ops.QKVCasts | None:
        """The casts of query, key and value with delayed scales; None while the history lacks one."""
        slots = self._input_slots
        if not self.history.knows(*slots):
            return None
        return ops.QKVCasts(*(ops.KnownCast(self.history.scale_of(s), self.history.record_of(s)) for s in slots))

    def _first_casts_of_inputs(self, parts: Sequence[Tensor]) -> ops.QKVCasts:
        """Casts while the history lacks a scale. A value that 16 bits rounded down saturates by less than 2⁻⁸."""
        casts = []
        for quantizer, part in zip(self._of_inputs(), parts, strict=True):
            amax = ops.amax(part)
            if self.sync is not None:
                self.sync(amax)
            if self.history.record is not None:
                self.history.raise_amax(quantizer.slot, amax)
            scale = ops.scale_from_amax(amax, E4M3, power_of_two=self.history.power_of_two)
            casts.append(ops.KnownCast(scale, None))
        return ops.QKVCasts(*casts)

    def cast_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> ops.AttentionInputs:
        """Query [s, b, heads, d], key and value [s, b, groups, d] in E4M3, contiguous."""
        pairs = zip(self._of_inputs(), (query, key, value), strict=True)
        casts = [quantizer.quantize(TensorSource(_as_matrix(x)), sync=self.sync) for quantizer, x in pairs]
        payloads = [cast.payload.view(x.shape) for cast, x in zip(casts, (query, key, value), strict=True)]
        return ops.AttentionInputs(*payloads, *(cast.scale for cast in casts))

    def grad_output_cast(self) -> ops.WrittenCast | None:
        """How a GEMM casts the output's gradient. None if `cast_grad_output` must: the scale is not known, or the cast
        is measured."""
        is_measured = self.grad_output.probe is not None and self.grad_output.probe.is_due
        slot = self.grad_output.slot
        return self._written_cast(slot) if self.history.knows(slot) and not is_measured else None

    def cast_grad_output(self, grad: Tensor) -> Quantized:
        """The output's gradient [T, heads · d] in E5M2."""
        return self.grad_output.quantize(TensorSource(grad), sync=self.sync)

    def backward(
        self,
        grad: Tensor,
        scale_grad: Tensor,
        inputs: ops.AttentionInputs,
        out: Tensor,
        log_sum_exp: Tensor,
        softmax_scale: float,
    ) -> AttentionGrads:
        """dQ, dK and dV.

        Args:
            grad: of the output, E5M2 [s, b, heads, d], with the dequantising scale `scale_grad` FP32 [1].
        """

        def compute(casts: ops.AttentionGradCasts) -> tuple[Tensor, Tensor, Tensor]:
            return ops.fp8_attention_backward(
                inputs,
                grad,
                scale_grad,
                out,
                inputs.scale_value,
                log_sum_exp,
                casts,
                softmax_scale=softmax_scale,
            )

        is_known = self.history.knows(*self.written)
        casts = self._delayed_casts() if is_known else self._first_casts(compute, out.device)
        grads = compute(casts)
        if not is_known:
            for slot, (_, _, amax) in zip(self.written, casts, strict=True):
                self.history.raise_amax(slot, amax)
        return AttentionGrads(*grads, (casts.query.scale, casts.key.scale, casts.value.scale))

    def _delayed_casts(self) -> ops.AttentionGradCasts:
        return ops.AttentionGradCasts(*map(self._written_cast, self.written))

    def _written_cast(self, slot: int) -> ops.WrittenCast:
        history = self.history
        return ops.WrittenCast(history.scale_of(slot), history.inverse_of(slot), history.written_amax_of(slot))

    def _first_casts(
        self, compute: Callable[[ops.AttentionGradCasts], object], device: torch.device
    ) -> ops.AttentionGradCasts:
        """Casts while the history lacks a scale.

        Two passes find the scales: the first gives the amax of dS, the second those of the others.
        """
        one = torch.ones(1, device=device)
        casts = ops.AttentionGradCasts(*(ops.WrittenCast(one, one, torch.empty_like(one)) for _ in self.written))
        for _ in range(2):
            compute(casts)
            if self.sync is not None:
                for _, _, amax in casts:
                    self.sync(amax)
            casts = ops.AttentionGradCasts(*(self._from_amax(amax) for _, _, amax in casts))
        return casts

    def _from_amax(self, amax: Tensor) -> ops.WrittenCast:
        scale = ops.scale_from_amax(amax * WRITTEN_HEADROOM, E5M2, power_of_two=self.history.power_of_two)
        return ops.WrittenCast(scale, scale.reciprocal(), torch.empty_like(amax))


def _rotated_parts(y: Tensor, rotation: Rotation, heads_per_group: int) -> Sequence[Tensor]:
    """Query and key (rotated) and value of y [T, N], each [T, columns]."""
    if rotation.turns:
        return ops.split_rotated_qkv(y, rotation, heads_per_group=heads_per_group)
    d = rotation.head_dim
    parts = y.view(len(y), -1, (heads_per_group + 2) * d).split([heads_per_group * d, d, d], dim=2)
    return [part.reshape(len(y), -1) for part in parts]


def _measure_part(
    probe: CastProbe, cast: Quantized, y: Tensor, rotation: Rotation, heads_per_group: int, part: int
) -> None:
    """Measure the cast [s · b, columns] of query, key or value (`part` 0, 1 or 2) of y [s, b, N], on evenly spaced
    sequence indices. Values are computed again in FP32, as the kernel reads them."""
    payload, length = cast.payload, y.shape[0]
    step = min(row_step(*payload.shape), length)
    angles = rotation._replace(cos_sin=rotation.cos_sin[::step].contiguous())
    values = _rotated_parts(y[::step].float().flatten(0, 1), angles, heads_per_group)[part]
    rows = payload.view(torch.uint8).unflatten(0, (length, -1))[::step].reshape(values.shape).view(payload.dtype)
    probe.measure(values, rows, cast.format.row_scales(Quantized(rows, None, cast.scale, cast.format), 1))


def _as_matrix(x: Tensor) -> Tensor:
    """[s, b, heads, d] → [s · b, heads · d]."""
    return x.reshape(x.shape[0] * x.shape[1], -1)
