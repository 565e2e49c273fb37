"""Gradient storage of one flat space: `main_grad` of every parameter in it, and its reduction over replicas.

FP8 storage takes one micro-batch: the weight gradient is quantised once, block by block, straight from wgrad. Over
several micro-batches gradients are added in BF16 or FP32, never in FP8 (256 of them added in E4M3 keep 10.6 dB).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..collectives.all_reduce import all_reduce_mean_fp8
from ..formats import GRAD_BLOCK, StorageDtype
from ..kernels import ops
from ..quantization.stats import underflow_counts
from .partition import ParamSpace, Slot

#: Elements reduced at a time, so that the FP32 working copies stay small beside the model.
_REDUCE_ELEMENTS = 1 << 26


class _MainGrad:
    """A parameter's `main_grad`: its slot of the buffer."""

    def __init__(self, buffer: GradBuffer, slot: Slot) -> None:
        self._buffer = buffer
        self._slot = slot

    def accumulate_(self, grad: Tensor) -> None:
        """Add one micro-batch's gradient (any float dtype, the parameter's shape)."""
        self._buffer.accumulate_(self._slot, grad)


class GradBuffer:
    """Flat gradients [space.numel]: payload, and scales [numel / 128] when `dtype` is FP8.

    Args:
        dtype: storage; FP8 takes exactly one gradient per parameter and step.
        reduces_in_fp8: reduce over replicas in FP8 whatever the storage (linear weights under fp8).
    """

    def __init__(self, space: ParamSpace, dtype: StorageDtype, *, reduces_in_fp8: bool) -> None:
        self.space = space
        self.dtype = dtype
        self.reduces_in_fp8 = reduces_in_fp8
        self.payload = torch.zeros(space.numel, dtype=dtype.torch_dtype, device=space.device)
        self.scales = torch.ones(space.numel // GRAD_BLOCK, device=space.device) if dtype is StorageDtype.FP8 else None
        #: FP32 [2] while underflow is measured: non-zero elements given, and how many of them became zero.
        self.underflow: Tensor | None = None
        self._written: set[int] = set()
        for slot in space.slots:
            slot.param.main_grad = _MainGrad(self, slot)  # type: ignore[attr-defined]

    def accumulate_(self, slot: Slot, grad: Tensor) -> None:
        """Write or add one micro-batch's gradient of `slot`."""
        assert grad.shape == slot.param.shape, f"{slot.name}: gradient {grad.shape}, parameter {slot.param.shape}"
        first = slot.offset not in self._written
        self._written.add(slot.offset)
        if self.scales is not None:
            assert first, f"{slot.name}: a second micro-batch cannot be added to a gradient stored in FP8"
            payload = slot.padded_slice(self.payload)
            scales = slot.padded_slice(self.scales, GRAD_BLOCK)
            if slot.padded != slot.numel:
                grad = torch.nn.functional.pad(grad.reshape(-1), (0, slot.padded - slot.numel))
            ops.quantize_blockwise_(grad.reshape(-1), payload, scales)
            if self.underflow is not None:
                self.underflow += underflow_counts(grad.reshape(-1), payload)
        elif first:
            slot.slice(self.payload).copy_(grad)
        else:
            slot.slice(self.payload).add_(grad)

    def reset(self, *, measures_underflow: bool = False) -> None:
        """Forget the gradients; the next ones are written, not added, so nothing needs zeroing.

        Args:
            measures_underflow: count, in FP8 storage, what the cast of the next step's gradients makes zero.
        """
        self._written.clear()
        measures = measures_underflow and self.scales is not None
        self.underflow = torch.zeros(2, device=self.payload.device) if measures else None

    def zero_unwritten(self) -> None:
        """Zero the slots that no gradient reached in this step."""
        for slot in self.space.slots:
            if slot.offset not in self._written:
                slot.padded_slice(self.payload).zero_()
                if self.scales is not None:
                    slot.padded_slice(self.scales, GRAD_BLOCK).fill_(1.0)

    def non_finite_slots(self) -> list[str]:
        """Names of the parameters whose gradient holds a NaN or an inf; waits for the device."""
        marks = self.payload if self.scales is None else self.scales  # a bad block has the scale NaN
        block = 1 if self.scales is None else GRAD_BLOCK
        return [
            slot.name for slot in self.space.slots if not torch.isfinite(slot.padded_slice(marks, block)).all().item()
        ]

    def all_reduce_mean(self, group: torch.distributed.ProcessGroup) -> None:
        """Replace the gradients by their mean over `group`; every rank ends with the same bits."""
        if group.size() == 1:
            return
        if not self.reduces_in_fp8:
            torch.distributed.all_reduce(self.payload, group=group)
            self.payload.div_(group.size())
            return
        for start in range(0, self.space.numel, _REDUCE_ELEMENTS):
            stop = min(start + _REDUCE_ELEMENTS, self.space.numel)
            payload = self.payload[start:stop]
            if self.scales is None:
                payload.copy_(all_reduce_mean_fp8(payload, group))
                continue
            scales = self.scales[start // GRAD_BLOCK : stop // GRAD_BLOCK]
            mean = all_reduce_mean_fp8(ops.dequantize_blockwise(payload, scales), group)
            ops.quantize_blockwise_(mean, payload, scales)

    def all_reduce_sum_slots(self, slots: list[Slot], group: torch.distributed.ProcessGroup) -> None:
        """Sum some slots over `group` (norms under sequence parallelism, a tied embedding over its two stages)."""
        assert self.scales is None, "only 16- and 32-bit gradients are shared between layers or shards"
        flat = torch.cat([slot.slice(self.payload).reshape(-1) for slot in slots])
        torch.distributed.all_reduce(flat, group=group)
        for slot, part in zip(slots, flat.split([slot.numel for slot in slots]), strict=True):
            slot.slice(self.payload).copy_(part.view(slot.param.shape))
