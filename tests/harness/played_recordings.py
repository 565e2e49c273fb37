"""Recordings of the trainer's steps and of `record_step` that Python plays, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fp8_megatron.any_model.data_parallel import ReplicaGradBuffer
from fp8_megatron.any_model.recorded_grads import RecordedGrads, storage_of
from fp8_megatron.any_model.recorded_step import RecordedStep


class PlayedRecorder:
    """`record` runs Python, and a launch runs it again: what it returns, a tensor, goes to where it was.

    Attributes:
        is_recording, is_launching: whether `record` or a launch runs Python now.
        fails: what a recording ends with.
    """

    def __init__(self) -> None:
        self.kept_bytes = 0
        self.num_recordings = self.num_launches = self.num_releases = 0
        self.is_recording = self.is_launching = False
        self.fails: Exception | None = None
        self.waits_at = ""

    def beside(self, waits: list[str] | None = None) -> AbstractContextManager[None]:
        if waits is not None and self.waits_at:
            waits.append(self.waits_at)
        return nullcontext()

    def record(
        self, *computes: Callable[[], Any], before: Callable[[], None] = lambda: None
    ) -> list[tuple[Callable[[], None], Any]]:
        recordings = []
        for compute in computes:
            before()
            self.is_recording = True
            try:
                recordings.append(self._record(compute))
            finally:
                self.is_recording = False
            if self.fails is not None:
                raise self.fails
            self.num_recordings += 1
            self.kept_bytes += 1000
        return recordings

    def forget(self) -> None:
        self.kept_bytes = 0

    def release(self) -> None:
        self.forget()
        self.num_releases += 1

    def _record(self, compute: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        result = compute()

        def launch() -> None:
            self.is_launching = True
            result.copy_(compute())
            self.is_launching = False

        return launch, result


class FakeRecorder(PlayedRecorder):
    """Records as CUDA does: `record` runs Python but no kernel, a launch runs kernels but leaves Python as it was.

    What a launch writes goes to the addresses of the recording; they hold NaN until then.
    """

    with_grad = True

    def __init__(self) -> None:
        super().__init__()
        self.step: RecordedStep | None = None

    def _memory(self) -> list[Tensor]:
        assert self.step is not None
        step, grads = self.step, self.step._grads
        found = [*step._model.buffers(), *grads._places.values()]
        for buffer in grads._buffers:
            storage = storage_of(buffer)
            sections = getattr(storage, "sections", [storage])
            found += [section.payload for section in sections]
            found += [] if storage.scales is None else [storage.scales]
        for history in step._histories:
            found += [part for part in (history.record, history._written) if part is not None]
        found += [p.grad for p in step._params if p.grad is not None and type(p.grad) is Tensor]
        return found

    def _record(self, compute: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        assert self.step is not None
        grads = self.step._grads
        before, random = grads.notes(), torch.get_rng_state()
        held = [(tensor, tensor.clone()) for tensor in self._memory()]
        result, tensors = compute()
        known = {tensor.data_ptr() for tensor, _ in held}
        for tensor in (*tensors, *(t for t in self._memory() if t.data_ptr() not in known)):
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
        for tensor, value in held:
            tensor.copy_(value)
        torch.set_rng_state(random)

        def launch() -> None:
            self.num_launches += 1
            now, known = grads.notes(), _knowledge(grads)
            # A place that the recording added to is the tensor that p.grad is now.
            grads.restore(before)
            with torch.enable_grad() if self.with_grad else torch.no_grad():
                _, computed = compute()
            for place, value in zip(tensors, computed, strict=True):
                place.copy_(value)
            grads.restore(now)
            for owner, values in known:
                vars(owner).update(values)

        return launch, (result, tensors)


def _knowledge(grads: RecordedGrads) -> list[tuple[Any, dict[str, Any]]]:
    """What Python knows of gradients over replicas beside their notes."""
    found = []
    for buffer in grads._buffers:
        if isinstance(buffer, ReplicaGradBuffer):
            found += [(buffer, {name: vars(buffer)[name] for name in ("_is_dirty", "_squared_norms")})]
            found += [(buffer.replication, {"_is_finished": buffer.replication._is_finished})]
            found += [(own, {"in_shard": own.in_shard}) for own in buffer.gradients]
            found += [(bucket, {"reduced": bucket.reduced}) for bucket in buffer._buckets]
    return found


def recorded(compute: Callable[..., Any], model: torch.nn.Module, **settings: Any) -> tuple[RecordedStep, FakeRecorder]:
    recorder = FakeRecorder()
    settings = {"warmup_steps": 2, **settings}
    step = RecordedStep(compute, model, recorder, **settings)
    recorder.step = step
    return step, recorder
