"""Profiles: kernels are told apart, times are a step's, files appear for the ranks asked for."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8_megatron.config.schema import ProfileConfig
from fp8_megatron.reporting.profiling import (
    IdleGap,
    StepProfiler,
    StepTimes,
    category_of,
    idle_gaps,
    kernel_table,
    kernel_times,
    step_times,
)


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("nvjet_sm90_qqtst_256x128_128x4_1x2_h_bz_coopA_bias_TNT", "FP8 GEMM"),
        ("nvjet_sm90_qrtst_128x160_128x5_2x1_v_bz_coopA_algo2_TNT", "FP8 GEMM"),
        ("nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_TNN", "16-bit GEMM"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26", "attention"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("_activation_backward_tiles", "quantise, norm, activation"),
        ("_quantize_grad_tiles", "quantise, norm, activation"),
        ("_norm_quantize", "quantise, norm, activation"),
        ("_quantize_blocks", "gradient storage"),
        ("_accumulate_rows", "gradient storage"),
        ("_grouped_rows", "FP8 GEMM"),
        ("_grouped_wgrad", "FP8 GEMM"),
        ("block_scaled_gemm", "FP8 GEMM"),
        ("_norm_quantize_blocks", "quantise, norm, activation"),
        ("_cast_blocks", "quantise, norm, activation"),
        ("_activate_backward", "quantise, norm, activation"),
        ("_gather_blocks", "grouped rows"),
        ("_gather_tiles", "grouped rows"),
        ("_sum_token_rows", "grouped rows"),
        ("_cross_entropy_backward", "loss"),
        ("_adamw_step", "optimizer"),
        ("_orthogonal_split_step", "optimizer"),
        ("_derive_fp8_weights", "optimizer"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("something_new", "other"),
    ],
)
def test_category_of(name: str, category: str) -> None:
    assert category_of(name) == category


def test_times_are_those_of_a_step() -> None:
    cuda = torch.autograd.DeviceType.CUDA
    events: list[Any] = [
        SimpleNamespace(name="a", device_type=cuda, device_time_total=2000.0),
        SimpleNamespace(name="a", device_type=cuda, device_time_total=4000.0),
        SimpleNamespace(name="_adamw_step", device_type=cuda, device_time_total=10000.0),
        SimpleNamespace(name="host", device_type=torch.autograd.DeviceType.CPU, self_cpu_time_total=1e9),
    ]
    longest, other = kernel_times(events, num_steps=2)
    assert (longest.name, longest.ms_per_step, longest.calls_per_step) == ("_adamw_step", 5.0, 0.5)
    assert (other.name, other.ms_per_step, other.calls_per_step) == ("a", 3.0, 1.0)
    table = kernel_table([longest, other], StepTimes(9.0, 6.0, 1.0, 2.0))
    assert "9.00 ms from a step's first kernel to its last: 6.00 compute, 1.00 communication beside none" in table
    assert "8.00 ms a step" in table and "62.5%  optimizer" in table


def event(name: str, start: float, end: float, on_device: bool = True) -> SimpleNamespace:
    """Of the profiler; times in microseconds."""
    kind = torch.autograd.DeviceType.CUDA if on_device else torch.autograd.DeviceType.CPU
    return SimpleNamespace(name=name, device_type=kind, time_range=SimpleNamespace(start=start, end=end))


def test_idle_gaps_are_named_by_the_kernels_around_them() -> None:
    """The kernel that ends last comes before a gap, not the one that starts last; time on other streams is not idle."""
    events = [
        event("norm", 4500.0, 5000.0),
        event("gemm", 0.0, 1000.0),
        event("copy", 1100.0, 3000.0),
        event("cast", 2000.0, 2500.0),  # beside the copy
        event("gemm", 3200.0, 4000.0),
        event("norm", 4100.0, 4500.0),  # and at once the next norm
        event("host", 0.0, 9000.0, on_device=False),
        event("gemm", 6000.0, 7000.0),
        event("norm", 7300.0, 7400.0),
    ]
    gaps = idle_gaps(events, num_steps=2)
    assert gaps == [
        IdleGap("norm", "gemm", 0.5, 0.5),
        IdleGap("gemm", "norm", 1.0, 0.2),
        IdleGap("copy", "gemm", 0.5, 0.1),
        IdleGap("gemm", "copy", 0.5, 0.05),
    ]
    assert sum(gap.ms_per_step for gap in gaps) == pytest.approx(step_times(events, num_steps=2).idle)
    kernels = kernel_times([SimpleNamespace(**vars(one), device_time_total=1.0) for one in events[:-3]], num_steps=2)
    table = kernel_table(kernels, step_times(events, num_steps=2), gaps, most_gaps=2).splitlines()
    assert table[-1].split() == ["0.20", "1.0", "200.0", "gemm", "|", "norm"] and "idle after" in table[-3]


@pytest.mark.parametrize(("ranks", "written"), [(("0",), True), (("1", "2"), False)])
def test_files_of_the_ranks_asked_for(tmp_path: Path, ranks: tuple[str, ...], written: bool) -> None:
    config = ProfileConfig(profile=True, profile_step_start=2, profile_step_end=4, profile_ranks=ranks)
    profiler = StepProfiler(config, tmp_path, rank=0)
    for step in range(1, 6):
        profiler.before(step)
        torch.ones(8) + 1
        profiler.after(step)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == ({"profile_rank0.json", "profile_rank0.txt"} if written else set())
    if written:
        kernels = json.loads((tmp_path / "profile_rank0.json").read_text())["kernels"]
        adds = [k for k in kernels if k["name"] == "aten::add"]
        assert [k["calls_per_step"] for k in adds] == [1.0]


def profiled(folder: Path, steps: Iterable[int], **settings: Any) -> float | None:
    """Profile a run of these steps, each with one addition; additions a step, None without a profile."""
    config = ProfileConfig(profile=True, **{"profile_step_start": 2, "profile_step_end": 5, **settings})
    profiler = StepProfiler(config, folder, rank=0, left_out={2, 4})
    profiler.begin(0)
    steps = [step for step in steps if step not in (2, 4)]
    for step in steps:
        profiler.before(step)
        torch.ones(8) + 1
        profiler.after(step)
    profiler.finish(steps[-1])
    path = folder / "profile_rank0.json"
    found = json.loads(path.read_text())["kernels"] if path.exists() else []
    return next((kernel["calls_per_step"] for kernel in found if kernel["name"] == "aten::add"), None)


def test_left_out_iterations_are_no_steps_of_a_profile(tmp_path: Path) -> None:
    """2 and 4 of 2, 3, 4 are left out: the profile begins later, ends earlier, and has one step."""
    assert profiled(tmp_path, range(1, 8)) == 1.0
    assert profiled(tmp_path, range(1, 8), profile_step_end=7) == 1.0, "3, 5 and 6"


def test_a_run_that_ends_early_says_what_was_profiled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert profiled(tmp_path, range(1, 6), profile_step_end=9) == 1.0
    assert "steps profiled: 2; the run ended after step 5" in caplog.text
    assert profiled(tmp_path / "none", range(1, 2)) is None
    assert "no step is profiled: the run ended after step 1, before profile_step_start(2)" in caplog.text
