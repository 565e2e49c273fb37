"""Profiles of a few steps: a trace, and a table of their kernels."""

from __future__ import annotations

import json
import logging
import math
import re
from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..config.schema import ProfileConfig
from .report import Output, write_report

logger = logging.getLogger(__name__)

#: Category of a kernel by a pattern of its name; the first match counts. The names of cuBLASLt's nvjet kernels have a
#: letter for each operand's type: q E4M3, r E5M2, t 16 bits.
_CATEGORIES = (
    ("communication", r"nccl|memcpy peer|memcpy ptop|barrier_kernel"),
    ("attention", r"flash|fmha|sdpa|compute_dot_do_o|convert_dq_to"),
    ("FP8 GEMM", r"nvjet_sm\d+_(qq|qr|rq)|(gemm|cutlass).*(e4m3|e5m2|fp8)|_grouped_(rows|wgrad)|block_scaled_gemm"),
    ("16-bit GEMM", r"gemm|nvjet|cutlass|splitkreduce|cublas"),
    ("gradient storage", r"^_quantize_blocks|_dequantize_blocks|_accumulate_rows|_count_underflow"),
    (
        "quantise, norm, activation",
        r"_quantize|_requantize|_cast_|_transpose_tiles|_partial_amax|_amax_and|_finish_amax|_norm_|_activat(e|ion)",
    ),
    ("grouped rows", r"_count_rows|_place_rows|_gather_(words|tiles|blocks)|_sum_token_rows"),
    ("loss", r"_cross_entropy"),
    ("optimizer", r"_adamw|_momentum_step|_orthogonal_|_derive_fp8|_partial_squares|_squared_norm"),
    ("copies", r"memcpy|memset|fill_words|copy_kernel|direct_copy|catarray"),
)


@dataclass(frozen=True)
class KernelTime:
    """One kernel over the profiled steps."""

    name: str
    category: str
    calls_per_step: float
    ms_per_step: float


@dataclass(frozen=True)
class StepTimes:
    """Device time of a step in ms, from the first kernel to the last on any stream.

    Attributes:
        compute: a kernel other than communication runs.
        exposed_communication: only communication runs, or waits for another rank.
        idle: nothing runs.
    """

    span: float
    compute: float
    exposed_communication: float
    idle: float


@dataclass(frozen=True)
class IdleGap:
    """Times at which nothing runs on any stream, between the ends of kernels of one name and the starts of another.

    Attributes:
        after, before: the kernels' names.
    """

    after: str
    before: str
    times_per_step: float
    ms_per_step: float


class StepProfiler:
    """Runs `torch.profiler` over steps [step_start, step_end) of a run and writes the results into `folder`.

    Files, per profiled rank R: ``profile_rankR.json`` (`StepTimes`, every `KernelTime` and every `IdleGap`),
    ``profile_rankR.txt`` (a table) and, if asked for, ``trace_rankR.json.gz`` for Perfetto. What cannot be written is
    logged, and training goes on.

    Args:
        left_out: iterations that the run leaves out. For these, `before` and `after` are not called.
    """

    def __init__(self, config: ProfileConfig, folder: Path, *, rank: int, left_out: Container[int] = ()) -> None:
        ranks = list(map(int, config.profile_ranks))
        self._first_and_last = config.first_and_last(left_out) if config.profile and rank in ranks else None
        self._tells = rank == min(ranks)
        self._config = config
        self._folder = folder
        self._rank = rank
        self._num_steps = 0
        self._profiler: torch.profiler.profile | None = None

    def begin(self, step: int) -> None:
        """Call before the first step of a session, which goes on after `step`. The first of the ranks asked for warns
        if that is too late.
        """
        if self._tells and self._first_and_last is not None and self._first_and_last[0] <= step:
            logger.warning(
                "no step is profiled: profile_step_start(%d) was before this session; choose %d or more",
                self._config.profile_step_start,
                step + 1,
            )

    def before(self, step: int) -> None:
        """Call before every step. Starts the profiler at the first profiled step."""
        if self._first_and_last is None:
            return
        if step == self._first_and_last[0]:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                torch.cuda.synchronize()
                activities = [torch.profiler.ProfilerActivity.CUDA]
                if self._config.profile_trace:
                    activities.append(torch.profiler.ProfilerActivity.CPU)
            self._profiler = torch.profiler.profile(activities=activities)
            self._profiler.start()
        self._num_steps += self._profiler is not None

    def after(self, step: int) -> None:
        """Call after every step. After the last profiled one, stops, waits for the device and writes files."""
        if self._profiler is not None and self._first_and_last is not None and step == self._first_and_last[1]:
            self._stop_and_write(self._profiler)

    def finish(self, step: int) -> None:
        """Call when the run has ended after `step`. If that was too early, writes what was profiled, and warns."""
        if self._first_and_last is None:
            return
        if self._profiler is not None:
            if self._tells:
                logger.warning("steps profiled: %d; the run ended after step %d", self._num_steps, step)
            self._stop_and_write(self._profiler)
        elif self._tells and step < self._first_and_last[0]:
            logger.warning(
                "no step is profiled: the run ended after step %d, before profile_step_start(%d)",
                step,
                self._config.profile_step_start,
            )

    def _stop_and_write(self, profiler: torch.profiler.profile) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        profiler.stop()
        self._profiler = None
        events = list(profiler.events() or [])
        kernels, times = kernel_times(events, self._num_steps), step_times(events, self._num_steps)
        gaps = idle_gaps(events, self._num_steps)
        stem = f"profile_rank{self._rank}"
        figures = {"step": asdict(times), "kernels": list(map(asdict, kernels)), "idle": list(map(asdict, gaps))}
        write_report(self._folder / f"{stem}.json", json.dumps(figures, indent=1).encode())
        write_report(self._folder / f"{stem}.txt", f"{kernel_table(kernels, times, gaps)}\n".encode())
        if self._config.profile_trace:
            trace = self._folder / f"trace_rank{self._rank}.json.gz"
            with Output(trace).writing():
                profiler.export_chrome_trace(str(trace))


def category_of(name: str) -> str:
    """Category of a kernel by its name; ``other`` if no pattern matches."""
    return next((category for category, pattern in _CATEGORIES if re.search(pattern, name, re.IGNORECASE)), "other")


def kernel_times(events: Iterable[Any], num_steps: int) -> list[KernelTime]:
    """Kernels in `torch.profiler` events by name, longest first; operators if nothing ran on a device."""
    events = list(events)
    on_device = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    microseconds: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for event in on_device or events:
        microseconds[event.name] += event.device_time_total if on_device else event.self_cpu_time_total
        calls[event.name] += 1
    return sorted(
        (
            KernelTime(name, category_of(name), calls[name] / num_steps, time / 1e3 / num_steps)
            for name, time in microseconds.items()
        ),
        key=lambda kernel: -kernel.ms_per_step,
    )


def step_times(events: Iterable[Any], num_steps: int) -> StepTimes:
    """`StepTimes` of `torch.profiler` events over `num_steps` steps; zeros if nothing ran on a device."""
    intervals: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in events:
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times = (event.time_range.start, event.time_range.end)
            intervals[category_of(event.name) == "communication"].append(times)
    every = intervals[True] + intervals[False]
    if not every:
        return StepTimes(0.0, 0.0, 0.0, 0.0)
    span = max(end for _, end in every) - min(start for start, _ in every)
    compute, busy = _covered(intervals[False]), _covered(every)
    return StepTimes(*(us / 1e3 / num_steps for us in (span, compute, busy - compute, span - busy)))


def idle_gaps(events: Iterable[Any], num_steps: int) -> list[IdleGap]:
    """Where nothing runs on the device, by the kernels around it, longest first."""
    on_device = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    on_device.sort(key=lambda event: event.time_range.start)
    microseconds: dict[tuple[str, str], float] = defaultdict(float)
    times: dict[tuple[str, str], int] = defaultdict(int)
    last = None
    for event in on_device:
        if last is not None and event.time_range.start > last.time_range.end:
            microseconds[last.name, event.name] += event.time_range.start - last.time_range.end
            times[last.name, event.name] += 1
        if last is None or event.time_range.end > last.time_range.end:
            last = event
    gaps = [IdleGap(*pair, times[pair] / num_steps, us / 1e3 / num_steps) for pair, us in microseconds.items()]
    return sorted(gaps, key=lambda gap: -gap.ms_per_step)


def _covered(intervals: list[tuple[float, float]]) -> float:
    """Total length of the union of the intervals."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def kernel_table(
    kernels: list[KernelTime], times: StepTimes, gaps: Sequence[IdleGap] = (), *, longest: int = 40, most_gaps: int = 12
) -> str:
    """Time by category, then the longest kernels, in ms per step; streams are added up. Then where nothing runs."""
    total = sum(kernel.ms_per_step for kernel in kernels)
    by_category: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        by_category[kernel.category] += kernel.ms_per_step
    lines = []
    if times.span:
        lines += [
            f"{times.span:10.2f} ms from a step's first kernel to its last: {times.compute:.2f} compute, "
            f"{times.exposed_communication:.2f} communication beside none, {times.idle:.2f} idle"
        ]
    lines += [f"{total:10.2f} ms a step in kernels, all streams added up", ""]
    lines += [
        f"{ms:10.2f} ms {100 * ms / total:5.1f}%  {category}"
        for category, ms in sorted(by_category.items(), key=lambda item: -item[1])
    ]
    lines += ["", f"{'ms a step':>10} {'calls':>7} {'us a call':>9}  kernel"]
    lines += [
        f"{k.ms_per_step:10.2f} {k.calls_per_step:7.1f} {1e3 * k.ms_per_step / k.calls_per_step:9.1f}  {k.name[:110]}"
        for k in kernels[:longest]
    ]
    if gaps:
        lines += ["", f"{'ms a step':>10} {'times':>7} {'us each':>9}  idle after a kernel, before another"]
    lines += [
        f"{gap.ms_per_step:10.2f} {gap.times_per_step:7.1f} {1e3 * gap.ms_per_step / gap.times_per_step:9.1f}  "
        f"{gap.after[:54]} | {gap.before[:54]}"
        for gap in gaps[:most_gaps]
    ]
    return "\n".join(lines)
