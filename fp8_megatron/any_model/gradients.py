"""Gradients of a model in flat storage that users read as ``p.grad``.

Each space (`sharding.partition`) keeps its gradients in one `ReadableGradBuffer`, so that norms, clipping and the
optimizer step take a few kernels. ``p.grad`` is the parameter's slot of it:

- a plain matrix on one replica: its memory, in the parameter's own dtype. Autograd adds to it in place.
- a vector on one replica: what autograd or a layer gives. `ReadableGradBuffer.settle` copies all of them in one launch,
  because a model has hundreds, and a launch each is what the host has no time for.
- any other: a `GradTensor`.

``p.grad`` is the truth about what the next step sees. If it is None, the parameter is not updated, and its next
gradient starts anew. If it is another tensor, or has other memory (``p.grad.data = …``), those values are taken.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from ..nn.compiled import decides_by_tokens
from ..quantization.weight_grad import GradPlace, WeightGrad
from ..quantization.weight_products import without_products
from ..sharding.gradient import GradBuffer, Gradient
from ..sharding.partition import Slot, StorageClass, alone
from ..sharding.whole_grads import WholeGradBuffer
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


class ParamGrad(Gradient):
    """A gradient that users read as ``p.grad``.

    Attributes:
        tensor: what ``p.grad`` is while there is a gradient.
        is_left_to_others: somebody else (torch's DDP) works on ``p.grad``. It stays autograd's, and
            `ReadableGradBuffer.settle` reads it.
    """

    tensor: Tensor
    buffer: ReadableGradBuffer

    def __init__(self, slot: Slot) -> None:
        super().__init__(slot)
        self.is_left_to_others = False

    @property
    def is_wanted(self) -> bool:
        """See `MainGrad.is_wanted`. ``torch.autograd.grad`` and ``backward(inputs=…)`` ask for some gradients alone,
        and layers do not see that.

        Raises:
            UserError: ``torch.autograd.grad`` asks for this very gradient, which the layer has no other place for.
        """
        with without_products():
            if not self.param.requires_grad:
                return False
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

    def place(self, *, fp8: bool) -> GradPlace | None:
        with without_products():
            self._begin()
            return super().place(fp8=fp8)

    def written(self, grad: WeightGrad) -> None:
        with without_products():
            super().written(grad)
            self._show_own()

    def accumulate_(self, grad: Tensor) -> None:
        with without_products():
            if self.buffer.leaves_to_autograd(self, grad):
                present = self.param.grad
                if present is None:
                    self.show(grad)
                else:
                    present.add_(grad)  # as autograd does
                return
            self._begin()
            super().accumulate_(grad)
            self._show_own()

    def _begin(self) -> None:
        """Before a layer's gradient is added to ``p.grad``: the storage agrees with it."""
        present = self.param.grad
        if present is None:
            self.drop()
        elif not self.is_own(present):
            self.assign_(present)
            self.show(self.tensor)

    def _show_own(self) -> None:
        if self.param.grad is not self.tensor:
            self.show(self.tensor)

    def note_forward(self) -> None:
        with without_products():
            super().note_forward()

    def is_own(self, grad: Tensor) -> bool:
        """Whether `grad` is this gradient."""
        return grad is self.tensor or (isinstance(grad, GradTensor) and grad.source is self)

    def take_autograds(self) -> None:
        """After autograd has written ``p.grad``: move it to its storage."""
        grad = self.param.grad
        if grad is not None and not self.is_left_to_others and not self.is_own(grad):
            self.buffer.note_autograds(self)
            self.assign_(grad)
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

    def add_(self, grad: Tensor) -> None:
        """Add a plain tensor of the parameter's shape."""
        if torch._C._current_autograd_node() is not None:  # it adds to ``p.grad`` in place
            self.buffer.note_autograds(self)
        super().accumulate_(grad)

    def assign_(self, grad: Tensor) -> None:
        """Replace it by a plain tensor of the parameter's shape."""
        if grad.layout is not torch.strided:
            raise ValueError(
                f"the gradient of {self.slot.name} is {grad.layout}: use dense gradients (Embedding(sparse=False))"
            )
        check_shape(self.slot.name, grad.shape, self.tensor.shape)
        self.drop()
        super().accumulate_(grad.detach())


def _take_autograds(param: Tensor) -> None:
    # Not a bound method: torch does not show Python's collector what such a hook refers to, so a hook that leads back
    # to its parameter would keep the whole model in memory for good.
    with without_products():
        param.main_grad.take_autograds()  # type: ignore[attr-defined]


class ReadableGradBuffer(GradBuffer):
    """A `GradBuffer` whose gradients are read as ``p.grad``: after `attach`, `GradTensor`s of what it stores."""

    gradients: Sequence[ParamGrad]
    #: Each gradient is moved to its storage when autograd has written it, rather than in `settle`.
    takes_at_once = True
    _has_autograds = False

    def attach(self) -> None:
        """Become the gradients of the parameters. One that is there stays, as if the user had written it."""
        self.become_main_grad()
        for own in self.gradients:
            own.tensor = self.tensor_of(own)
            if self.takes_at_once:
                own.param.register_post_accumulate_grad_hook(_take_autograds)

    def tensor_of(self, own: ParamGrad) -> Tensor:
        """What ``p.grad`` is while there is a gradient."""
        return GradTensor(own, own.param)

    def note_autograds(self, own: ParamGrad) -> None:
        """Say once that torch's functions, and no layer, gave the gradient of an FP8 weight. A weight with hooks gets
        its layer's through autograd, too."""
        is_weight = self.space.storage is StorageClass.LINEAR
        if is_weight and not self._has_autograds and not own.slot.param._backward_hooks:
            self._has_autograds = True
            logger.warning(
                "%s has a gradient of torch's functions, which read its decoded values: a term of the loss may do so, "
                "but a module that multiplies with such values does not multiply in FP8",
                own.slot.name,
            )

    def leaves_to_autograd(self, own: ParamGrad, grad: Tensor) -> bool:
        """Whether a layer's gradient becomes ``p.grad``, or a part of it, until `settle`."""
        del own, grad
        return False

    def settle(self) -> list[bool]:
        """Make the storage agree with ``p.grad``: for each slot, whether it has a gradient. Others become zero."""
        used, unused, elsewhere = [], [], []
        with without_products():
            for own in self.gradients:  # one pass, because a read of ``p.grad`` costs the host time
                grad = own.param.grad
                used.append(grad is not None)
                if grad is None:
                    unused.append(own)
                elif not own.is_own(grad):
                    elsewhere.append(own)
        self._take(elsewhere)
        for own in unused:  # behind those that may get new memory for their neighbours too
            own.zero_()
        for own, is_used in zip(self.gradients, used, strict=True):
            if is_used:
                self.check_is_there(own)
        return used

    def take_others(self) -> None:
        """Move gradients that lie elsewhere (``p.grad`` is another tensor) to their storage."""
        self._take([own for own in self.gradients if own.param.grad is not None and not own.is_own(own.param.grad)])

    def _take(self, owns: Sequence[ParamGrad]) -> None:
        """Move gradients that lie elsewhere to their storage."""
        for own in owns:
            assert own.param.grad is not None
            own.assign_(own.param.grad)
            if not own.is_left_to_others:
                own.param.grad = own.tensor


class WeightGradBuffer(ReadableGradBuffer, WholeGradBuffer):
    """Gradients of FP8 weights on one replica."""


class PlainGradBuffer(ReadableGradBuffer, WholeGradBuffer):
    """Gradients of plain parameters on one replica. ``p.grad`` is the buffer's memory, in the parameters' own dtype.

    A slot is written where ``p.grad`` is its memory, so autograd and users write to the storage without being seen.
    """

    def attach(self) -> None:
        self.takes_at_once = self.space.storage is not StorageClass.VECTOR
        super().attach()
        self._tensors = [own.tensor for own in self.gradients]
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]

    def tensor_of(self, own: ParamGrad) -> Tensor:
        return alone(own.slot.slice(self.payload))

    def leaves_to_autograd(self, own: ParamGrad, grad: Tensor) -> bool:
        if self.takes_at_once or not _is_like(grad, own.tensor):
            return False
        present = own.param.grad
        return present is None or not own.is_own(present)

    def settle(self) -> list[bool]:
        if [tensor.data_ptr() for tensor in self._tensors] != self._addresses:  # ``p.grad.data = …``
            self._take_back()
        return super().settle()

    def _take_back(self) -> None:
        """Copy gradients that were given other memory to their own."""
        for own, address in zip(self.gradients, self._addresses, strict=True):
            if own.tensor.data_ptr() != address:
                value = own.tensor.data
                own.tensor.data = self.tensor_of(own)
                own.tensor.copy_(value)

    def _take(self, owns: Sequence[ParamGrad]) -> None:
        grads = {own: own.param.grad for own in owns}
        same = {own: grad for own, grad in grads.items() if grad is not None and _is_like(grad, own.tensor)}
        if len(same) > 1:
            torch._foreach_copy_([own.tensor for own in same], list(same.values()))
            for own in same:
                self.mark(own, 1)
                if not own.is_left_to_others:
                    own.param.grad = own.tensor
            owns = [own for own in owns if own not in same]
        super()._take(owns)


def _is_like(grad: Tensor, stored: Tensor) -> bool:
    """Whether `grad` is copied to `stored` without a conversion."""
    is_plain = type(grad) is Tensor and grad.layout is stored.layout
    return is_plain and grad.dtype == stored.dtype and grad.shape == stored.shape
