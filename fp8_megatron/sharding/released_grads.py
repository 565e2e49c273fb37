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
from ..quantization.weight_grad import GradPlace, WeightGrad
from .gradient import GradBuffer, Gradient
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
    """`WholeGradBuffer` without storage: every gradient is passed on when it is written, once per step.

    The receiver of `release_to` may change the weight. A layer therefore reads a weight for the last time in a step
    before it writes the weight's gradient.

    Args:
        dtype: what gradients are rounded to on the way: FP8 as `WholeGradBuffer` stores them (the same bits), or wider,
            straight from the GEMM.
    """

    def __init__(self, space: ParamSpace, dtype: StorageDtype) -> None:
        super().__init__(space)
        self.dtype = dtype
        self.payload = torch.empty(0, dtype=dtype.torch_dtype, device=space.device)
        #: FP32 [num_slots] of this step.
        self.squared_norms = torch.zeros(len(space.slots), device=space.device)
        self._index = {own: index for index, own in enumerate(self.gradients)}
        #: Where the gradient that is on its way is written, under FP8.
        self._place: GradPlace | None = None
        self._receive: Callable[[ReleasedGrad], None] | None = None

    def release_to(self, receive: Callable[[ReleasedGrad], None]) -> None:
        """Pass every gradient to `receive`, which must be done with it when it returns (on CUDA: have queued all its
        work).
        """
        self._receive = receive

    def place(self, gradient: Gradient, *, fp8: bool) -> GradPlace | None:
        if self.dtype is not StorageDtype.FP8 or not fp8:
            return None
        padded = gradient.slot.padded
        self._place = GradPlace(
            torch.empty(padded, dtype=self.dtype.torch_dtype, device=self.space.device),
            torch.empty(padded // GRAD_BLOCK, device=self.space.device),
        )
        return self._place

    def written(self, gradient: Gradient, grad: Tensor | WeightGrad) -> None:
        place, self._place = self._place, None
        assert place is not None and place.scales is not None
        self._measure(gradient, grad, place.payload, place.scales)
        self._release(gradient, place.payload, place.scales)

    def add(self, gradient: Gradient, grad: Tensor) -> None:
        place = self.place(gradient, fp8=True)
        if place is not None:
            assert place.scales is not None
            ops.quantize_blockwise_(grad, place.payload, place.scales)
            del place
            self.written(gradient, grad)
            return
        padding = gradient.slot.padded - gradient.slot.numel
        self._release(gradient, torch.nn.functional.pad(grad.to(self.dtype.torch_dtype), (0, padding)), None)

    def _release(self, gradient: Gradient, payload: Tensor, scales: Tensor | None) -> None:
        assert not gradient.count, (
            f"{gradient.slot.name}: a second gradient in one step, but the first one is already in the weight; "
            f"gradients of a weight that is used twice, or of several micro-batches, cannot be released"
        )
        assert self._receive is not None, "nobody takes the gradients"
        gradient.count = 1
        index = self._index[gradient]
        squared_norm = self.squared_norms[index : index + 1]
        squared_norm.copy_(ops.squared_norm(payload, scales))
        self._receive(ReleasedGrad(gradient.slot, payload, scales, squared_norm))

    def reset(self, *, measures_underflow: bool = False, num_micro_batches: int | None = None) -> None:
        for gradient in self.gradients:
            gradient.count = 0
        self._start_underflow(measures_underflow and self.dtype is StorageDtype.FP8)

    def finish(self) -> None:
        for gradient in self.gradients:
            if not gradient.count:
                self.add(gradient, torch.zeros(gradient.slot.numel, device=self.payload.device))

    def squared_norm(self) -> Tensor:
        return self.squared_norms.sum().reshape(1)

    @property
    def scale_bytes(self) -> int:
        return self.squared_norms.nbytes

    def non_finite_slots(self) -> list[str]:
        finite = torch.isfinite(self.squared_norms).tolist()
        return [own.slot.name for own, is_finite in zip(self.gradients, finite, strict=True) if not is_finite]
