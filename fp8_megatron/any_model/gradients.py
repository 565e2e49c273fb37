"""Gradients of a model in flat storage that users read as ``p.grad``.

Each space (`sharding.partition`) keeps its gradients in one buffer, so that norms, clipping and the optimizer step take
a few kernels. ``p.grad`` is the parameter's slot of it:

- a plain matrix on one replica: its memory, in the parameter's own dtype. Autograd adds to it in place.
- a vector on one replica: what autograd or a layer gives. `SpaceGrads.settle` copies all of them in one launch, because
  a model has hundreds, and a launch each is what the host has no time for.
- a linear weight in FP8 storage: a `GradTensor`. The first gradient of a step is stored in FP8; a second one widens the
  storage (`sharding.growing_grads`).

``p.grad`` is the truth about what the next step sees. If it is None, the parameter is not updated, and its next
gradient starts anew. If it is another tensor, or has other memory (``p.grad.data = …``), those values are taken.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from ..nn.compiled import decides_by_tokens
from ..quantization.weight_grad import WeightGrad, write_wide_
from ..quantization.weight_products import without_products
from ..sharding.grad_buffer import GradBuffer, LocalGradBuffer
from ..sharding.growing_grads import GrowingGradBuffer, Section, multiply_
from ..sharding.partition import ParamSpace, Slot, StorageClass, alone
from .grad_tensor import GradTensor

logger = logging.getLogger(__name__)


def check_shape(name: str, now: torch.Size, before: torch.Size) -> None:
    """Check that a parameter, or its gradient, has the shape that it had when the optimizer was built.

    Raises:
        UserError: it has another one, for which the flat storage has no place.
    """
    if now != before:
        raise UserError(
            f"{name} had the shape {tuple(before)} when the optimizer was built and has {tuple(now)}: change sizes "
            f"(resize_token_embeddings) before initialize"
        )


class ParamGrad:
    """One parameter's gradient: its `main_grad`, and the source of its `GradTensor`.

    Attributes:
        tensor: what ``p.grad`` is while there is a gradient.
    """

    tensor: Tensor

    def __init__(self, space: SpaceGrads, slot: Slot) -> None:
        self.space = space
        self.slot = slot
        self.param = slot.param
        #: Somebody else (torch's DDP) works on ``p.grad``: it stays autograd's, and `SpaceGrads.settle` reads it.
        self.is_left_to_others = False

    def accumulate_(self, grad: Tensor | WeightGrad) -> None:
        """Add one micro-batch's gradient (any float dtype, the parameter's shape), if backward is to make it."""
        with without_products():
            if self.param.requires_grad and self._is_wanted():
                self.space.accumulate_(self, grad)

    def note_forward(self) -> None:
        """A forward begins whose backward will give a gradient: until then, memory of gradients that nobody holds is
        free."""
        with without_products():
            if self.param.grad is None:
                self.space.note_forward(self.slot)

    def _is_wanted(self) -> bool:
        """Whether the backward that runs is to give this parameter a gradient. ``torch.autograd.grad`` and
        ``backward(inputs=…)`` ask for some gradients alone, and layers do not see that.

        Raises:
            UserError: ``torch.autograd.grad`` asks for this very gradient, which the layer has no other place for.
        """
        node: Any = torch._C._current_autograd_node()
        if node is None or decides_by_tokens(node):
            return True
        for following, _ in node.next_functions:
            if getattr(following, "variable", None) is self.param:
                try:
                    return bool(torch._C._will_engine_execute_node(following))
                except RuntimeError as error:
                    raise UserError(
                        f"torch.autograd.grad does not return the gradient of {self.slot.name}, a parameter of an FP8 "
                        f"layer: call backward(inputs=[…]), and read p.grad"
                    ) from error
        return True

    def is_own(self, grad: Tensor) -> bool:
        """Whether `grad` is this gradient."""
        return grad is self.tensor or (isinstance(grad, GradTensor) and grad.source is self)

    def take_autograds(self, param: Tensor) -> None:
        """After autograd has written ``p.grad``: move it to its storage."""
        if param.grad is not None and not self.is_left_to_others and not self.is_own(param.grad):
            self.space.note_autograds(self.slot)
            self.assign_(param.grad)
            self.show(self.tensor)

    def show(self, grad: Tensor) -> None:
        """Make `grad` the parameter's ``grad``.

        Raises:
            UserError: the parameter has another dtype or shape, or is on another device, than its storage.
        """
        try:
            self.param.grad = grad
        except RuntimeError as error:
            now, before = self.param, grad
            check_shape(self.slot.name, now.shape, before.shape)
            if (now.dtype, now.device) == (before.dtype, before.device):
                raise
            raise UserError(
                f"{self.slot.name} was {before.dtype} on {before.device} when the optimizer was built and is "
                f"{now.dtype} on {now.device}: convert or move the model before initialize"
            ) from error

    def values(self) -> Tensor:
        """See `GradSource`."""
        return self.space.values(self.slot)

    def squared_norm(self) -> Tensor:
        """See `GradSource`."""
        return self.space.squared_norm(self.slot)

    def scale_(self, factor: Tensor | float) -> None:
        """See `GradSource`."""
        self.space.scale_(factor, self.slot)

    def leave_to_others(self) -> None:
        """Somebody else works on ``p.grad`` from now on, so what there is of it becomes a plain tensor; called by every
        replica."""
        self.is_left_to_others = True
        grad = self.param.grad
        if isinstance(grad, GradTensor) and self.is_own(grad):
            self.param.grad = self.values().to(self.param.dtype)

    def scale_others_(self, factor: Tensor) -> None:
        """Multiply ``p.grad`` where somebody else keeps it (`is_left_to_others`): the next step takes its values."""
        if not self.is_left_to_others:
            return
        grad = self.param.grad
        if grad is not None and not self.is_own(grad):
            grad.mul_(factor)

    def zero_(self) -> None:
        """See `GradSource`."""
        self.space.zero_(self.slot)

    def add_(self, grad: Tensor) -> None:
        """See `GradSource`."""
        if torch._C._current_autograd_node() is not None:  # it adds to ``p.grad`` in place
            self.space.note_autograds(self.slot)
        self.space.add_(self.slot, grad)

    def assign_(self, grad: Tensor) -> None:
        """See `GradSource`."""
        if grad.layout is not torch.strided:
            raise ValueError(
                f"the gradient of {self.slot.name} is {grad.layout}: use dense gradients (Embedding(sparse=False))"
            )
        check_shape(self.slot.name, grad.shape, self.tensor.shape)
        self.space.forget(self.slot)
        self.space.add_(self.slot, grad.detach())

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A copied or pickled parameter has no gradient: this becomes None."""
        return type(None), ()


def _take_autograds(param: Tensor) -> None:
    # Not a bound method: torch does not show Python's collector what such a hook refers to, so a hook that leads back
    # to its parameter would keep the whole model in memory for good.
    with without_products():
        param.main_grad.take_autograds(param)  # type: ignore[attr-defined]


class SpaceGrads(ABC):
    """The gradients of one space."""

    buffer: GradBuffer

    def __init__(self, space: ParamSpace) -> None:
        self.space = space
        self.grads = [ParamGrad(self, slot) for slot in space.slots]
        self._has_autograds = False

    def note_autograds(self, slot: Slot) -> None:
        """Say once that torch's functions, and no layer, gave the gradient of an FP8 weight. A weight with hooks gets
        its layer's through autograd, too."""
        is_weight = self.space.storage is StorageClass.LINEAR
        if is_weight and not self._has_autograds and not slot.param._backward_hooks:
            self._has_autograds = True
            logger.warning(
                "%s has a gradient of torch's functions, which read its decoded values: a term of the loss may do so, "
                "but a module that multiplies with such values does not multiply in FP8",
                slot.name,
            )

    def _attach(self, *, takes_at_once: bool = True) -> None:
        """Become the gradients of the parameters. One that is there stays, as if the user had written it.

        Args:
            takes_at_once: move each gradient to its storage when autograd has written it, rather than in `settle`.
        """
        for grad in self.grads:
            grad.param.main_grad = grad  # type: ignore[attr-defined]
            if takes_at_once:
                grad.param.register_post_accumulate_grad_hook(_take_autograds)

    def settle(self) -> list[bool]:
        """Make the storage agree with ``p.grad``: for each slot, whether it has a gradient. Others become zero."""
        used, unused, elsewhere = [], [], []
        with without_products():
            for own in self.grads:  # one pass, because a read of ``p.grad`` costs the host time
                grad = own.param.grad
                used.append(grad is not None)
                if grad is None:
                    unused.append(own)
                elif not own.is_own(grad):
                    elsewhere.append(own)
        self._take(elsewhere)
        for own in unused:  # behind those that may get new memory for their neighbours too
            self.zero_(own.slot)
        return used

    def take_others(self) -> None:
        """Move gradients that lie elsewhere (``p.grad`` is another tensor) to their storage."""
        self._take([own for own in self.grads if own.param.grad is not None and not own.is_own(own.param.grad)])

    def _take(self, owns: Sequence[ParamGrad]) -> None:
        """Move gradients that lie elsewhere to their storage."""
        for own in owns:
            assert own.param.grad is not None
            own.assign_(own.param.grad)
            if not own.is_left_to_others:
                own.param.grad = own.tensor

    def accumulate_(self, own: ParamGrad, grad: Tensor | WeightGrad) -> None:
        """Add a gradient that a layer wrote, to the parameter's ``grad``."""
        present = own.param.grad
        if present is None:
            self.forget(own.slot)
        elif not own.is_own(present):
            own.assign_(present)
        self.add_(own.slot, grad)
        if present is not own.tensor:
            own.show(own.tensor)

    @property
    def nbytes(self) -> int:
        """Bytes of payloads that stay between backward passes."""
        return self.buffer.nbytes

    @property
    def most_gradients(self) -> int:
        """How many gradients of one parameter and step the storage has room for at its full precision."""
        return 1

    def expect(self, num_gradients: int) -> None:
        """Make room for `num_gradients` of one parameter and step."""
        del num_gradients  # any number of them is added in the parameter's own dtype

    @abstractmethod
    def add_(self, slot: Slot, grad: Tensor | WeightGrad) -> None:
        """Write or add a gradient."""

    def note_forward(self, slot: Slot) -> None:
        """`slot`, which has no gradient, is in a forward."""
        del slot

    @abstractmethod
    def forget(self, slot: Slot) -> None:
        """The next gradient of `slot` overwrites what is stored."""

    @abstractmethod
    def zero_(self, slot: Slot) -> None:
        """Make the gradient of `slot` zero. Nothing happens where it is zero already."""

    @abstractmethod
    def values(self, slot: Slot) -> Tensor:
        """The gradient of `slot`, FP32 in the parameter's shape (a copy)."""

    @abstractmethod
    def squared_norm(self, slot: Slot) -> Tensor:
        """Σ x² of the gradient of `slot`, FP32 [1]."""

    def partial_squared_norm(self) -> Tensor:
        """Σ x² of what this rank owns of the space's gradients, FP32 [1]; replicas own shards."""
        return self.buffer.squared_norm()

    @abstractmethod
    def scale_(self, factor: Tensor | float, slot: Slot | None = None) -> None:
        """Multiply the gradient of `slot`, or all gradients, by a number.

        Padding, and slots without a gradient, stay zero: nothing would overwrite a NaN there.
        """


class RecordableGrads(SpaceGrads):
    """Gradients that a recorded step can write (`recorded_grads`)."""

    buffer: GradBuffer

    @property
    @abstractmethod
    def written(self) -> LocalGradBuffer:
        """What a recorded step writes."""

    def held(self) -> AbstractContextManager[None]:
        """Where a step runs that may be recorded: its gradients go to `written`, and nowhere else."""
        return nullcontext()

    def prepare(self) -> None:
        """Do what the first gradients of a step do beside being written: a launch does not repeat it."""

    def pin(self) -> None:
        """Have all memory from now on, where it is."""
        self.written.pin()

    @property
    def addresses(self) -> list[int]:
        """Where gradients are stored."""
        return self.written.addresses

    def count(self, slot: Slot) -> int:
        """See `LocalGradBuffer.count`."""
        return self.written.count(slot)

    def mark(self, slot: Slot, count: int) -> None:
        """`slot` holds the sum of `count` gradients, which a recorded step has written."""
        self.written.mark(slot, count)

    def fits(self, count: int) -> bool:
        """Whether the storage stays as it is if a slot holds the sum of `count` gradients."""
        return self.written.fits(count)


class LinearGrads(RecordableGrads):
    """Gradients of linear weights on one replica.

    Args:
        num_gradients: gradients that each parameter is expected to receive per step.
    """

    buffer: GrowingGradBuffer

    def __init__(self, space: ParamSpace, num_gradients: int = 1) -> None:
        super().__init__(space)
        self.buffer = GrowingGradBuffer(space, num_gradients)
        for grad in self.grads:
            grad.tensor = GradTensor(grad, grad.param)
        self._attach()

    @property
    def written(self) -> GrowingGradBuffer:
        return self.buffer

    @property
    def most_gradients(self) -> int:
        return self.buffer.most_gradients

    def expect(self, num_gradients: int) -> None:
        self.buffer.expect(num_gradients)

    def add_(self, slot: Slot, grad: Tensor | WeightGrad) -> None:
        self.buffer.accumulate_(slot, grad)

    def forget(self, slot: Slot) -> None:
        self.buffer.forget(slot)

    def zero_(self, slot: Slot) -> None:
        self.buffer.forget(slot)
        self.buffer.zero_if_unwritten(slot)

    def settle(self) -> list[bool]:
        used = super().settle()
        for own, is_used in zip(self.grads, used, strict=True):
            if is_used:
                self.buffer.check_is_there(own.slot)
        return used

    def note_forward(self, slot: Slot) -> None:
        section = self.buffer.section_of(slot)
        if section.is_held and all(own.param.grad is None for own in self._of_section(section)):
            self.buffer.release(section)

    def _of_section(self, section: Section) -> Iterator[ParamGrad]:
        return (own for own in self.grads if section.start <= own.slot.offset < section.stop)

    def values(self, slot: Slot) -> Tensor:
        return self.buffer.values(slot)

    def squared_norm(self, slot: Slot) -> Tensor:
        return self.buffer.squared_norm_of(slot)

    def scale_(self, factor: Tensor | float, slot: Slot | None = None) -> None:
        self.buffer.scale_(factor, slot)


class PlainGrads(RecordableGrads):
    """Gradients of plain parameters on one replica, in their own dtype.

    A slot is written where ``p.grad`` is its memory, so autograd and users write to the storage without being seen.

    Args:
        buffer: of the parameters' dtype.
    """

    buffer: LocalGradBuffer

    def __init__(self, space: ParamSpace, buffer: LocalGradBuffer) -> None:
        super().__init__(space)
        self.buffer = buffer
        for grad in self.grads:
            grad.tensor = alone(grad.slot.slice(buffer.payload))
        #: By offset, as real numbers.
        self._views = {grad.slot.offset: _as_real(grad.tensor) for grad in self.grads}
        self._tensors = [grad.tensor for grad in self.grads]
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        self._are_vectors = space.storage is StorageClass.VECTOR
        self._attach(takes_at_once=not self._are_vectors)

    @property
    def written(self) -> LocalGradBuffer:
        return self.buffer

    def accumulate_(self, own: ParamGrad, grad: Tensor | WeightGrad) -> None:
        present = own.param.grad
        if not self._are_vectors or not isinstance(grad, Tensor) or not _is_like(grad, own.tensor):
            super().accumulate_(own, grad)
        elif present is None:
            own.show(grad)
        elif not own.is_own(present):
            present.add_(grad)  # as autograd does
        else:
            super().accumulate_(own, grad)

    def settle(self) -> list[bool]:
        if [tensor.data_ptr() for tensor in self._tensors] != self._addresses:  # ``p.grad.data = …``
            self._take_back()
        return super().settle()

    def _take_back(self) -> None:
        """Copy gradients that were given other memory to their own."""
        for own, address in zip(self.grads, self._addresses, strict=True):
            if own.tensor.data_ptr() != address:
                value = own.tensor.data
                own.tensor.data = alone(own.slot.slice(self.buffer.payload))
                own.tensor.copy_(value)

    def _take(self, owns: Sequence[ParamGrad]) -> None:
        grads = {own: own.param.grad for own in owns}
        same = {own: grad for own, grad in grads.items() if grad is not None and _is_like(grad, own.tensor)}
        if len(same) > 1:
            torch._foreach_copy_([own.tensor for own in same], list(same.values()))
            for own in same:
                self.buffer.mark(own.slot, 1)
                if not own.is_left_to_others:
                    own.param.grad = own.tensor
            owns = [own for own in owns if own not in same]
        super()._take(owns)

    def add_(self, slot: Slot, grad: Tensor | WeightGrad) -> None:
        real = _as_real(grad) if isinstance(grad, Tensor) else grad
        write_wide_(self._views[slot.offset], real, adds=self.buffer.is_written(slot))
        self.buffer.mark(slot, 1)

    def forget(self, slot: Slot) -> None:
        self.buffer.forget(slot)

    def zero_(self, slot: Slot) -> None:
        if self.buffer.is_written(slot):
            self._views[slot.offset].zero_()
            self.buffer.forget(slot)

    def values(self, slot: Slot) -> Tensor:
        value = self._views[slot.offset].to(torch.float32, copy=True)
        return torch.view_as_complex(value) if slot.param.is_complex() else value

    def squared_norm(self, slot: Slot) -> Tensor:
        return self._views[slot.offset].float().square().sum().reshape(1)

    def scale_(self, factor: Tensor | float, slot: Slot | None = None) -> None:
        written = [own for own in self.space.slots if self.buffer.is_written(own)] if slot is None else [slot]
        multiply_([self._views[own.offset] for own in written], factor)


def _as_real(value: Tensor) -> Tensor:
    """Complex numbers with real and imaginary parts along one more dimension; others as they are."""
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value


def _is_like(grad: Tensor, stored: Tensor) -> bool:
    """Whether `grad` is copied to `stored` without a conversion."""
    is_plain = type(grad) is Tensor and grad.layout is stored.layout
    return is_plain and grad.dtype == stored.dtype and grad.shape == stored.shape
