"""What the host launches, recorded as a CUDA graph."""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch

from .memsets import replace_memsets

T = TypeVar("T")


def capture(
    compute: Callable[[], T],
    pool: Any,
    *,
    generators: Sequence[torch.Generator] = (),
    stream: torch.cuda.Stream | None = None,
) -> tuple[torch.cuda.CUDAGraph, T]:
    """Record what `compute` launches; nothing runs. Returns the graph and the result of `compute`, at fixed addresses.

    Args:
        pool: memory that recordings share (`torch.cuda.graph_pool_handle`).
        generators: random generators that `compute` draws from, beside the device's own.
        stream: to record on; None: torch's for graphs.

    Raises:
        Exception: the error of `compute`. Ending the broken recording raises a second one, which is dropped.
    """
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    for generator in generators:
        graph.register_generator_state(generator)
    first: Exception | None = None
    chosen: dict[str, Any] = {} if stream is None else {"stream": stream}
    try:
        # Meanwhile loaders pin memory and watches query events, so only this thread's calls may break the capture.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local", **chosen):
            try:
                result = compute()
            except Exception as error:
                first = error
                raise
        with nullcontext() if stream is None else torch.cuda.device(stream.device_index):
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

    What runs before a recording runs on that stream, too: torch ties a parameter's gradient to the stream of its first
    use.

    Attributes:
        kept_bytes: memory that the recordings keep, without the tensors that they handed out.
    """

    def __init__(self, device: torch.device, generators: Sequence[torch.Generator] = ()) -> None:
        self.device = device
        self.kept_bytes = 0
        self._generators = generators
        self._stream = _recording_stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def beside(self, waits: list[str] | None = None) -> Iterator[None]:
        """Run the block on the recorder's stream, behind and in front of the current stream's work.

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

    def record(self, compute: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Record what `compute` launches; nothing runs. Returns what launches it, and the result of `compute`."""
        make_room(self.device)
        free_before = reserved_beside_tensors(self.device)
        current = torch.cuda.current_stream(self.device)
        try:
            graph, result = capture(compute, self._pool, generators=self._generators, stream=self._stream)
        finally:
            if torch.cuda.current_stream(self.device) != current:
                self._mend(current)
        gc.collect()
        self.kept_bytes += max(0, reserved_beside_tensors(self.device) - free_before)
        return graph.replay, result

    def _mend(self, current: torch.cuda.Stream) -> None:
        """Undo what torch leaves of a broken recording: its stream, and generators that wait for its end."""
        torch.cuda.set_stream(current)
        for generator in (torch.cuda.default_generators[current.device_index], *self._generators):
            generator.graphsafe_set_state(generator.clone_state())

    def release(self) -> None:
        """Free the memory of recordings that nothing refers to any more; waits for the device."""
        make_room(self.device)
        self._pool = torch.cuda.graph_pool_handle()  # torch takes no pool again whose recordings are gone
        self.kept_bytes = 0


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
