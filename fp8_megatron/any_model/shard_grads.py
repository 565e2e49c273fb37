"""Gradients that torch's ``fully_shard`` leaves in ``p.grad``, as the optimizer reads them: where they lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..kernels import ops
from ..quantization.weight_grad import WeightGrad
from ..sharding.grad_buffer import GradBuffer
from ..sharding.partition import ParamSpace, Slot
from .gradients import SpaceGrads


class ShardGradBuffer(GradBuffer):
    """A space's gradients, each in its parameter's own ``grad``.

    FSDP2 lays the gradients of one reduction out in one tensor. Parameters that follow each other there and in the
    space are read as one run, so that a step takes one kernel for each FSDP module's linear weights.
    """

    def __init__(self, space: ParamSpace, params: Sequence[DTensor]) -> None:
        super().__init__(space)
        self._params = params
        self._grads: list[Tensor | None] = [None] * len(params)
        self.payload = torch.empty(0, device=space.device)

    def read(self) -> list[bool]:
        """Take the gradients as they are now: for each slot, whether there is one."""
        self._grads = [_local_grad(param) for param in self._params]
        return [grad is not None for grad in self._grads]

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int, ops.FlatState]]:
        run: list[tuple[Slot, Tensor]] = []
        for slot, grad in zip(self.space.slots, self._grads, strict=True):
            if grad is None or not start <= slot.offset < stop:
                continue
            if run and not _continues(run[-1], slot, grad):
                yield _together(run)
                run = []
            run.append((slot, grad))
        if run:
            yield _together(run)

    def squared_norm(self) -> Tensor:
        squares = [ops.squared_norm(run.payload, None) for _, _, run in self.runs(0, self.space.numel)]
        return torch.cat(squares).sum().reshape(1) if squares else torch.zeros(1, device=self.space.device)

    def _write(self, slot: Slot, grad: Tensor | WeightGrad) -> None:
        raise NotImplementedError("FSDP2 writes its gradients itself")

    def reset(self, *, measures_underflow: bool = False, num_micro_batches: int | None = None) -> None:
        self._grads = [None] * len(self._params)

    def finish(self) -> None:
        self.read()

    @property
    def nbytes(self) -> int:
        return sum(grad.nbytes for grad in (_local_grad(param) for param in self._params) if grad is not None)

    def non_finite_slots(self) -> list[str]:
        together = zip(self.space.slots, self._grads, strict=True)
        return [slot.name for slot, grad in together if grad is not None and not torch.isfinite(grad).all().item()]


class ShardGrads(SpaceGrads):
    """The gradients of one space of sharded parameters. ``p.grad`` is torch's.

    Args:
        params: the sharded parameter of each slot.
    """

    buffer: ShardGradBuffer

    def __init__(self, space: ParamSpace, params: Sequence[DTensor]) -> None:
        super().__init__(space)
        self.buffer = ShardGradBuffer(space, params)

    def settle(self) -> list[bool]:
        return self.buffer.read()

    def add_(self, slot: Slot, grad: Tensor | WeightGrad) -> None:
        raise NotImplementedError("FSDP2 writes its gradients itself")

    def forget(self, slot: Slot) -> None:
        raise NotImplementedError("FSDP2 drops its gradients itself")

    def zero_(self, slot: Slot) -> None:
        raise NotImplementedError("FSDP2 drops its gradients itself")

    def values(self, slot: Slot) -> Tensor:
        grad = self.buffer._grads[self.space.slots.index(slot)]
        assert grad is not None, slot.name
        return grad.float().view(slot.param.shape)

    def squared_norm(self, slot: Slot) -> Tensor:
        return self.values(slot).square().sum().reshape(1)

    def scale_(self, factor: Tensor | float, slot: Slot | None = None) -> None:
        for own, grad in zip(self.space.slots, self.buffer._grads, strict=True):
            if grad is not None and (slot is None or own is slot):
                grad.mul_(factor)


def _local_grad(param: DTensor) -> Tensor | None:
    """This rank's rows of a gradient, flat."""
    grad = param.grad
    if grad is None:
        return None
    assert isinstance(grad, DTensor)
    return grad.to_local().reshape(-1)


def _continues(last: tuple[Slot, Tensor], slot: Slot, grad: Tensor) -> bool:
    """Whether a slot and its gradient follow right behind the last one's, both in the space and in memory."""
    before, grad_before = last
    is_next = before.numel == before.padded and before.offset + before.padded == slot.offset
    return (
        is_next
        and grad.dtype == grad_before.dtype
        and grad.untyped_storage().data_ptr() == grad_before.untyped_storage().data_ptr()
        and grad.storage_offset() == grad_before.storage_offset() + grad_before.numel()
    )


def _together(run: list[tuple[Slot, Tensor]]) -> tuple[int, int, ops.FlatState]:
    """The range of a run's slots, and their gradients as one tensor with the padding of the last slot."""
    (first, grad), (last, _) = run[0], run[-1]
    numel = last.offset + last.numel - first.offset
    flat = grad.as_strided((numel,), (1,), grad.storage_offset())
    if last.padded > last.numel:
        flat = torch.nn.functional.pad(flat, (0, last.padded - last.numel))
    return first.offset, last.offset + last.padded, ops.FlatState(flat, None)
