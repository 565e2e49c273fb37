"""How `kernels.py` measures and records times."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

_CALLS_PER_RUN = 12
#: Number of runs for the median. Slow kernels scatter less and get fewer runs.
_LEAST_RUNS, _MOST_RUNS = 5, 15
_SECONDS_PER_ROW = 0.1
_HOST_RUNS, _CALLS_PER_HOST_RUN = 5, 20


@dataclass(frozen=True)
class Case:
    """Something to time. `call` takes the number of the call and picks its inputs by it.

    Bytes are those of the algorithm, each operand's reads and writes counted; a GEMM has operations instead.
    """

    name: str
    call: Callable[[int], object]
    num_bytes: float | None = None
    num_flops: float | None = None


@dataclass
class Row:
    """One measurement, or why there is none."""

    section: str
    name: str
    microseconds: float | None = None
    floor_microseconds: float | None = None
    gb_per_s: float | None = None
    tflop_per_s: float | None = None
    host_microseconds: float | None = None
    error: str | None = None


def seconds_per_call(call: Callable[[int], object], *, graph: bool = True) -> float:
    """Median over runs of `call(0)`, `call(1)`, … of their time, divided by their number."""

    def run() -> None:
        for index in range(_CALLS_PER_RUN):
            call(index)

    run()
    torch.cuda.synchronize()
    replay = _captured(run) if graph else run
    replay()
    times: list[float] = []
    while len(times) < _LEAST_RUNS or (len(times) < _MOST_RUNS and sum(times) * _CALLS_PER_RUN < _SECONDS_PER_ROW):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3 / _CALLS_PER_RUN)
    return statistics.median(times)


def _captured(run: Callable[[], None]) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    # An older graph that is collected during the capture would end it.
    gc.collect()
    gc.disable()
    try:
        with torch.cuda.graph(graph):
            run()
    finally:
        gc.enable()
    return graph.replay


def host_seconds_per_call(call: Callable[[int], object]) -> float:
    """Host time of a call, from few enough calls that the launch queue does not fill."""
    times = []
    for _ in range(_HOST_RUNS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for index in range(_CALLS_PER_HOST_RUN):
            call(index)
        times.append((time.perf_counter() - start) / _CALLS_PER_HOST_RUN)
    torch.cuda.synchronize()
    return statistics.median(times)


def reason(error: Exception) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


class Bench:
    """Measures cases against the copy bandwidth that it measures first. A failed case becomes a row with its error."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        source = torch.randn(2**30, device="cuda", dtype=torch.bfloat16)
        target = torch.empty_like(source)
        num_bytes = 2 * source.numel() * source.element_size()
        # Outside a graph: a captured copy took 1.5 times as long.
        seconds = seconds_per_call(lambda _: target.copy_(source), graph=False)
        self.copy_bytes_per_second = num_bytes / seconds
        self.rows.append(Row("copy", "device copy, 2 GiB", seconds * 1e6, seconds * 1e6, num_bytes / seconds / 1e9))

    def measure(self, section: str, cases: Iterable[Case]) -> None:
        """Time each case as it is made; an error in making one ends the section with a row of its own."""
        try:
            for case in cases:
                try:
                    self.rows.append(self._row(section, case))
                except Exception as error:
                    self.rows.append(Row(section, case.name, error=reason(error)))
        except Exception as error:
            self.rows.append(Row(section, f"{section}: the rest", error=reason(error)))
        torch.cuda.empty_cache()

    def _row(self, section: str, case: Case) -> Row:
        seconds = seconds_per_call(case.call)
        row = Row(section, case.name, seconds * 1e6)
        if case.num_bytes is not None:
            row.floor_microseconds = case.num_bytes / self.copy_bytes_per_second * 1e6
            row.gb_per_s = case.num_bytes / seconds / 1e9
            row.host_microseconds = host_seconds_per_call(case.call) * 1e6
        if case.num_flops is not None:
            row.tflop_per_s = case.num_flops / seconds / 1e12
        return row


class Rotating:
    """Copies of an input that together are four times as large as L2: `inputs(i)` is call i's."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        first = make()
        number = 2
        if first.device.type == "cuda":
            l2 = torch.cuda.get_device_properties(first.device).L2_cache_size
            number = min(_CALLS_PER_RUN, 1 + 4 * l2 // first.nbytes)
        self.copies = [first] + [make() for _ in range(number - 1)]

    def __call__(self, index: int) -> Tensor:
        return self.copies[index % len(self.copies)]
