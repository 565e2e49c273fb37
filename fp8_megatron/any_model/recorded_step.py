"""`record_step`: forward and backward of any loop as a CUDA graph. The host makes one launch instead of thousands.

A launch repeats kernels and addresses, and runs no Python:

- Batches are copied to where the recording found them, and results are copied out.
- Gradients: `recorded_grads`.
- Delayed scales are updated in place (`AmaxHistory.keep_addresses`), and so are weights and the scales of their casts.
- Each kind of call has a recording: the batch's shapes and constants, the gradients that are there, autocast,
  ``training``. A kind runs unrecorded first, on the recorder's stream, so that its kernels are compiled.

Without CUDA nothing is recorded, and the same loop runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.utils.checkpoint
from torch import Tensor

from ..errors import UserError
from ..graphs.recorder import CudaRecorder, Recorder
from ..quantization.amax_history import AmaxHistory
from .build import delayed_scales
from .gradients import ParamGrad
from .pytrees import flattened, rebuilt
from .recorded_grads import GradientChange, RecordedGrads
from .transformers_masks import TransformersMasks

logger = logging.getLogger(__name__)

_SHARED = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule")


class RecordingError(RuntimeError):
    """The step cannot be recorded. Its cause is the first error, whose traceback ends in the line to change."""


@dataclass(frozen=True, eq=False)
class _Recording:
    launch: Callable[[], None]
    result: Any
    tensors: Sequence[Tensor]
    change: GradientChange


@dataclass(eq=False)
class _StepKind:
    """Calls that one recording repeats. `change` is that of the last unrecorded one."""

    num_unrecorded: int = 0
    change: GradientChange | None = None
    masks: TransformersMasks = field(default_factory=TransformersMasks)
    recording: _Recording | None = field(default=None)


class RecordedStep:
    """Calls `compute`, or launches its recording. `record_step` makes it."""

    def __init__(
        self,
        compute: Callable[..., Any],
        model: torch.nn.Module,
        recorder: Recorder | None,
        *,
        warmup_steps: int = 3,
        max_recordings: int = 8,
        on_error: Literal["raise", "warn"] = "raise",
    ) -> None:
        self._compute = compute
        self._model = model
        self._recorder = recorder
        self._warmup_steps = warmup_steps
        self._max_recordings = max_recordings
        self._goes_on = on_error == "warn"
        self._params = list(model.parameters())
        self._device = self._params[0].device
        self._modules = list(model.modules())
        self._grads = RecordedGrads(self._params)
        self._histories: list[AmaxHistory] = delayed_scales(model, self._device)
        self._known = self._facts()
        self._kinds: dict[Hashable, _StepKind] = {}
        #: By the kind of batch, where recordings read it.
        self._batches: dict[Hashable, list[Tensor]] = {}
        self._has_warned = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What ``compute(*args, **kwargs)`` returns, as tensors of the caller's own without autograd's graph.

        Tensors among the arguments may be on the CPU; `compute` gets them on the model's device. Other arguments are
        constants of a recording.

        Raises:
            RecordingError: a call could not be recorded, and ``on_error`` is not ``"warn"``.
            UserError: `compute` takes or returns something that cannot be recorded.
        """
        kind_of_batch, tensors = flattened((args, kwargs), "the batch")
        if any(tensor.requires_grad for tensor in tensors):
            raise UserError("a tensor of the batch requires a gradient: detach it")
        if self._recorder is None:
            return self._run((args, kwargs), [tensor.to(self._device) for tensor in tensors])
        self._follow_facts()
        self._grads.settle()
        self._grads.prepare()
        states = self._grads.states
        key = (kind_of_batch, states, self._surroundings())
        kind = self._kinds.get(key)
        if kind is None:
            if len(self._kinds) >= self._max_recordings:
                self._warn_of_many()
                with self._recorder.beside():
                    return self._run((args, kwargs), [tensor.to(self._device, non_blocking=True) for tensor in tensors])
            kind = self._kinds[key] = _StepKind()
        places = self._places(kind_of_batch, tensors)
        if kind.recording is None and self._may_record(kind, states):
            self._record(kind, states, (args, kwargs), places)
        if kind.recording is None or not self._grads.fits(states, kind.recording.change):
            return self._run_of_kind(kind, states, (args, kwargs), places)
        recording = kind.recording
        recording.launch()
        self._grads.note(states, recording.change)
        result = rebuilt(recording.result, iter([tensor.clone() for tensor in recording.tensors]))
        if kind.masks.have_restarted():
            self._give_up(_PACKED)
        return result

    @property
    def kept_bytes(self) -> int:
        """Bytes of the GPU that recordings keep for themselves, which torch does not count as allocated."""
        return 0 if self._recorder is None else self._recorder.kept_bytes

    @property
    def num_recordings(self) -> int:
        """Kinds of calls that are recorded."""
        return sum(kind.recording is not None for kind in self._kinds.values())

    def release(self) -> None:
        """Drop the recordings; torch may keep some of their memory. Later calls run unrecorded first, and are recorded
        anew.
        """
        self._forget()
        if self._recorder is not None:
            self._recorder.release()

    def _forget(self) -> None:
        self._kinds.clear()
        self._batches.clear()
        self._grads.release()

    def _run(self, batch: Any, tensors: Sequence[Tensor]) -> Any:
        result, found = self._computed(batch, tensors)
        copies = found if self._recorder is None else [tensor.clone() for tensor in found]
        return rebuilt(result, iter(copies))

    def _computed(self, batch: Any, tensors: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
        """The result of `compute`, and the tensors in it without autograd's graph."""
        args, kwargs = rebuilt(batch, iter(tensors))
        with self._grads.held():
            result = self._compute(*args, **kwargs)
        _, found = flattened(result, "what the step returns", takes_constants=False)
        found = [tensor.detach() for tensor in found]
        return rebuilt(result, iter(found)), found

    def _run_of_kind(self, kind: _StepKind, states: bytes, batch: Any, tensors: Sequence[Tensor]) -> Any:
        if self._recorder is None:  # recording has just failed
            return self._run(batch, tensors)
        before = self._grads.notes()
        waits: list[str] | None = [] if kind.num_unrecorded else None  # a first call makes tables and the like
        masks = kind.masks.answering() if kind.num_unrecorded else kind.masks.looking()
        with self._recorder.beside(waits), masks:
            result = self._run(batch, tensors)
            self._grads.settle()
        kind.num_unrecorded += 1
        kind.change = self._grads.change_since(states, before)
        if waits:
            self._give_up(f"the step waits for the GPU at {waits[0]}{_WAITS}")
        elif kind.masks.have_restarted():
            self._give_up(_PACKED)
        return result

    def _give_up(self, problem: str, cause: Exception | None = None) -> None:
        """Raise, or go on unrecorded from the next call on."""
        self._forget()
        problem = f'{problem}. on_error="warn" goes on unrecorded'
        if not self._goes_on:
            raise RecordingError(problem) from cause
        logger.warning("%s", problem)
        recorder, self._recorder = self._recorder, None
        with suppress(RuntimeError):  # torch does not always free memory behind a broken recording
            if recorder is not None:
                recorder.release()

    def _places(self, kind_of_batch: Hashable, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The batch where recordings read it."""
        places = self._batches.get(kind_of_batch)
        if places is None:
            places = [torch.empty_like(tensor, device=self._device) for tensor in tensors]
            self._batches[kind_of_batch] = places
        for place, tensor in zip(places, tensors, strict=True):
            place.copy_(tensor, non_blocking=True)
        return places

    def _surroundings(self) -> Hashable:
        """What else decides which kernels run."""
        device = self._device.type
        return (
            torch.is_grad_enabled(),
            torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device),
            bytes([module.training for module in self._modules]),
        )

    def _may_record(self, kind: _StepKind, states: bytes) -> bool:
        if kind.change is None or kind.num_unrecorded < self._warmup_steps:
            return False
        return self._grads.fits(states, kind.change) and all(history.is_settled for history in self._histories)

    def _facts(self) -> tuple[list[int], list[int]]:
        """What recordings depend on, on the host: addresses, and how many casts of each history have a scale."""
        return self._grads.addresses, [history.num_known for history in self._histories]

    def _follow_facts(self) -> None:
        """Drop recordings of memory that is out of use (storage was widened, or a parameter's data exchanged), and of
        casts that have their first delayed scale now. They run unrecorded once at least."""
        before, self._known = self._known, self._facts()
        if self._known == before:
            return
        has_moved = self._known[0] != before[0]
        if self.num_recordings:
            what = "weights or gradients have moved" if has_moved else "more casts have delayed scales"
            logger.info("%s: steps are recorded anew", what)
            self.release()
        if has_moved:
            self._kinds.clear()
        for kind in self._kinds.values():
            kind.num_unrecorded = min(kind.num_unrecorded, self._warmup_steps - 1)

    def _record(self, kind: _StepKind, states: bytes, batch: Any, places: Sequence[Tensor]) -> None:
        """Record a kind. Gradients are as before: nothing has run."""
        assert self._recorder is not None
        for history in self._histories:
            history.keep_addresses()
        before, buffers = self._grads.notes(), self._buffers()

        def compute() -> tuple[Any, list[Tensor]]:
            with kind.masks.answering():
                found = self._computed(batch, places)
            self._grads.settle(is_recording=True)
            return found

        torch.clear_autocast_cache()  # else a cast made outside would be the recording's weight for good
        try:
            with _no_saved_random_numbers():
                ((launch, (result, tensors)),) = self._recorder.record(compute)
            self._check_addresses(buffers)
        except Exception as error:
            self._grads.restore(before)
            self._give_up(f"recording the step failed: {_advice(error)}", error)
            return
        finally:
            torch.clear_autocast_cache()
        kind.recording = _Recording(launch, result, tensors, self._grads.change_since(states, before))
        self._grads.restore(before)  # nothing has run yet
        logger.info("recorded a step; recordings keep %.2f GiB", self._recorder.kept_bytes / 2**30)

    def _buffers(self) -> dict[str, Tensor]:
        return dict(self._model.named_buffers())

    def _check_addresses(self, buffers: dict[str, Tensor]) -> None:
        """Check that the recording has written in place."""
        now = self._buffers()
        moved = sorted(name for name in {*buffers, *now} if _address(buffers.get(name)) != _address(now.get(name)))
        if moved:
            raise UserError(f"forward replaces the buffer {moved[0]}: write to it in place (copy_, add_)")
        if self._grads.addresses != self._known[0]:
            raise UserError("the step moved a parameter or the storage of gradients: do so between steps")

    def _warn_of_many(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "more than max_recordings(%d) kinds of steps: others run unrecorded. Give batches few shapes "
                "(padding, drop_last=True), and numbers that change as tensors",
                self._max_recordings,
            )


def record_step(
    compute: Callable[..., Any],
    model: torch.nn.Module,
    *,
    warmup_steps: int = 3,
    max_recordings: int = 8,
    on_error: Literal["raise", "warn"] = "raise",
    generators: Sequence[torch.Generator] = (),
) -> RecordedStep:
    """`compute`, which does forward and backward, as a CUDA graph: for models whose kernels the host cannot launch in
    time.

    Call the result in place of `compute`, with batches (tensors in dicts, lists, tuples, dataclasses). Whatever reads
    or updates ``p.grad`` stays outside: clipping, the optimizer, ``zero_grad``, the schedule. On a CPU nothing is
    recorded.

    Over replicas of `initialize` a call adds gradients on its rank, as inside of ``optimizer.no_sync()``. What reads
    them, and the optimizer's step, send their sum.

    Example:
        >>> def compute(x, y):
        ...     loss = torch.nn.functional.mse_loss(model(x), y)
        ...     loss.backward()
        ...     return loss
        >>> step = fp8_megatron.record_step(compute, model)

    Args:
        compute: returns tensors, in dicts, lists, tuples, dataclasses, or None. It must not wait for the GPU. Python in
            it runs only when a call is not a launch.
        model: the module whose parameters `compute` gives gradients, of `initialize` or not. All on one device.
        warmup_steps: unrecorded calls before each recording, at least 2. The last ones must not wait for the GPU.
        max_recordings: kinds of calls that are recorded: shapes of the batch, constants in it, whether gradients are
            added to others, autocast, ``training``. Calls of other kinds run unrecorded.
        on_error: what to do if a recording fails: raise a `RecordingError`, or warn and go on unrecorded.
        generators: generators on the GPU that `compute` draws from, beside the default one.

    Raises:
        UserError: an argument is wrong, or torch's wrappers share the model among ranks.
    """
    if not callable(compute):
        raise UserError(f"compute is a {type(compute).__name__}: give a function that does forward and backward")
    if not isinstance(model, torch.nn.Module):
        raise UserError(f"model is a {type(model).__name__}: give the torch.nn.Module that compute trains")
    for name, number, least in (("warmup_steps", warmup_steps, 2), ("max_recordings", max_recordings, 1)):
        if number < least:
            raise UserError(f"{name}({number}) is less than {least}")
    if on_error not in ("raise", "warn"):
        raise UserError(f"on_error({on_error!r}) is neither raise nor warn")
    _check_model(model)
    device = next(model.parameters()).device
    recorder = CudaRecorder(device, lambda: generators) if device.type == "cuda" else None
    return RecordedStep(
        compute,
        model,
        recorder,
        warmup_steps=warmup_steps,
        max_recordings=max_recordings,
        on_error=on_error,
    )


def _check_model(model: torch.nn.Module) -> None:
    devices = {param.device for param in model.parameters()}
    if len(devices) != 1:
        found = ", ".join(sorted(map(str, devices))) or "none, because it has no parameters"
        raise UserError(f"record_step takes a model on one device; this one's are {found}")
    for name, module in model.named_modules():
        shared = [base.__name__ for base in type(module).__mro__ if _is_shared(base)]
        if shared:
            raise UserError(f"{name or 'the model'} is a {shared[0]}: {_OWN_REPLICAS}")
    owns = {name: param.main_grad for name, param in model.named_parameters() if hasattr(param, "main_grad")}
    for name, own in owns.items():
        if not isinstance(own, ParamGrad):
            raise UserError(f"something else than initialize stores the gradient of {name}: {_OWN_REPLICAS}")
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    ranks = torch.distributed.get_world_size() if is_distributed else 1
    if ranks > 1 and not any(own.buffer.space.replicas.size > 1 for own in owns.values()):
        raise UserError(f"torch.distributed has {ranks} ranks, which share no gradient of this model: {_OWN_REPLICAS}")


@contextmanager
def _no_saved_random_numbers() -> Iterator[None]:
    """Make `torch.utils.checkpoint` refuse to save random numbers in the block.

    In a recording torch saves and restores where they began, without those drawn since then, and says nothing: a
    recomputed dropout would draw others than the forward.
    """

    def refuse(*args: Any) -> Any:
        raise UserError(
            "torch.utils.checkpoint saves the state of random numbers, which a recording cannot: give it "
            "preserve_rng_state=False where nothing is drawn"
        )

    before = torch.utils.checkpoint.get_device_states
    torch.utils.checkpoint.get_device_states = refuse
    try:
        yield
    finally:
        torch.utils.checkpoint.get_device_states = before


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _is_shared(kind: type) -> bool:
    return kind.__name__ in _SHARED and kind.__module__.startswith("torch.")


_OWN_REPLICAS = (
    "record_step takes a model that one rank trains alone, or one of initialize whose replicas have no other wrapper: "
    "call compute itself here"
)
_PACKED = (
    "positions restart inside of a row: the batch has packed sequences, and the first one of this kind had none. The "
    "last steps attended across sequences. Pack all batches, or give them an attention mask"
)
_WAITS = (
    " (.item(), .cpu(), print, if tensor), copies from the host (torch.tensor(…, device='cuda')), or has a shape that "
    "depends on values (x[mask], nonzero)"
)


def _advice(error: Exception) -> str:
    """What failed, in a line, and what to change."""
    text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    if isinstance(error, UserError):
        return text
    if isinstance(error, torch.OutOfMemoryError):
        return f"{text}. A recording keeps the memory of its activations for itself: take smaller batches"
    return f"{text}. The traceback ends in a line that waits for the GPU{_WAITS}"
