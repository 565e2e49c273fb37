"""benchmarks/kernels.py without a GPU: every case runs, its bytes are its operands', failures stay rows."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
#: Operands of these operators that are written and not read; any other that is written is read too.
WRITE_ONLY = {
    "quantize_blockwise_": {"payload", "scales"},
    "adamw_step_": {"weight", "chunk_amax"},
    "adamw_split_step_": {"chunk_amax"},
    "derive_fp8_weights_": {"payload"},
    "momentum_step_": {"direction"},
    "orthogonal_step_": {"weight", "chunk_amax"},
    "orthogonal_split_step_": {"chunk_amax"},
}
#: Part of an operand that an operator touches, where it is not all: query and key, of one head or four a group.
TOUCHED = {("rotate_qk_", "y"): (2, 3), ("norm_rotate_qk", "y"): (5, 6), ("norm_rotate_qk_backward", "y"): (5, 6)}


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of the benchmark, which import each other as scripts of one folder do."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    names = (
        "kernel_timing",
        "kernel_cases",
        "block_cases",
        "fused_cases",
        "grouped_cases",
        "attention_cases",
        "linear_cases",
        "kernels",
    )
    yield {name: importlib.import_module(name) for name in names}
    for name in names:
        sys.modules.pop(name, None)


class CountedOperands(TorchDispatchMode):
    """Bytes of the operands of this project's operators: read, and written (results included)."""

    def __init__(self) -> None:
        super().__init__()
        self.read = self.written = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace != "fp8_megatron":
            return result
        name = func._schema.name.split("::")[1]
        for argument, value in zip(func._schema.arguments, args, strict=True):
            for tensor in value if isinstance(value, list) else [value]:
                if isinstance(tensor, Tensor):
                    self._count(name, argument, tensor, args)
        results = result if isinstance(result, tuple | list) else [result]
        self.written += sum(tensor.nbytes for tensor in results if isinstance(tensor, Tensor))
        return result

    def _count(self, name: str, argument: Any, tensor: Tensor, args: Any) -> None:
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        adds = name != "accumulate_rows_" or args[4]
        part, whole = TOUCHED.get((name, argument.name), (1, 1))
        num_bytes = tensor.nbytes * part // whole
        if is_written:
            self.written += num_bytes
        if not is_written or (argument.name not in WRITE_ONLY.get(name, ()) and adds):
            self.read += num_bytes


def all_cases(benchmark: Any) -> Iterator[Any]:
    """Every memory-bound case at sizes that a CPU takes, large enough that vectors beside the matrices vanish."""
    kernels, fused = benchmark["kernel_cases"], benchmark["fused_cases"]
    yield from kernels.quantization(CPU, 256, 512)
    yield from fused.norms(CPU, 512, 512)
    yield from fused.gradients(CPU, 512, 512)
    yield from fused.qkv_gradients(CPU, 512, 128, head_dim=32)
    yield from fused.rotations(CPU, 512, 128, head_dim=32)
    yield from fused.grouped_rotations(CPU, 512, 256, head_dim=32)
    yield from fused.activations(CPU, 512, 512, "gelu")
    yield from fused.activations(CPU, 512, 256, "swiglu")
    yield from fused.activations(CPU, 512, 512, "squared_relu")
    yield from benchmark["grouped_cases"].rows(CPU, 256, 512, 4, 2)
    yield from benchmark["grouped_cases"].activations(CPU, 256, 256, 4, 2)
    yield from fused.cross_entropy(CPU, 64, 2048)
    yield from kernels.blockwise(CPU, 2**16)
    yield from kernels.optimizer(CPU, 2**16)
    yield from benchmark["block_cases"].casts(CPU, 512, 512)
    yield from benchmark["block_cases"].fused(CPU, 512, 512, 256, "swiglu")
    yield from benchmark["block_cases"].fused(CPU, 256, 512, 512, "gelu")


def test_bytes_are_the_operands(benchmark: Any) -> None:
    """What is read once and what is written; current scaling reads twice. 1% is for scales, amaxes and vectors."""
    names = []
    for case in all_cases(benchmark):
        case.call(0)
        with CountedOperands() as counted:
            case.call(1)
        passes = 2 if "current" in case.name else 1
        assert case.num_bytes == pytest.approx(passes * counted.read + counted.written, rel=0.01), case.name
        names.append(case.name)
    assert len(names) == len(set(names)), "two rows of one name"
    for what in ("LayerNorm → E4M3, known", "RMSNorm → E4M3, current", "again → E4M3 transposed", "residual gradient"):
        assert any(what in name for name in names), what


def test_gemm_cases_run(benchmark: Any) -> None:
    for case in benchmark["kernel_cases"].gemms(CPU, 32, 48, 64):
        case.call(0)
        assert case.num_flops == 2 * 32 * 48 * 64


def test_grouped_gemm_cases_run(benchmark: Any) -> None:
    """torch's FP8 kernel has no CPU variant, so that its operands are checked without values."""
    rows, num_experts, k, n = 512, 4, 128, 256
    shapes = {"forward": (rows, n), "E4M3": (rows, n), "dgrad": (rows, k), "wgrad": (num_experts, n, k)}
    without_values = benchmark["grouped_cases"].gemms(torch.device("meta"), rows, num_experts, k, n)
    cases = [*benchmark["grouped_cases"].gemms(CPU, rows, num_experts, k, n)]
    for case, described in zip(cases, without_values, strict=True):
        assert case.num_flops == 2 * rows * k * n
        found = (described if "torch FP8" in case.name else case).call(0)
        assert found is None or found.shape == shapes[case.name.partition(f" {rows},")[0].split()[-1]], case.name
    assert len({case.name for case in cases}) == len(cases) == 13


def test_grouped_gemms_are_those_of_the_page(benchmark: Any) -> None:
    table = re.findall(r"^\| ([\d,]+), (\d+), ([\d,]+) → ([\d,]+) \|", (ROOT / "docs/moe.md").read_text(), re.MULTILINE)
    shapes = [tuple(int(word.replace(",", "")) for word in row) for row in table]
    kernels = benchmark["kernels"]
    assert {*kernels.GROUPED_GEMMS} == {*shapes} and len(kernels.GROUPED_GEMMS) == 7
    assert len(set(kernels.SECTIONS)) == len(kernels.SECTIONS)
    assert kernels.parse(["--only", "grouped_gemms"]).only == ["grouped_gemms"]


def test_attention_cases_run(benchmark: Any) -> None:
    """A document of 512 tokens is the whole of a short sequence; a causal GEMM counts half."""
    cases = list(benchmark["attention_cases"].attention(CPU, 2, 64, heads=2))
    assert len({case.name for case in cases}) == len(cases)
    in_fp8 = [case for case in cases if "FP8" in case.name]
    assert [case.num_flops for case in in_fp8] == [2 * 2 * 2 * (64 * 64 / 2) * 2 * 128 * part for part in (1, 2.5)]
    cases = [case for case in cases if case not in in_fp8]
    assert len(cases) == 8
    for forward, both in zip(cases[::2], cases[1::2], strict=True):
        assert forward.num_flops == 2 * 2 * 2 * (64 * 64 / 2) * 2 * 128 and both.num_flops == 3.5 * forward.num_flops
        assert forward.call(0).shape == (64, 2, 256) and [grad.shape[2:] for grad in both.call(0)] == [(2, 128)] * 3


def test_block_scaled_gemm_cases_run(benchmark: Any) -> None:
    for case in benchmark["block_cases"].gemms(CPU, 128, 256, 384):
        case.call(0)
        assert case.num_flops == 2 * 128 * 256 * 384


def test_layers_run_with_every_way_to_their_weight_gradient(benchmark: Any) -> None:
    """Those of another library may be missing."""
    cases = benchmark["linear_cases"]

    def once(step: Any) -> tuple[float, str]:
        step(0)
        return 1.0, "events"

    for steps in (cases.STEPS, cases.WGRAD_STEPS):
        own = {name: step for name, step in steps.items() if getattr(step, "func", None) is not cases.te_step}
        assert cases.FP8_DELAYED in own and (cases.FP8_BLOCKS in own or cases.FP8_BF16_WGRAD in own)
        rows = list(cases.measure([cases.Shape(128, 256, 384)], CPU, once, own))
        assert [row.name for row in rows] == list(own) and all(row.error is None for row in rows), rows


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing on a CPU")
def test_without_a_gpu_it_says_so() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "kernels.py"), "--only", "norms"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2 and "there is no GPU here" in done.stderr
