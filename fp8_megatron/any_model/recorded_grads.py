"""Gradients around a recorded step: a graph writes to addresses, and Python has to know what lies there.

A recording holds what Python decided while it was made: a gradient that is the first of a step overwrites its storage,
and a later one is added. So each state of the gradients has a recording of its own, and after a launch Python's notes
become what they were after the recording.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ..quantization.scaled_tensor import ScaledTensor
from ..sharding.gradient import GradBuffer
from ..sharding.whole_grads import WholeGradBuffer
from .data_parallel import ReplicaGradBuffer
from .gradients import ParamGrad

#: Of one parameter: frozen; no ``p.grad``; one whose next gradient overwrites it; one that is added to.
_FROZEN, _NONE, _ZERO, _SUM = range(4)


@dataclass(frozen=True, eq=False)
class Notes:
    """What Python knows of all gradients: ``p.grad``, and how many gradients each one's storage holds the sum of."""

    grads: Sequence[Tensor | None]
    counts: Sequence[int]


@dataclass(frozen=True, eq=False)
class GradientChange:
    """What a call of the step did to each gradient.

    Attributes:
        states: after it.
        added: gradients added to what the storage holds the sum of.
    """

    states: bytes
    added: Sequence[int]


class RecordedGrads:
    """``p.grad`` of `params`, before and after recorded steps.

    Those of an FP8 optimizer's parameters have their storage already. Over replicas a recorded step leaves them on
    their rank, and nothing leaves before the launch has ended. Any other's place is its ``p.grad`` at the end of its
    first recording.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter]) -> None:
        self._params = params
        self._stored = [_stored(param) for param in params]
        self._buffers = list({own.buffer: None for own in self._stored if own is not None})
        #: By the parameter's index, the place of a gradient that no optimizer stores.
        self._places: dict[int, Tensor] = {}
        for buffer in self._buffers:
            storage_of(buffer).pin()

    def settle(self, *, is_recording: bool = False) -> None:
        """Make every ``p.grad`` its place, with the values that it has, or leave it None."""
        for buffer in self._buffers:
            buffer.take_others()
        for index, (param, stored) in enumerate(zip(self._params, self._stored, strict=True)):
            grad = param.grad
            if stored is not None or grad is None:
                continue
            place = self._places.get(index)
            if place is None and is_recording:
                self._places[index] = grad
            elif place is not None and grad is not place:
                with torch.no_grad():
                    place.copy_(grad)
                param.grad = place

    @contextmanager
    def held(self) -> Iterator[None]:
        """Where the step runs that may be recorded: its gradients stay on their rank."""
        with ExitStack() as stack:
            for buffer in self._buffers:
                if isinstance(buffer, ReplicaGradBuffer):
                    stack.enter_context(buffer.replication.recorded())
            yield

    def prepare(self) -> None:
        """Do what the first gradients of a step do beside being written: a launch does not repeat it."""
        for buffer in self._buffers:
            if isinstance(buffer, ReplicaGradBuffer):
                for own in buffer.gradients:
                    if own.param.grad is None:
                        own.drop()

    @property
    def states(self) -> bytes:
        """Which recording is the right one: of each parameter, what a gradient does to ``p.grad``."""
        return bytes(map(_state, self._params, self._stored))

    @property
    def addresses(self) -> list[int]:
        """Where parameters and the storage of their gradients lie."""
        found = []
        for param in self._params:
            if isinstance(param, ScaledTensor):
                found += [param.payload.data_ptr(), param.scale.data_ptr()]
            else:
                found.append(param.data_ptr())
        found += [address for buffer in self._buffers for address in storage_of(buffer).addresses]
        return found

    def notes(self) -> Notes:
        """What Python knows now."""
        counts = [0 if stored is None else stored.count for stored in self._stored]
        return Notes([param.grad for param in self._params], counts)

    def restore(self, notes: Notes) -> None:
        """Know again what `notes` say."""
        for param, stored, grad, count in zip(self._params, self._stored, notes.grads, notes.counts, strict=True):
            param.grad = grad
            if stored is not None:
                _mark(stored, count)

    def change_since(self, states: bytes, before: Notes) -> GradientChange:
        """What was done since there were `states` and `before`."""
        added = [
            0 if stored is None else max(0, stored.count - (count if state == _SUM else 0))
            for stored, state, count in zip(self._stored, states, before.counts, strict=True)
        ]
        return GradientChange(self.states, added)

    def fits(self, states: bytes, change: GradientChange) -> bool:
        """Whether the storage of the gradients stays as it is if `change` is done once more."""
        most: dict[WholeGradBuffer, int] = {}
        for stored, state, added in zip(self._stored, states, change.added, strict=True):
            if stored is not None and added:
                count = added + (stored.count if state == _SUM else 0)
                storage = storage_of(stored.buffer)
                most[storage] = max(count, most.get(storage, 0))
        return all(storage.fits(count) for storage, count in most.items())

    def note(self, states: bytes, change: GradientChange) -> None:
        """Know what a launch has done, which began with `states`."""
        for index, (param, stored) in enumerate(zip(self._params, self._stored, strict=True)):
            before, after, added = states[index], change.states[index], change.added[index]
            if after == _FROZEN or before == after == _NONE:
                continue
            if after == _NONE:
                param.grad = None
                continue
            place = self._places[index] if stored is None else stored.tensor
            if stored is not None and (added or after == _ZERO):
                _mark(stored, 0 if after == _ZERO else added + (stored.count if before == _SUM else 0))
            if param.grad is not place:
                param.grad = place

    def release(self) -> None:
        """Forget the places of gradients that no optimizer stores."""
        self._places.clear()


def storage_of(buffer: GradBuffer) -> WholeGradBuffer:
    """What a recorded step writes."""
    if isinstance(buffer, ReplicaGradBuffer):
        return buffer.on_rank
    assert isinstance(buffer, WholeGradBuffer), "gradients of FSDP2"
    return buffer


def _mark(own: ParamGrad, count: int) -> None:
    """The storage has the sum of `count` gradients, which a recorded step has written."""
    storage_of(own.buffer).mark(own, count)
    if count and isinstance(own.buffer, ReplicaGradBuffer):
        own.buffer.note_write()


def _stored(param: torch.nn.Parameter) -> ParamGrad | None:
    own = getattr(param, "main_grad", None)
    return own if isinstance(own, ParamGrad) else None


def _state(param: torch.nn.Parameter, stored: ParamGrad | None) -> int:
    if not param.requires_grad:
        return _FROZEN
    if param.grad is None:
        return _NONE
    return _SUM if stored is None or stored.count else _ZERO
