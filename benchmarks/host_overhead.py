"""Measure the host's time for a call of each operator: `python benchmarks/host_overhead.py`.

With a GPU: the time to queue each operator's kernels, launches included. The size is small, so kernels finish before
the host queues the next ones. Without a GPU, or with `--no-op`: the time up to the kernels, which do nothing. Operands
then claim to be on a GPU, so a call takes the same path: the checks of `kernels.ops`, and the choice of the variant.

Times are CPU seconds of this thread, the minimum of several runs, so other programs on the machine matter little.
"""

from __future__ import annotations

import sys
import time
import timeit
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

# Run as a script from a clone, installed or not.
sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.provenance import device_name, write_rows
from fp8_megatron.activation_functions import Activation
from fp8_megatron.commands.arguments import Parser, output_file
from fp8_megatron.commands.program import exit_status
from fp8_megatron.dtypes import E4M3, E5M2, GRAD_BLOCK, STATE_BLOCK
from fp8_megatron.kernels import ops, registration

TOKENS, HIDDEN = 64, 128
NUMEL = TOKENS * HIDDEN
_RUNS, _CALLS = 15, 400


@dataclass(frozen=True)
class Row:
    """One operator.

    Attributes:
        direct_us: microseconds of the host for operands that are plain tensors of a GPU.
        dispatched_us: through torch's dispatcher, the path of tracing, fake tensors and other devices; measured only
            with no-op kernels.
    """

    name: str
    direct_us: float
    dispatched_us: float | None


class _OnGpu(Tensor):
    """A CPU tensor that claims to be on a GPU; asking it costs no more than asking a plain tensor."""

    is_cuda = True  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl


class _NoKernels(ModuleType):
    """A module of GPU variants that do nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *operands: None


def calls(make: Callable[[Tensor], Tensor]) -> dict[str, Callable[[], Any]]:
    """Operator → a call of it; `make` puts an operand on its device."""
    x, grads = (make(torch.randn(*shape).bfloat16()) for shape in ((TOKENS, HIDDEN), (1, TOKENS, HIDDEN)))
    weight, vector = make(torch.rand(HIDDEN).bfloat16()), make(torch.rand(TOKENS))
    scale, amax, one = (make(torch.full((1,), value)) for value in (0.01, 0.0, 1.0))
    a = make(torch.randn(TOKENS, HIDDEN).to(E4M3))
    out = make(torch.empty(TOKENS, TOKENS).bfloat16())
    scales = [make(torch.ones(4))[:1] for _ in range(2)]  # 16-byte aligned, as cuBLASLt requires

    def stored(dtype: torch.dtype, block: int) -> ops.FlatState:
        return ops.FlatState(make(torch.rand(NUMEL).to(dtype)), make(torch.ones(NUMEL // block)))

    grad, fp16 = stored(E4M3, GRAD_BLOCK), (torch.float16, STATE_BLOCK)
    state = ops.AdamState(grad, stored(E4M3, STATE_BLOCK), stored(*fp16), stored(*fp16))
    hyper = ops.AdamHyper(lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, decoupled=True)
    shard = make(torch.zeros(NUMEL // 2))
    return {
        "amax": lambda: ops.amax(x),
        "quantize_current": lambda: ops.quantize_current(x, E4M3, transposed=True),
        "quantize_with_scale": lambda: ops.quantize_with_scale(x, scale, E4M3, transposed=True, amax_out=amax),
        "quantize_grad_output": lambda: ops.quantize_grad_output(x, E5M2, scale=scale, amax_out=amax),
        "transpose": lambda: ops.transpose(a),
        "norm_quantize": lambda: ops.norm_quantize(
            x, weight, weight, E4M3, eps=1e-5, rms=False, scale=scale, amax_out=amax
        ),
        "norm_backward": lambda: ops.norm_backward(grads, x, x, weight, vector, vector, has_bias=True),
        "norm_backward_quantize": lambda: ops.norm_backward_quantize(
            *(grads, x, x, weight, vector, vector, E5M2),
            **dict(has_bias=True, scale=scale, amax_out=amax, transposed=True),
        ),
        "activation_quantize": lambda: ops.activation_quantize(x, Activation("gelu"), E4M3, scale=scale, amax_out=amax),
        "scaled_mm_into_": lambda: ops.scaled_mm_into_(out, a, a, *scales),
        "quantize_blockwise_": lambda: ops.quantize_blockwise_(vector, grad.payload, grad.scales),
        "accumulate_rows_": lambda: ops.accumulate_rows_(*grad, shard, factor=0.5, add=True),
        "adamw_step_": lambda: ops.adamw_step_(state, hyper, grad_factor=one, step=one),
    }


def microseconds(call: Callable[[], Any], after_run: Callable[[], object] = lambda: None) -> float:
    """Microseconds of a call, the minimum of several runs; `after_run` lets a GPU catch up and is not timed."""
    call()
    timer = timeit.Timer(call, timer=time.thread_time)
    best = float("inf")
    for _ in range(_RUNS):
        after_run()
        best = min(best, timer.timeit(_CALLS) / _CALLS)
    after_run()
    return best * 1e6


def without_kernels() -> list[Row]:
    """Time both paths of every operator with kernels that do nothing. Permanently changes the operators of this
    process.
    """
    library = torch.library.Library(registration.NAMESPACE, "IMPL")
    for name, declared in registration.operators().items():
        if declared.gpu_module is not None:
            loaded = sys.modules.setdefault(declared.gpu_module, _NoKernels(declared.gpu_module))
            assert isinstance(loaded, _NoKernels), f"{name}'s GPU variant is loaded already"
        outputs = len(getattr(torch.ops.fp8_megatron, name).default._schema.returns)
        empty = torch.empty(0)
        result = None if not outputs else empty if outputs == 1 else (empty,) * outputs
        library.impl(name, lambda *operands, result=result: result, "CPU", allow_override=True)
    dispatched = {name: microseconds(call) for name, call in calls(lambda tensor: tensor).items()}
    registration.Tensor = _OnGpu  # type: ignore[attr-defined,misc]
    direct = {name: microseconds(call) for name, call in calls(lambda x: x.as_subclass(_OnGpu)).items()}
    return [Row(name, direct[name], dispatched[name]) for name in direct]


def on_gpu() -> list[Row]:
    """Every operator with its own launches."""
    each = calls(lambda tensor: tensor.cuda())
    return [Row(name, microseconds(call, torch.cuda.synchronize), None) for name, call in each.items()]


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text."""
    lines = [f"{'':24} {'direct µs':>10} {'dispatched µs':>14}"]
    for row in rows:
        dispatched = "" if row.dispatched_us is None else f"{row.dispatched_us:.2f}"
        lines.append(f"{row.name:24} {row.direct_us:10.2f} {dispatched:>14}".rstrip())
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> None:
    """Measure, print, and write the JSON if one is asked for."""
    parser = Parser(description=__doc__.split("\n\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--no-op", action="store_true", help="kernels that do nothing, on a machine with a GPU too")
    parser.add_argument("--output", type=output_file, help="write the rows as JSON")
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)
    is_no_op = arguments.no_op or not torch.cuda.is_available()
    rows = without_kernels() if is_no_op else on_gpu()
    print(table(rows))
    if arguments.output:
        device = "no-op kernels" if is_no_op else device_name()
        write_rows(arguments.output, "benchmarks/host_overhead.py", words, rows, device=device)


if __name__ == "__main__":
    sys.exit(exit_status(main))
