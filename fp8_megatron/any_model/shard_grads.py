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
    space are read as one run, so that a step takes one kernel for each FSDP module's linear weights. No gradient is
    kept here: ``zero_grad`` frees them.
    """

    def __init__(self, space: ParamSpace, params: Sequence[DTensor]) -> None:
        super().__init__(space)
        self._params = dict(zip(space.slots, params, strict=True))
        self.payload = torch.empty(0, device=space.device)

    def of(self, slot: Slot) -> Tensor | None:
        """This rank's rows of the gradient of `slot`, flat."""
        return _local_grad(self._params[slot])

    def exist(self) -> list[bool]:
        """For each slot, whether it has a gradient now."""
        return [param.grad is not None for param in self._params.values()]

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int, ops.FlatState]]:
        run: list[tuple[Slot, Tensor]] = []
        for slot in self.space.slots:
            grad = self.of(slot) if start <= slot.offset < stop else None
            if grad is None:
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
        raise NotImplementedError("FSDP2 drops its gradients itself")

    def finish(self) -> None:
        """Nothing: FSDP2 has reduced the gradients."""

    @property
    def nbytes(self) -> int:
        return sum(grad.nbytes for _, grad in self._present())

    def non_finite_slots(self) -> list[str]:
        return [slot.name for slot, grad in self._present() if not torch.isfinite(grad).all().item()]

    def _present(self) -> Iterator[tuple[Slot, Tensor]]:
        return ((slot, grad) for slot in self.space.slots if (grad := self.of(slot)) is not None)


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
        return self.buffer.exist()

    def add_(self, slot: Slot, grad: Tensor | WeightGrad) -> None:
        raise NotImplementedError("FSDP2 writes its gradients itself")

    def forget(self, slot: Slot) -> None:
        raise NotImplementedError("FSDP2 drops its gradients itself")

    def zero_(self, slot: Slot) -> None:
        raise NotImplementedError("FSDP2 drops its gradients itself")

    def values(self, slot: Slot) -> Tensor:
        grad = self.buffer.of(slot)
        assert grad is not None, slot.name
        return grad.float().view(slot.param.shape)

    def squared_norm(self, slot: Slot) -> Tensor:
        return self.values(slot).square().sum().reshape(1)

    def scale_(self, factor: Tensor | float, slot: Slot | None = None) -> None:
        for own in self.space.slots if slot is None else [slot]:
            grad = self.buffer.of(own)
            if grad is not None:
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
