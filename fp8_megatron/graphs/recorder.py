"""What the host launches, recorded as CUDA graphs: the trainer's steps, and those of `record_step`."""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, TypeVar

import torch

from .memsets import replace_memsets

T = TypeVar("T")


class Recorder(Protocol):
    """What makes recordings: `CudaRecorder`.

    Attributes:
        kept_bytes: memory that the recordings keep, without the tensors that they handed out.
    """

    kept_bytes: int

    def beside(self, waits: list[str] | None = None) -> AbstractContextManager[None]:
        """Where work runs that will be recorded. `waits` receives the lines at which it waits for the device."""

    def record(
        self, *computes: Callable[[], T], before: Callable[[], None] = ...
    ) -> Sequence[tuple[Callable[[], None], T]]:
        """Record each of `computes`: what launches it, and its result. `before` is called in front of each."""

    def forget(self) -> None:
        """Nothing refers to the recordings any more."""

    def release(self) -> None:
        """`forget`, and free their memory; waits for the device."""


def capture(
    compute: Callable[[], T], pool: Any, stream: torch.cuda.Stream, generators: Sequence[torch.Generator] = ()
) -> tuple[torch.cuda.CUDAGraph, T]:
    """Record what `compute` launches; nothing runs. Returns the graph and the result of `compute`, at fixed addresses.

    Args:
        pool: memory that recordings share (`torch.cuda.graph_pool_handle`).
        stream: to record on.
        generators: random generators that `compute` draws from, beside the device's own.

    Raises:
        Exception: the error of `compute`. Ending the broken recording raises a second one, which is dropped.
    """
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    for generator in generators:
        graph.register_generator_state(generator)
    first: Exception | None = None
    try:
        # Meanwhile loaders pin memory and watches query events, so only this thread's calls may break the capture.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            try:
                result = compute()
            except Exception as error:
                first = error
                raise
        with torch.cuda.device(stream.device_index):
            replace_memsets(graph.raw_cuda_graph())
            graph.instantiate()
    except Exception as error:
        raise (first or error) from None
    return graph, result


def make_room(device: torch.device) -> None:
    """Give a recording the memory that the allocator keeps from earlier work; waits for the device."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()


def reserved_beside_tensors(device: torch.device) -> int:
    """Bytes that the allocator holds without a tensor in them. Recordings raise it by what they keep."""
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


@functools.cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all recorders of a device: libraries keep a workspace for every stream that they have seen."""
    return torch.cuda.Stream(device)


class CudaRecorder:
    """Records work of one device on a stream beside the current one. All recordings share their memory.

    Args:
        generators: returns the random generators that recorded work draws from, beside the device's own.
    """

    def __init__(self, device: torch.device, generators: Callable[[], Sequence[torch.Generator]] = lambda: ()) -> None:
        self.device = device
        self.kept_bytes = 0
        self._generators = generators
        self._stream = _recording_stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def beside(self, waits: list[str] | None = None) -> Iterator[None]:
        """Run the block on the recorder's stream, behind and in front of the current stream's work.

        What runs before a recording of any loop runs there: torch ties a parameter's gradient to the stream of its
        first use.

        Args:
            waits: receives the lines at which the host waits for the device, which a recording cannot.
        """
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream), nullcontext() if waits is None else _noting(waits):
                yield
        finally:
            current.wait_stream(self._stream)

    def record(
        self, *computes: Callable[[], T], before: Callable[[], None] = lambda: None
    ) -> list[tuple[Callable[[], None], T]]:
        """See `Recorder.record`. Nothing runs. All are recorded at once: a later recording might find no room."""
        make_room(self.device)
        free_before = reserved_beside_tensors(self.device)
        recordings = []
        for compute in computes:
            before()
            recordings.append(self._record(compute))
            gc.collect()  # frees what the recording has left for the next one
        self.kept_bytes += max(0, reserved_beside_tensors(self.device) - free_before)
        return recordings

    def _record(self, compute: Callable[[], T]) -> tuple[Callable[[], None], T]:
        current, generators = torch.cuda.current_stream(self.device), self._generators()
        try:
            graph, result = capture(compute, self._pool, self._stream, generators)
        finally:
            if torch.cuda.current_stream(self.device) != current:  # torch leaves a broken recording's
                torch.cuda.set_stream(current)
                for generator in (torch.cuda.default_generators[current.device_index], *generators):
                    generator.graphsafe_set_state(generator.clone_state())  # else it waits for the recording's end
        return graph.replay, result

    def forget(self) -> None:
        """See `Recorder.forget`. Later recordings have memory of their own: torch takes no pool again whose recordings
        are gone.
        """
        self._pool = torch.cuda.graph_pool_handle()
        self.kept_bytes = 0

    def release(self) -> None:
        """See `Recorder.release`."""
        self.forget()
        make_room(self.device)


@contextmanager
def _noting(waits: list[str]) -> Iterator[None]:
    """Note the lines at which the host waits for the device, by torch's warnings. Other warnings go on."""
    before = torch.cuda.get_sync_debug_mode()
    if before:  # the user has asked for warnings or errors
        yield
        return
    caught: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
        for warning in caught:
            if "synchronizing CUDA operation" in str(warning.message):
                waits.append(f"{warning.filename}:{warning.lineno}")
            elif "Synchronization debug mode" not in str(warning.message):  # torch's warning of this mode
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
