"""Measure the host's time for a linear layer: `python benchmarks/layer_overhead.py`.

A stack of small layers runs forward and backward under torch, and at each level of `fp8_megatron.initialize`. With a
GPU: the time to queue a layer's kernels, launches included; they are small, so they finish before the host queues the
next ones. Without a GPU, or with ``--no-op``: the time without the launches themselves, which do nothing. That needs
Triton, which compiles the kernels for a Hopper GPU that need not be there.

Times are CPU seconds of this thread in forward. In backward, where autograd has a thread of its own for a GPU, they are
elapsed seconds there. Each is the minimum over steps. "queue" is the part of both in launch lists, which allocate and
launch; "lists refused" counts calls that a list left to Python.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

# Run as a script from a clone, installed or not.
sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.provenance import device_name, write_rows
from fp8_megatron import initialize
from fp8_megatron.commands.arguments import Parser, output_file
from fp8_megatron.commands.program import exit_status
from fp8_megatron.kernels import extension, launch_list, ops, registration
from fp8_megatron.kernels.gemm import cublaslt
from fp8_megatron.nn import local

_LAYERS, _HIDDEN, _BATCH, _SEQUENCE = 8, 64, 4, 16
_WARM_UP_STEPS, _STEPS = 5, 200
_NO_DEVICE = -1  # what a CPU tensor says of itself
RUNS = (("bf16", None), *((level, recipe) for level in ("O2", "O3") for recipe in ("tensorwise", "delayed")))


@dataclass(frozen=True)
class Row:
    """One kind of layer: microseconds of the host; of both directions in launch lists; calls that lists refused."""

    level: str
    recipe: str | None
    forward_us: float
    backward_us: float
    queue_us: float
    num_refused: int
    name: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", f"{self.level} {self.recipe or ''}".rstrip())


class _NoLauncher:
    """In place of the launcher of a compiled kernel."""

    def __init__(self, source: object, metadata: object) -> None:
        del source, metadata

    def __call__(self, *arguments: object) -> None: ...


def leave_launches_out() -> None:
    """Make launches of Triton and cuBLASLt do nothing, and CPU tensors take the path of a GPU's. Permanent."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    utils = SimpleNamespace(
        load_binary=lambda *arguments: (1, 1, 0, 0, 1024),
        get_device_properties=lambda device: {"max_shared_mem": 227 * 1024},
    )
    driver.set_active(
        SimpleNamespace(
            launcher_cls=_NoLauncher,
            utils=utils,
            get_current_device=lambda: _NO_DEVICE,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
        )
    )
    torch._C._cuda_getDevice = lambda: _NO_DEVICE  # type: ignore[attr-defined]
    torch._C._cuda_getCurrentRawStream = lambda device: 0  # type: ignore[attr-defined]
    launch_list.MATMUL_ALIGNMENT = 16  # of memory on a CPU
    workspace = torch.empty(0)
    nothing = ctypes.cast(ctypes.CDLL(None).pthread_condattr_destroy, ctypes.c_void_p).value  # returns 0
    cublaslt.addresses = lambda: (nothing, nothing)  # type: ignore[assignment, return-value]
    extension.launch_kernel_address = lambda: nothing  # type: ignore[assignment, return-value]
    cublaslt._library = lambda: _NoCublasLt()  # type: ignore[assignment]
    cublaslt._MOST_TIMED = 0
    cublaslt._handle = lambda device: ctypes.c_void_p(1)  # type: ignore[assignment]
    cublaslt.workspace = lambda device, stream: workspace  # type: ignore[assignment]


class _NoCublasLt:
    """cuBLASLt whose calls succeed and do nothing; the heuristic finds one algorithm."""

    def cublasLtMatmulAlgoGetHeuristic(self, *arguments: Any) -> int:
        arguments[-1]._obj.value = 1
        return 0

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *arguments: 0


def gpu_variants() -> SimpleNamespace:
    """`registration.callables` for CPU tensors: the GPU variants, behind the same tests."""

    def callable_of(declared: registration.Operator) -> Callable[..., Any]:
        variant: Callable[..., Any] | None = None

        def call(first: Any, *others: Any) -> Any:
            nonlocal variant
            if type(first) is Tensor and not first.is_cuda and not torch.compiler.is_dynamo_compiling():
                variant = variant or declared.gpu_variant()
                return variant(first, *others)
            raise TypeError(f"{declared.name} of {type(first).__name__} is no operator of a linear layer")

        return call

    return SimpleNamespace(**{name: callable_of(declared) for name, declared in registration.operators().items()})


def measure(level: str, recipe: Any, *, no_op: bool) -> Row:
    """One kind of layer."""
    device = "cpu" if no_op else "cuda"
    specifications = ops._OPS
    layers = [torch.nn.Linear(_HIDDEN, _HIDDEN, dtype=torch.bfloat16, device=device) for _ in range(_LAYERS)]
    model: Any = torch.nn.Sequential(*layers)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = torch.randn(_BATCH, _SEQUENCE, _HIDDEN, dtype=torch.bfloat16, device=device, requires_grad=True)
    grad = torch.randn_like(x)
    if level != "bf16":
        model, optimizer = initialize(model, optimizer, opt_level=level, recipe=recipe)
        for _ in range(2):  # delayed scales are known after a step
            model(x).backward(grad)
            optimizer.step()
            optimizer.zero_grad()
        if no_op:
            ops._OPS, launch_list.first_device = gpu_variants(), _NO_DEVICE
    forward, backward, queue = [], [], []
    refused = _num_refused()
    for step in range(_WARM_UP_STEPS + 2 * _STEPS):
        if step == _WARM_UP_STEPS + _STEPS:
            timed = _time_lists()
        start = time.thread_time()
        y = model(x)
        forward.append(time.thread_time() - start)
        start = time.thread_time() if no_op else time.perf_counter()  # autograd has a thread for a GPU
        y.backward(grad)
        backward.append((time.thread_time() if no_op else time.perf_counter()) - start)
        optimizer.zero_grad()
        x.grad = None
        if step >= _WARM_UP_STEPS + _STEPS:
            queue.append(sum(timed))
            timed.clear()
        if not no_op:
            torch.cuda.synchronize()
    ops._OPS, launch_list.first_device = specifications, 0
    measured = slice(_WARM_UP_STEPS, _WARM_UP_STEPS + _STEPS)
    for lists in _lists():
        lists._known.clear()  # the timed ones
    times = (min(each) / _LAYERS * 1e6 for each in (forward[measured], backward[measured], queue))
    return Row(level, recipe, *times, _num_refused() - refused)


def _num_refused() -> int:
    return sum(lists.num_refused for lists in _lists())


def _lists() -> tuple[launch_list.LaunchLists, ...]:
    return local._forwards, local._products, local._backwards


def _time_lists() -> list[float]:
    """From now on, the seconds of every call of a list."""
    seconds: list[float] = []

    def timed(replay: launch_list.Replay) -> launch_list.Replay:
        def call(inputs: launch_list.Tensors) -> launch_list.Tensors | None:
            start = time.perf_counter()
            outputs = replay(inputs)
            seconds.append(time.perf_counter() - start)
            return outputs

        return call

    for lists in _lists():
        for key, known in lists._known.items():
            if not isinstance(known, int):
                lists._known[key] = timed(known)
    return seconds


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text."""
    lines = [f"{'':16} {'forward µs':>10} {'backward µs':>12} {'both µs':>8} {'queue µs':>9} {'lists refused':>14}"]
    for row in rows:
        both = row.forward_us + row.backward_us
        times = f"{row.forward_us:10.0f} {row.backward_us:12.0f} {both:8.0f} {row.queue_us:9.0f}"
        lines.append(f"{row.name:16} {times} {row.num_refused:14}")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> None:
    """Measure, print, and write the JSON if one is asked for."""
    parser = Parser(description=__doc__.split("\n\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--no-op", action="store_true", help="launches that do nothing, on a machine with a GPU too")
    parser.add_argument("--output", type=output_file, help="write the rows as JSON")
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)
    no_op = arguments.no_op or not torch.cuda.is_available()
    runs = RUNS
    if no_op:
        leave_launches_out()
        runs = tuple(run for run in RUNS if run[0] != "bf16")  # torch's own GEMM would run
    rows = [measure(level, recipe, no_op=no_op) for level, recipe in runs]
    print(table(rows))
    if arguments.output:
        device = "no-op launches" if no_op else device_name()
        write_rows(arguments.output, "benchmarks/layer_overhead.py", words, rows, device=device)


if __name__ == "__main__":
    sys.exit(exit_status(main))
