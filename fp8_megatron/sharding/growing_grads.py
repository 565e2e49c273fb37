"""Gradients of one replica where nobody says how many a step has: FP8 holds one, a second one widens the storage."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..formats import GRAD_BLOCK, StorageDtype
from ..kernels import ops
from ..quantization.weight_grad import WeightGrad
from .grad_buffer import LocalGradBuffer
from .partition import ParamSpace, Slot
from .storage import MAX_BF16_MICRO_BATCHES


def storage_of_sum(num_gradients: int) -> StorageDtype:
    """Storage in which `num_gradients` FP8 weight gradients are added: FP8 holds one, BF16 up to
    `MAX_BF16_MICRO_BATCHES`, FP32 any number."""
    if num_gradients <= 1:
        return StorageDtype.FP8
    return StorageDtype.BF16 if num_gradients <= MAX_BF16_MICRO_BATCHES else StorageDtype.FP32


class GrowingGradBuffer(LocalGradBuffer):
    """`LocalGradBuffer` of linear weights for any number of gradients a step.

    The storage is as wide as the most gradients of a step so far need. In the step that has more, those already stored
    keep the precision that they had. All later steps store the wider dtype from their first gradient on.

    Args:
        num_gradients: gradients that a parameter is expected to receive per step.
    """

    def __init__(self, space: ParamSpace, num_gradients: int = 1) -> None:
        super().__init__(space, storage_of_sum(num_gradients))
        #: The most gradients that a parameter received, or was expected to receive, in one step.
        self.most_gradients = num_gradients
        self._counts: dict[int, int] = {}

    def count(self, slot: Slot) -> int:
        """How many gradients the slot holds the sum of."""
        return self._counts.get(slot.offset, 0) if slot.offset in self._written else 0

    def mark(self, slot: Slot, count: int) -> None:
        """The slot holds the sum of `count` gradients that were written without `accumulate_`, and fit (`fits`)."""
        self._counts[slot.offset] = count
        if count:
            self._written.add(slot.offset)
            self.expect(count)
        else:
            self._written.discard(slot.offset)

    def fits(self, num_gradients: int) -> bool:
        """Whether the storage is wide enough for `num_gradients` of one parameter."""
        return num_gradients <= self.most_gradients or storage_of_sum(num_gradients) is self.dtype

    def place_of_first(self, slot: Slot) -> tuple[Tensor, Tensor] | None:
        """Payload, with padding, and scales that the first gradient of `slot` overwrites; None: they are not FP8, or
        underflow is measured."""
        return None if self.scales is None or self.underflow is not None else self._padded[slot.offset]

    def _takes_fp8(self, slot: Slot) -> bool:
        return self.scales is not None and slot.offset not in self._written

    def _write(self, slot: Slot, grad: Tensor | WeightGrad) -> None:
        count = self._counts.get(slot.offset, 0) + 1 if slot.offset in self._written else 1
        self._counts[slot.offset] = count
        self.expect(count)
        super()._write(slot, grad)

    def expect(self, num_gradients: int) -> None:
        """Make the storage wide enough for `num_gradients` of one parameter."""
        if num_gradients <= self.most_gradients:
            return
        self.most_gradients = num_gradients
        dtype = storage_of_sum(num_gradients)
        if dtype is not self.dtype:
            self._widen(dtype)

    def _widen(self, dtype: StorageDtype) -> None:
        wider = torch.zeros(self.space.numel, dtype=dtype.torch_dtype, device=self.space.device)
        for slot in self.space.slots:
            if slot.offset in self._written:
                slot.padded_slice(wider).copy_(self._values(slot))
        self.dtype, self.payload, self.scales = dtype, wider, None
        self._flat = {slot.offset: slot.slice(wider).view(-1) for slot in self.space.slots}
        self._padded.clear()

    def values(self, slot: Slot) -> Tensor:
        """The gradient of `slot`, FP32 in the parameter's shape (a copy)."""
        return self._values(slot)[: slot.numel].view(slot.param.shape)

    def _values(self, slot: Slot) -> Tensor:
        payload = slot.padded_slice(self.payload)
        if self.scales is None:
            return payload.to(torch.float32, copy=True)
        return ops.dequantize_blockwise(payload, slot.padded_slice(self.scales, GRAD_BLOCK))

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
        scales = None if self.scales is None else slot.padded_slice(self.scales, GRAD_BLOCK)
        return ops.squared_norm(slot.padded_slice(self.payload), scales)


def multiply_(parts: Sequence[Tensor], factor: Tensor | float) -> None:
    """Multiply tensors, in place and in a few launches, by a number, [] or [1] if it is a tensor."""
    if parts:
        torch._foreach_mul_(list(parts), factor.reshape(()) if isinstance(factor, Tensor) else factor)
