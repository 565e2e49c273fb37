"""Gradients of one replica where nobody says how many a step has: FP8 holds one, a second one widens the storage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..dtypes import GRAD_BLOCK, StorageDtype
from ..kernels import ops
from ..quantization.weight_grad import WeightGrad
from .grad_buffer import GradBuffer, LocalGradBuffer
from .partition import ParamSpace, Slot
from .storage import MAX_BF16_MICRO_BATCHES


def storage_of_sum(num_gradients: int) -> StorageDtype:
    """Storage in which `num_gradients` FP8 weight gradients are added: FP8 holds one, BF16 up to
    `MAX_BF16_MICRO_BATCHES`, FP32 any number."""
    if num_gradients <= 1:
        return StorageDtype.FP8
    return StorageDtype.BF16 if num_gradients <= MAX_BF16_MICRO_BATCHES else StorageDtype.FP32


#: A section has at least so many elements, and a space at most so many sections: each takes a launch of the optimizer.
_LEAST_SECTION, _MOST_SECTIONS = 2**25, 8


class Section:
    """The payload of some slots that follow each other. Its memory can be given back: views of it stay.

    Attributes:
        start, stop: elements of the space.
        is_held: whether it has memory.
        parts: by the slot's offset, the slot with its padding (views).
    """

    def __init__(self, slots: Sequence[Slot], dtype: torch.dtype, device: torch.device) -> None:
        self.slots = slots
        self.start, self.stop = slots[0].offset, slots[-1].offset + slots[-1].padded
        self.payload = torch.empty(self.stop - self.start, dtype=dtype, device=device)
        lengths = [slot.padded for slot in slots]
        self.parts = {slot.offset: part for slot, part in zip(slots, self.payload.split(lengths), strict=True)}
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


class GrowingGradBuffer(LocalGradBuffer):
    """`LocalGradBuffer` of linear weights for any number of gradients a step.

    The storage is as wide as the most gradients of a step so far need. In the step that has more, those already stored
    keep the precision that they had. All later steps store the wider dtype from their first gradient on.

    The payload is in sections, which have memory from their first gradient of a step until `release`: activations are
    at their peak when there are no gradients.

    Args:
        num_gradients: gradients that a parameter is expected to receive per step.
    """

    def __init__(self, space: ParamSpace, num_gradients: int = 1) -> None:
        GradBuffer.__init__(self, space)
        #: The most gradients that a parameter received, or was expected to receive, in one step.
        self.most_gradients = num_gradients
        self._counts: dict[int, int] = {}
        self._written: set[int] = set()
        #: Offsets of slots with memory that holds anything.
        self._stale: set[int] = set()
        self._is_pinned = False
        self._make(storage_of_sum(num_gradients))

    def _make(self, dtype: StorageDtype) -> None:
        """New storage, without memory."""
        space = self.space
        self.dtype, self.scales = dtype, None
        if dtype is StorageDtype.FP8:
            self.scales = torch.ones(space.numel // GRAD_BLOCK, device=space.device)
        self.sections: list[Section] = []
        self._flat, self._padded = {}, {}
        for slots in _cut(space):
            section = Section(slots, dtype.torch_dtype, space.device)
            for slot in slots:
                part = section.parts[slot.offset]
                self._flat[slot.offset] = part[: slot.numel]
                if self.scales is not None:
                    self._padded[slot.offset] = part, slot.padded_slice(self.scales, GRAD_BLOCK)
            section.release()  # before the next one: all of them at once may not fit
            self.sections.append(section)
        self._section_of = {slot.offset: section for section in self.sections for slot in section.slots}
        self._stale.clear()

    def _hold(self, section: Section) -> None:
        if section.is_held:
            return
        section.hold()
        if self.scales is None:
            section.payload.zero_()  # with the padding, which a write leaves as it is
        else:
            self._stale.update(slot.offset for slot in section.slots)

    def release(self, section: Section) -> None:
        """Give the memory of a section back, with the gradients in it. They count as zeros."""
        if self._is_pinned or not section.is_held:
            return
        section.release()
        offsets = {slot.offset for slot in section.slots}
        self._written -= offsets
        self._stale -= offsets

    def pin(self) -> None:
        if self._is_pinned:
            return
        for section in self.sections:
            self._hold(section)
        self._is_pinned = True
        for slot in self.space.slots:
            self.zero_if_unwritten(slot)

    def section_of(self, slot: Slot) -> Section:
        """The section that `slot` lies in."""
        return self._section_of[slot.offset]

    @property
    def addresses(self) -> list[int]:
        return [section.payload.data_ptr() for section in self.sections]

    def count(self, slot: Slot) -> int:
        return self._counts.get(slot.offset, 0) if slot.offset in self._written else 0

    def mark(self, slot: Slot, count: int) -> None:
        self._counts[slot.offset] = count
        if count:
            self._hold(self._section_of[slot.offset])
            self._written.add(slot.offset)
            self._stale.discard(slot.offset)
            self.expect(count)
        else:
            self._written.discard(slot.offset)

    def fits(self, num_gradients: int) -> bool:
        return num_gradients <= self.most_gradients or storage_of_sum(num_gradients) is self.dtype

    def _takes(self, slot: Slot, grad: WeightGrad) -> bool:
        return self.scales is None or (grad.writes_fp8 and slot.offset not in self._written)

    def _write(self, slot: Slot, grad: Tensor | WeightGrad) -> None:
        count = self._counts.get(slot.offset, 0) + 1 if slot.offset in self._written else 1
        self._counts[slot.offset] = count
        self.expect(count)
        self._hold(self._section_of[slot.offset])
        self._stale.discard(slot.offset)
        super()._write(slot, grad)

    def forget(self, slot: Slot) -> None:
        if slot.offset in self._written:
            self._written.discard(slot.offset)
            self._stale.add(slot.offset)

    def zero_if_unwritten(self, slot: Slot) -> None:
        if slot.offset not in self._stale:
            return
        self._stale.discard(slot.offset)
        if self.scales is None:
            self._flat[slot.offset].zero_()
        else:
            payload, scales = self._padded[slot.offset]
            payload.zero_()
            scales.fill_(1.0)

    def reset(self, *, measures_underflow: bool = False, num_micro_batches: int | None = None) -> None:
        self._stale |= self._written
        super().reset(measures_underflow=measures_underflow, num_micro_batches=num_micro_batches)

    def expect(self, num_gradients: int) -> None:
        """Make the storage wide enough for `num_gradients` of one parameter."""
        if num_gradients <= self.most_gradients:
            return
        self.most_gradients = num_gradients
        dtype = storage_of_sum(num_gradients)
        if dtype is not self.dtype:
            self._widen(dtype)

    def _widen(self, dtype: StorageDtype) -> None:
        before, scales = self.sections, self.scales
        self._make(dtype)
        for old, section in zip(before, self.sections, strict=True):
            if old.is_held:  # a gradient that is zero has memory too
                self._hold(section)
            for slot in section.slots:
                if slot.offset in self._written:
                    self._flat[slot.offset].copy_(_decoded(old.parts[slot.offset], scales, slot)[: slot.numel])
            old.release()

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

    @property
    def nbytes(self) -> int:
        """Bytes of payloads that have memory now."""
        return sum(section.payload.nbytes for section in self.sections if section.is_held)

    def non_finite_slots(self) -> list[str]:
        return [
            slot.name
            for slot in self.space.slots
            if slot.offset in self._written and not torch.isfinite(self._values(slot)).all().item()
        ]

    def values(self, slot: Slot) -> Tensor:
        """The gradient of `slot`, FP32 in the parameter's shape (a copy)."""
        return self._values(slot)[: slot.numel].view(slot.param.shape)

    def _values(self, slot: Slot) -> Tensor:
        self.check_is_there(slot)
        return _decoded(self._section_of[slot.offset].parts[slot.offset], self.scales, slot)

    def scale_(self, factor: Tensor | float, slot: Slot | None = None) -> None:
        """Multiply the gradient of `slot`, or all gradients, by a number. FP8 gradients lose nothing: their scales
        take the factor."""
        offsets = self._written if slot is None else self._written & {slot.offset}
        if self.scales is None:
            multiply_([self._flat[offset] for offset in offsets], factor)
        else:
            multiply_([self._padded[offset][1] for offset in offsets], factor)

    def squared_norm_of(self, slot: Slot) -> Tensor:
        """Σ x² of the gradient of `slot`, FP32 [1]."""
        self.check_is_there(slot)
        scales = None if self.scales is None else slot.padded_slice(self.scales, GRAD_BLOCK)
        return ops.squared_norm(self._section_of[slot.offset].parts[slot.offset], scales)

    def check_is_there(self, slot: Slot) -> None:
        """Raises:
        RuntimeError: what was the slot's gradient was given back.
        """
        if slot.offset in self._stale or not self._section_of[slot.offset].is_held:
            raise RuntimeError(
                f"the gradient of {slot.name} is gone since p.grad became None (zero_grad): keep p.grad.clone(), not "
                f"p.grad"
            )


def _decoded(payload: Tensor, scales: Tensor | None, slot: Slot) -> Tensor:
    """The slot's `payload`, with its padding, in FP32 (a copy); `scales` are the space's."""
    if scales is None:
        return payload.to(torch.float32, copy=True)
    return ops.dequantize_blockwise(payload, slot.padded_slice(scales, GRAD_BLOCK))


def _cut(space: ParamSpace) -> list[list[Slot]]:
    """The slots of each section."""
    least = max(_LEAST_SECTION, space.numel // _MOST_SECTIONS)
    sections: list[list[Slot]] = [[]]
    for slot in space.slots:
        if sections[-1] and slot.offset - sections[-1][0].offset >= least:
            sections.append([])
        sections[-1].append(slot)
    return sections


def multiply_(parts: Sequence[Tensor], factor: Tensor | float) -> None:
    """Multiply tensors, in place and in a few launches, by a number, [] or [1] if it is a tensor."""
    if parts:
        torch._foreach_mul_(list(parts), factor.reshape(()) if isinstance(factor, Tensor) else factor)
