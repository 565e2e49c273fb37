"""Gradients that are whole on this rank.

FP8 holds the gradient of one micro-batch, quantised once. Several are added in BF16 or FP32, never in FP8 (256
gradients added in E4M3 keep 10.6 dB). The default is FP32 from 33 micro-batches on (`storage.MAX_BF16_MICRO_BATCHES`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..dtypes import GRAD_BLOCK, StorageDtype
from ..kernels import ops
from ..quantization.weight_grad import GradPlace, WeightGrad
from .gradient import GradBuffer, Gradient, GradState
from .partition import ParamSpace
from .storage import MAX_BF16_MICRO_BATCHES


class _GradMemory(NamedTuple):
    """One gradient's memory: `padded` [slot.padded], its first elements `flat` [slot.numel], and under FP8 its scales.
    A view costs the host microseconds."""

    flat: Tensor
    padded: Tensor
    scales: Tensor | None

    def decoded(self) -> Tensor:
        """The gradient with its padding, FP32 (a copy)."""
        if self.scales is None:
            return self.padded.to(torch.float32, copy=True)
        return ops.dequantize_blockwise(self.padded, self.scales)


def storage_of_sum(num_gradients: int) -> StorageDtype:
    """Storage in which `num_gradients` FP8 weight gradients are added: FP8 holds one, BF16 up to
    `MAX_BF16_MICRO_BATCHES`, FP32 any number."""
    if num_gradients <= 1:
        return StorageDtype.FP8
    return StorageDtype.BF16 if num_gradients <= MAX_BF16_MICRO_BATCHES else StorageDtype.FP32


#: A section has at least so many elements, and a space at most so many sections: each takes a launch of the optimizer.
_LEAST_SECTION, _MOST_SECTIONS = 2**25, 8


class Section:
    """The payload of some gradients that follow each other. Its memory can be given back: views of it stay.

    Attributes:
        start, stop: elements of the space.
        is_held: whether it has memory.
    """

    def __init__(
        self, gradients: Sequence[Gradient], stop: int | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.gradients = gradients
        last = gradients[-1].slot
        self.start, self.stop = gradients[0].slot.offset, last.offset + last.padded if stop is None else stop
        self.payload = torch.empty(self.stop - self.start, dtype=dtype, device=device)
        self.is_held = True

    def hold(self) -> None:
        """Have memory, with any values."""
        if not self.is_held:
            self.payload.untyped_storage().resize_(self.payload.nbytes)
            self.is_held = True

    def release(self) -> None:
        """Have no memory."""
        self.payload.untyped_storage().resize_(0)
        self.is_held = False


class WholeGradBuffer(GradBuffer):
    """All gradients of a space on one rank: payload [space.numel], and scales [space.numel / 128] under FP8.

    Linear weights may have a storage that grows, where nobody says how many gradients a step has. It is as wide as the
    most gradients of a step so far need: FP8 holds one, a second one widens it. In the step that has more, those
    already stored keep the precision that they had. All later steps store the wider dtype from their first gradient on.
    Its payload is in sections (`runs`), which have memory from their first gradient of a step until a forward that no
    gradient waits for: activations are at their peak when there are no gradients.

    Args:
        dtype: storage; FP8 takes exactly one gradient per parameter and step. None: the storage grows.
        num_gradients: gradients that a parameter of a storage that grows is expected to receive per step.
    """

    def __init__(
        self,
        space: ParamSpace,
        dtype: StorageDtype | None = None,
        gradients: Sequence[Gradient] | None = None,
        *,
        num_gradients: int = 1,
    ) -> None:
        super().__init__(space, gradients)
        self._grows = dtype is None
        #: The most gradients that a parameter received, or was expected to receive, in one step.
        self._most_gradients = num_gradients
        self._is_pinned = False
        self._lay_out(dtype or storage_of_sum(num_gradients))
        if not self._grows:
            self.payload = self.sections[0].payload
            self.pin()
            self.payload.view(torch.uint8).zero_()  # with what lies behind the last parameter

    def _lay_out(self, dtype: StorageDtype) -> None:
        """New storage, without memory."""
        device = self.space.device
        self.dtype, self.scales = dtype, None
        if dtype is StorageDtype.FP8:
            self.scales = torch.ones(self.space.numel // GRAD_BLOCK, device=device)
        self.sections: list[Section] = []
        self._parts: dict[Gradient, _GradMemory] = {}
        self._section_of: dict[Gradient, Section] = {}
        for gradients in self._cut():
            section = Section(gradients, None if self._grows else self.space.numel, dtype.torch_dtype, device)
            for own in gradients:
                self._parts[own] = self._part(own, section)
                self._section_of[own] = section
                own.is_stale = False
            section.release()  # before the next one: all of them at once may not fit
            self.sections.append(section)

    def _cut(self) -> list[list[Gradient]]:
        """The gradients of each section."""
        least = max(_LEAST_SECTION, self.space.numel // _MOST_SECTIONS)
        sections: list[list[Gradient]] = [[]]
        for own in self.gradients:
            if self._grows and sections[-1] and own.slot.offset - sections[-1][0].slot.offset >= least:
                sections.append([])
            sections[-1].append(own)
        return sections

    def _part(self, gradient: Gradient, section: Section) -> _GradMemory:
        slot = gradient.slot
        first = slot.offset - section.start
        padded = section.payload[first : first + slot.padded]
        scales = None if self.scales is None else slot.padded_slice(self.scales, GRAD_BLOCK)
        return _GradMemory(padded[: slot.numel], padded, scales)

    def flat(self, gradient: Gradient) -> Tensor:
        """The gradient [slot.numel], as it is stored (a view)."""
        return self._parts[gradient].flat

    def place(self, gradient: Gradient, *, fp8: bool) -> GradPlace | None:
        if self.scales is not None and (gradient.count or not fp8):
            return None
        self._make_room(gradient)
        part = self._parts[gradient]
        if part.scales is not None:
            return GradPlace(part.padded, part.scales)
        return GradPlace(part.flat.view(gradient.slot.param.shape), None, adds=gradient.count > 0)

    def written(self, gradient: Gradient, grad: Tensor | WeightGrad) -> None:
        self.mark(gradient, gradient.count + 1)
        _, padded, scales = self._parts[gradient]
        if scales is not None:
            self._measure(gradient, grad, padded, scales)

    def add(self, gradient: Gradient, grad: Tensor) -> None:
        self._make_room(gradient)
        part = self._parts[gradient]
        if part.scales is not None:
            name = gradient.slot.name
            assert not gradient.count, f"{name}: a second micro-batch cannot be added to a gradient stored in FP8"
            ops.quantize_blockwise_(grad, part.padded, part.scales)
        elif gradient.count:
            part.flat.add_(grad)
        else:
            part.flat.copy_(grad)
        self.written(gradient, grad)

    def _make_room(self, gradient: Gradient) -> None:
        """Make the storage ready for one more gradient of the parameter."""
        self.expect(gradient.count + 1)
        self._hold(self._section_of[gradient])

    def _hold(self, section: Section) -> None:
        if section.is_held:
            return
        section.hold()
        if self.scales is None:
            section.payload.zero_()  # with the padding, which a write leaves as it is
        else:
            for own in section.gradients:
                own.is_stale = True

    def mark(self, gradient: Gradient, count: int) -> None:
        """The storage holds the sum of `count` gradients."""
        gradient.count = count
        if count:
            self._hold(self._section_of[gradient])
            gradient.is_stale = False
            self.expect(count)

    def fits(self, num_gradients: int) -> bool:
        """Whether the storage stays as it is for the sum of `num_gradients` of one parameter."""
        if not self._grows:
            return self.scales is None or num_gradients <= 1
        return num_gradients <= self._most_gradients or storage_of_sum(num_gradients) is self.dtype

    @property
    def most_gradients(self) -> int:
        return self._most_gradients

    def expect(self, num_gradients: int) -> None:
        if not self._grows or num_gradients <= self._most_gradients:
            return
        self._most_gradients = num_gradients
        dtype = storage_of_sum(num_gradients)
        if dtype is not self.dtype:
            self._widen(dtype)

    def _widen(self, dtype: StorageDtype) -> None:
        sections, parts = self.sections, self._parts
        self._lay_out(dtype)
        for old, section in zip(sections, self.sections, strict=True):
            if old.is_held:  # a gradient that is zero has memory too
                self._hold(section)
            for own in section.gradients:
                if own.count:
                    self._parts[own].flat.copy_(parts[own].decoded()[: own.slot.numel])
            old.release()

    def note_forward(self, gradient: Gradient) -> None:
        """Give the memory of a section back where nobody has a gradient in it. They count as zeros."""
        section = self._section_of[gradient]
        if self._is_pinned or not section.is_held or any(own.param.grad is not None for own in section.gradients):
            return
        section.release()
        for own in section.gradients:
            own.count, own.is_stale = 0, False

    def pin(self) -> None:
        """Have all memory from now on, where it is: others know the addresses."""
        if self._is_pinned:
            return
        for section in self.sections:
            self._hold(section)
        self._is_pinned = True
        self.finish()

    @property
    def addresses(self) -> list[int]:
        """Of the payload."""
        return [section.payload.data_ptr() for section in self.sections]

    def drop(self, gradient: Gradient) -> None:
        if gradient.count:
            gradient.count, gradient.is_stale = 0, True

    def zero_(self, gradient: Gradient) -> None:
        self.drop(gradient)
        self.zero_if_stale(gradient)

    def zero_if_stale(self, gradient: Gradient) -> None:
        """Zero what no longer counts."""
        if gradient.is_stale:
            gradient.is_stale = False
            part = self._parts[gradient]
            part.padded.zero_()
            if part.scales is not None:
                part.scales.fill_(1.0)

    def reset(self, *, measures_underflow: bool = False, num_micro_batches: int | None = None) -> None:
        for gradient in self.gradients:
            self.drop(gradient)
        self._start_underflow(measures_underflow and self.scales is not None)

    def finish(self) -> None:
        for gradient in self.gradients:
            self.zero_if_stale(gradient)

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int, ops.FlatState]]:
        """See `GradBuffer.runs`: one a section."""
        for section in self.sections:
            first, last = max(start, section.start), min(stop, section.stop)
            if first < last:
                scales = None if self.scales is None else self.scales[first // GRAD_BLOCK : last // GRAD_BLOCK]
                yield first, last, ops.FlatState(section.payload[first - section.start : last - section.start], scales)

    def squared_norm(self) -> Tensor:
        squares = [
            ops.squared_norm(run.payload, run.scales)
            for section in self.sections
            if section.is_held
            for _, _, run in self.runs(section.start, section.stop)
        ]
        if len(squares) == 1:
            return squares[0]
        return torch.cat(squares).sum().reshape(1) if squares else torch.zeros(1, device=self.space.device)

    def values(self, gradient: Gradient) -> Tensor:
        self.check_is_there(gradient)
        slot = gradient.slot
        return slot.shaped(self._parts[gradient].decoded()[: slot.numel])

    def squared_norm_of(self, gradient: Gradient) -> Tensor:
        self.check_is_there(gradient)
        flat, padded, scales = self._parts[gradient]
        return ops.squared_norm(padded, scales) if self._grows else flat.float().square().sum().reshape(1)

    def scale_(self, factor: Tensor | float, gradients: Sequence[Gradient] | None = None) -> None:
        """See `GradBuffer.scale_`. FP8 gradients lose nothing: their scales take the factor."""
        parts = [self._parts[own] for own in (self.gradients if gradients is None else gradients) if own.count]
        multiply_([part.flat if part.scales is None else part.scales for part in parts], factor)

    @property
    def nbytes(self) -> int:
        """Bytes of payloads that have memory now."""
        return sum(section.payload.nbytes for section in self.sections if section.is_held)

    def non_finite_slots(self) -> list[str]:
        names = []
        for gradient in self.gradients:
            if gradient.state is not GradState.EMPTY:
                _, padded, scales = self._parts[gradient]
                marks = padded if scales is None else scales  # a bad block has the scale NaN
                if not torch.isfinite(marks).all().item():
                    names.append(gradient.slot.name)
        return names

    def check_is_there(self, gradient: Gradient) -> None:
        if self._grows and (gradient.is_stale or not self._section_of[gradient].is_held):
            raise RuntimeError(
                f"the gradient of {gradient.slot.name} is gone since p.grad became None (zero_grad): keep "
                f"p.grad.clone(), not p.grad"
            )


def multiply_(parts: Sequence[Tensor], factor: Tensor | float) -> None:
    """Multiply tensors, in place and in a few launches, by a number, [] or [1] if it is a tensor."""
    if parts:
        torch._foreach_mul_(list(parts), factor.reshape(()) if isinstance(factor, Tensor) else factor)
