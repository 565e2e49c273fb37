"""Every Triton kernel compiles for every GPU with FP8, on a machine that has none. `make test-triton` runs it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from fp8_megatron.graphs import memsets
from fp8_megatron.kernels import registration
from fp8_megatron.kernels.grouped import gemm_cuda
from tests.kernels.test_launch_options import MODULES
from tests.kernels.test_launch_options import launches as launches_in
from tests.kernels.test_operators import samples

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

#: Compute capability → bytes of shared memory that one block may take (CUDA C++ Programming Guide, table of technical
#: specifications): Ada, Hopper, and Blackwell for data centres and for desks.
GPUS = {89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
#: Launched from other kernels' wrappers at sizes that no sample has.
LARGE_SIZES_ONLY = {"_sum_partials"}

compile_kernel: Callable[..., Any] = JITFunction.run
OPERATORS = sorted(
    name
    for name, declared in registration.operators().items()
    if declared.gpu_module is not None and declared.gpu_module.endswith("triton")
)


class Launch(NamedTuple):
    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]


class Driver:
    """Triton's view of a machine with one GPU."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


@pytest.fixture(params=GPUS, ids=lambda capability: f"sm_{capability}")
def capability(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """That of a GPU which torch and Triton see."""
    capability: int = request.param
    major_minor = divmod(capability, 10)
    properties = SimpleNamespace(multi_processor_count=132, major=major_minor[0], minor=major_minor[1])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: major_minor)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(driver, "_active", Driver(capability))
    monkeypatch.setattr(gemm_cuda, "compiled_kernel", lambda *_: None)  # Triton's instead
    forget_gpus()
    return capability


def forget_gpus() -> None:
    """Empty the caches of what wrappers asked a GPU, and of what was compiled for it: each test has another."""
    names = [name for name in sys.modules if name.startswith("fp8_megatron") and name.endswith("triton")]
    for function in chain.from_iterable(vars(sys.modules[name]).values() for name in names):
        if isinstance(function, JITFunction):
            function.device_caches.clear()
        elif hasattr(function, "cache_clear"):
            function.cache_clear()


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """What is launched, instead of launching it."""
    seen: list[Launch] = []

    def run(kernel: Any, *arguments: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> None:
        seen.append(Launch(kernel, grid, arguments, options))

    monkeypatch.setattr(JITFunction, "run", run)
    return seen


@pytest.mark.parametrize("name", OPERATORS)
def test_kernels_compile(name: str, capability: int, launches: list[Launch]) -> None:
    variant = registration.operators()[name].gpu_variant()
    for sample in samples()[name]:
        variant(*sample)
    assert launches
    for kernel, grid, arguments, options in launches:
        compiled = compile_kernel(kernel, *arguments, grid=grid, warmup=True, **options)
        assert compiled.asm["cubin"]
        assert compiled.metadata.shared <= GPUS[capability], kernel.__name__


def test_samples_launch_every_kernel(launches: list[Launch], capability: int) -> None:
    arguments = samples()
    for name in OPERATORS:
        for sample in arguments[name]:
            registration.operators()[name].gpu_variant()(*sample)
    names = {name for module in MODULES for name, _ in launches_in(module)}
    assert names - {launch.kernel.__name__.rpartition(".")[2] for launch in launches} == LARGE_SIZES_ONLY


def test_the_kernel_of_short_memsets_assembles(capability: int, tmp_path: Path) -> None:
    from triton.backends.nvidia.compiler import get_ptxas

    source = tmp_path / "fill.ptx"
    source.write_bytes(memsets._PTX.rstrip(b"\0"))
    words = [get_ptxas(capability).path, f"--gpu-name=sm_{capability}", str(source), "-o", str(tmp_path / "fill.cubin")]
    subprocess.run(words, check=True, capture_output=True)
