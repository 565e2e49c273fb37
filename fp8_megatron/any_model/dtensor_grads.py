"""Gradients that torch's ``fully_shard`` leaves in ``p.grad``, as the optimizer reads them: where they lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..kernels import ops
from ..sharding.gradient import Gradient
from ..sharding.partition import ParamSpace, Slot
from .gradients import ParamGrad, ReadableGradBuffer


class _DTensorGrad(ParamGrad):
    """A gradient that torch's ``fully_shard`` leaves in the sharded parameter's ``grad``."""

    def __init__(self, slot: Slot, param: DTensor) -> None:
        super().__init__(slot)
        self.param = param

    def is_own(self, grad: Tensor) -> bool:
        """Any ``p.grad`` is."""
        return True

    @property
    def rows(self) -> Tensor | None:
        """This rank's rows, flat."""
        grad = self.param.grad
        if grad is None:
            return None
        assert isinstance(grad, DTensor)
        return grad.to_local().reshape(-1)


class DTensorGradBuffer(ReadableGradBuffer):
    """A space's gradients, each in its parameter's own ``grad``.

    FSDP2 lays the gradients of one reduction out in one tensor. Parameters that follow each other there and in the
    space are read as one run, so that a step takes one kernel for each FSDP module's linear weights. No gradient is
    kept here: FSDP2 writes them, and ``zero_grad`` frees them.

    Args:
        params: the sharded parameter of each slot.
    """

    def __init__(self, space: ParamSpace, params: Sequence[DTensor]) -> None:
        grads = [_DTensorGrad(slot, param) for slot, param in zip(space.slots, params, strict=True)]
        super().__init__(space, grads)
        self._grads = grads
        self.payload = torch.empty(0, device=space.device)

    def attach(self) -> None:
        """``p.grad`` is torch's."""
        for own in self._grads:
            own.buffer = self

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int, ops.FlatState]]:
        run: list[tuple[Slot, Tensor]] = []
        for slot, grad in self._present():
            if not start <= slot.offset < stop:
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

    def add(self, gradient: Gradient, grad: Tensor) -> None:
        raise NotImplementedError("FSDP2 writes its gradients itself")

    def reset(self, *, measures_underflow: bool = False, num_micro_batches: int | None = None) -> None:
        raise NotImplementedError("FSDP2 drops its gradients itself")

    def finish(self) -> None:
        """Nothing: FSDP2 has reduced the gradients."""

    def zero_(self, gradient: Gradient) -> None:
        """Nothing: a gradient that is None is left out."""

    @property
    def nbytes(self) -> int:
        return sum(grad.nbytes for _, grad in self._present())

    def non_finite_slots(self) -> list[str]:
        return [slot.name for slot, grad in self._present() if not torch.isfinite(grad).all().item()]

    def _present(self) -> Iterator[tuple[Slot, Tensor]]:
        return ((own.slot, rows) for own in self._grads if (rows := own.rows) is not None)


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
