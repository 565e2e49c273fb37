"""What a recording asks of CUDA, which is played by Python."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from fp8_megatron.graphs import recorder as graphs

DEVICE = torch.device("cuda", 0)


class Cuda:
    """Notes what is called. Ending a capture fails if the block in it has."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.pools = 0
        self.reserved = 100
        self.sync_mode: Any = 0
        self.ends: list[str] = []
        self.now = Stream("current", self)
        self.device_index = 0
        self.instantiated_on: list[int] = []
        self.default_generators = [Generator("default", self)]

    def CUDAGraph(self, *, keep_graph: bool) -> Any:
        assert keep_graph
        cuda = self

        class Graph:
            def register_generator_state(self, generator: str) -> None:
                cuda.calls.append(f"register {generator}")

            def raw_cuda_graph(self) -> int:
                return 0

            def instantiate(self) -> None:
                cuda.instantiated_on.append(cuda.current_device())

            def replay(self) -> None:
                cuda.calls.append("replay")

        return Graph()

    @contextmanager
    def graph(self, graph: Any, *, pool: str, capture_error_mode: str, stream: Any = None) -> Iterator[None]:
        self.calls.append(f"capture in {pool} on {stream}, {capture_error_mode}")
        self.reserved += 50
        try:
            yield
        except Exception:
            self.now = stream  # as torch leaves it
            raise RuntimeError("the capture was broken") from None

    def Stream(self, device: torch.device) -> Any:
        return Stream("own", self)

    @contextmanager
    def device(self, device: int) -> Iterator[None]:
        before, self.device_index = self.device_index, device
        yield
        self.device_index = before

    def current_device(self) -> int:
        return self.device_index

    def current_stream(self, device: torch.device) -> Any:
        return self.now

    def set_stream(self, stream: Any) -> None:
        self.now = stream

    def get_sync_debug_mode(self) -> Any:
        return self.sync_mode

    def set_sync_debug_mode(self, mode: Any) -> None:
        self.sync_mode = mode

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.calls.append(f"on {stream}")
        yield

    def graph_pool_handle(self) -> str:
        self.pools += 1
        return f"pool {self.pools}"

    def synchronize(self, device: torch.device) -> None:
        self.calls.append("synchronize")

    def empty_cache(self) -> None: ...

    def memory_reserved(self, device: torch.device) -> int:
        return self.reserved

    def memory_allocated(self, device: torch.device) -> int:
        return 30


class Generator:
    def __init__(self, name: str, cuda: Cuda) -> None:
        self.name, self.cuda = name, cuda

    def clone_state(self) -> str:
        return f"copy of {self.name}"

    def graphsafe_set_state(self, state: str) -> None:
        self.cuda.calls.append(f"{self.name} becomes {state}")

    def __str__(self) -> str:
        return self.name


class Stream:
    device_index = 0

    def __init__(self, name: str, cuda: Cuda) -> None:
        self.name, self.cuda = name, cuda

    def wait_stream(self, other: Stream) -> None:
        self.cuda.calls.append(f"{self} waits for {other}")

    def __str__(self) -> str:
        return self.name


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    cuda = Cuda()
    for name in [name for name in dir(Cuda) if not name.startswith("_")] + ["default_generators"]:
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    graphs._recording_stream.cache_clear()
    yield cuda
    graphs._recording_stream.cache_clear()


def test_a_recording(cuda: Cuda) -> None:
    recorder = graphs.CudaRecorder(DEVICE, lambda: [Generator(name, cuda) for name in "ab"])  # type: ignore[misc]
    ((launch, result),) = recorder.record(lambda: 3)
    assert result == 3 and recorder.kept_bytes == 50
    capture = "capture in pool 1 on own, thread_local"
    assert cuda.calls == ["synchronize", "register a", "register b", capture]
    launch()
    assert cuda.calls[-1] == "replay"
    recorder.record(lambda: 4, lambda: 5, before=lambda: cuda.calls.append("before"))
    again = ["before", "register a", "register b", capture]
    assert recorder.kept_bytes == 150 and cuda.calls[5:] == ["synchronize", *again, *again]
    recorder.release()
    recorder.record(lambda: 5)
    assert recorder.kept_bytes == 50 and "pool 2" in cuda.calls[-1]


def test_a_recording_is_made_ready_on_its_own_gpu(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is not always the current one. A kernel in a memset's place runs on the GPU that it was loaded for."""
    replaced_on: list[int] = []
    monkeypatch.setattr(graphs, "replace_memsets", lambda graph: replaced_on.append(cuda.current_device()))
    stream = Stream("own", cuda)
    stream.device_index = 3
    graphs.capture(lambda: None, "pool", stream)  # type: ignore[arg-type]
    assert replaced_on == cuda.instantiated_on == [3] and cuda.current_device() == 0


def test_work_beside_the_current_stream(cuda: Cuda) -> None:
    recorder = graphs.CudaRecorder(DEVICE)
    with pytest.raises(KeyError), recorder.beside():
        cuda.calls.append("work")
        raise KeyError
    assert cuda.calls == ["own waits for current", "on own", "work", "current waits for own"]


def test_recorders_share_a_stream(cuda: Cuda) -> None:
    recorders = [graphs.CudaRecorder(DEVICE) for _ in range(2)]
    assert recorders[0]._stream is recorders[1]._stream


def test_the_first_error_is_raised(cuda: Cuda) -> None:
    def compute() -> None:
        raise KeyError("first")

    with pytest.raises(KeyError, match="first") as caught:
        graphs.capture(compute, "pool", Stream("own", cuda))  # type: ignore[arg-type]
    assert caught.value.__cause__ is None


def test_a_broken_recording_leaves_stream_and_generators_as_they_were(cuda: Cuda) -> None:
    recorder = graphs.CudaRecorder(DEVICE, lambda: [Generator("a", cuda)])  # type: ignore[list-item]

    def compute() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        recorder.record(compute)
    assert str(cuda.now) == "current"
    assert cuda.calls[-2:] == ["default becomes copy of default", "a becomes copy of a"]
    assert recorder.kept_bytes == 0


def test_lines_that_wait_are_noted(cuda: Cuda) -> None:
    recorder = graphs.CudaRecorder(DEVICE)
    waits: list[str] = []
    with pytest.warns(UserWarning, match="mine") as seen, recorder.beside(waits):
        assert cuda.sync_mode == "warn"
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("mine", stacklevel=1)
    assert len(waits) == 1 and waits[0].startswith(__file__) and len(seen) == 1
    assert cuda.sync_mode == 0
    cuda.sync_mode = 2  # the user's
    with recorder.beside(waits):
        assert cuda.sync_mode == 2
    assert len(waits) == 1
