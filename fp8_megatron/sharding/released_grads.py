"""Released gradients: the optimizer takes each one as soon as backward has written it. None is stored.

The gradient of one parameter exists between its GEMM and its update. The norm of all gradients is not known before the
first update, so gradients are not clipped by it and a step is not skipped as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..dtypes import GRAD_BLOCK, StorageDtype
from ..kernels import ops
from ..quantization.weight_grad import WeightGrad
from .grad_buffer import GradBuffer
from .partition import ParamSpace, Slot


@dataclass(frozen=True)
class ReleasedGrad:
    """One parameter's gradient on its way to the optimizer.

    Attributes:
        payload: flat [slot.padded], zero beyond the parameter. scales: FP32 [slot.padded / 128] under FP8.
        squared_norm: FP32 [1], not finite where any element is not.
    """

    slot: Slot
    payload: Tensor
    scales: Tensor | None
    squared_norm: Tensor


class ReleasedGradBuffer(GradBuffer):
    """`LocalGradBuffer` without storage: every gradient is passed on when it is written, once per step.

    `main_grad.accumulate_` calls the receiver of `release_to`, which may change the weight. A layer therefore reads a
    weight for the last time in a step before it writes the weight's gradient.

    Args:
        dtype: what gradients are rounded to on the way: FP8 as `LocalGradBuffer` stores them (the same bits), or wider,
            straight from the GEMM.
    """

    def __init__(self, space: ParamSpace, dtype: StorageDtype) -> None:
        super().__init__(space)
        self.dtype = dtype
        self.payload = torch.empty(0, dtype=dtype.torch_dtype, device=space.device)
        #: FP32 [num_slots] of this step.
        self.squared_norms = torch.zeros(len(space.slots), device=space.device)
        self._index = {slot.offset: index for index, slot in enumerate(space.slots)}
        self._written: set[int] = set()
        self._receive: Callable[[ReleasedGrad], None] | None = None

    def release_to(self, receive: Callable[[ReleasedGrad], None]) -> None:
        """Pass every gradient to `receive`, which must be done with it when it returns (on CUDA: have queued all its
        work).
        """
        self._receive = receive

    def _takes(self, slot: Slot, grad: WeightGrad) -> bool:
        return self.dtype is StorageDtype.FP8 and grad.writes_fp8

    def _write(self, slot: Slot, grad: Tensor | WeightGrad) -> None:
        assert slot.offset not in self._written, (
            f"{slot.name}: a second gradient in one step, but the first one is already in the weight; "
            f"gradients of a weight that is used twice, or of several micro-batches, cannot be released"
        )
        assert self._receive is not None, "nobody takes the gradients"
        self._written.add(slot.offset)
        payload, scales = self._rounded(slot, grad)
        index = self._index[slot.offset]
        squared_norm = self.squared_norms[index : index + 1]
        squared_norm.copy_(ops.squared_norm(payload, scales))
        self._receive(ReleasedGrad(slot, payload, scales, squared_norm))

    def _rounded(self, slot: Slot, grad: Tensor | WeightGrad) -> tuple[Tensor, Tensor | None]:
        if self.dtype is StorageDtype.FP8:
            payload = torch.empty(slot.padded, dtype=self.dtype.torch_dtype, device=self.payload.device)
            scales = torch.empty(slot.padded // GRAD_BLOCK, device=self.payload.device)
            self._quantize(slot, grad, payload, scales)
            return payload, scales
        assert isinstance(grad, Tensor)
        payload = grad.to(self.dtype.torch_dtype)
        return torch.nn.functional.pad(payload, (0, slot.padded - slot.numel)), None

    def reset(self, *, measures_underflow: bool = False, num_micro_batches: int | None = None) -> None:
        self._written.clear()
        self._start_underflow(measures_underflow and self.dtype is StorageDtype.FP8)

    def finish(self) -> None:
        for slot in self.space.slots:
            if slot.offset not in self._written:
                self._write(slot, torch.zeros(slot.numel, device=self.payload.device))

    def squared_norm(self) -> Tensor:
        return self.squared_norms.sum().reshape(1)

    @property
    def nbytes(self) -> int:
        return 0

    @property
    def scale_bytes(self) -> int:
        return self.squared_norms.nbytes

    def non_finite_slots(self) -> list[str]:
        finite = torch.isfinite(self.squared_norms).tolist()
        return [slot.name for slot, is_finite in zip(self.space.slots, finite, strict=True) if not is_finite]
