"""Time every kernel on the GPU against the fewest bytes it must move: `python benchmarks/kernels.py`.

A row's floor is its bytes over the bandwidth of a large device-to-device copy, measured in the same run; a GEMM has the
same GEMM in BF16 beside it. The time is that of one call in a CUDA graph of several, which leaves out the gaps between
launches; inputs rotate through more memory than L2 holds. What a call costs the host is timed apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
from torch import Tensor

from fp8_megatron.formats import E4M3, E5M2, GRAD_BLOCK, STATE_BLOCK
from fp8_megatron.kernels import ops

_CALLS_PER_RUN = 12
_RUNS = 15
_HYPER = dict(lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, decoupled=True)

#: [tokens, hidden] and [tokens, 4 · hidden] of GPT-7B with micro-batch 8 and 2 of 2048 tokens.
SHAPES = ((16384, 4096), (4096, 16384))
#: M, N, K of GPT-7B's four forward GEMMs at 8192 tokens: QKV, projection, FC1, FC2.
GEMMS = ((8192, 12288, 4096), (8192, 4096, 4096), (8192, 16384, 4096), (8192, 4096, 16384))


@dataclass
class Row:
    """One measurement. Bytes are those of the algorithm, each operand's reads and writes counted."""

    name: str
    microseconds: float
    floor_microseconds: float | None
    gb_per_s: float | None
    tflop_per_s: float | None = None
    host_microseconds: float | None = None


def seconds_per_call(call: Callable[[int], object], *, graph: bool = True) -> float:
    """Median over runs of `call(0)`, `call(1)`, … of their time, divided by their number."""

    def run() -> None:
        for index in range(_CALLS_PER_RUN):
            call(index)

    run()
    torch.cuda.synchronize()
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            run()
        run = captured.replay
        run()
    times = []
    for _ in range(_RUNS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3 / _CALLS_PER_RUN)
    return statistics.median(times)


def host_seconds_per_call(call: Callable[[int], object]) -> float:
    """What a call costs the host: few enough calls that the launch queue does not fill."""
    times = []
    for _ in range(10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for index in range(20):
            call(index)
        times.append((time.perf_counter() - start) / 20)
    torch.cuda.synchronize()
    return statistics.median(times)


class Bench:
    """Measures rows against the copy bandwidth that it measures first."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        source = torch.randn(2**30, device="cuda", dtype=torch.bfloat16)
        target = torch.empty_like(source)
        num_bytes = 2 * source.numel() * source.element_size()
        # Outside a graph: a captured copy took half as long again.
        seconds = seconds_per_call(lambda _: target.copy_(source), graph=False)
        self.copy_bytes_per_second = num_bytes / seconds
        self.rows.append(Row("device copy, 2 GiB", seconds * 1e6, seconds * 1e6, num_bytes / seconds / 1e9))

    def memory(self, name: str, num_bytes: float, call: Callable[[int], object]) -> None:
        """A kernel bound by memory; `call` takes the number of the call and picks its inputs by it."""
        seconds = seconds_per_call(call)
        floor = num_bytes / self.copy_bytes_per_second
        self.rows.append(
            Row(name, seconds * 1e6, floor * 1e6, num_bytes / seconds / 1e9, None, host_seconds_per_call(call) * 1e6)
        )

    def gemm(self, name: str, m: int, n: int, k: int, call: Callable[[int], object]) -> None:
        """A GEMM of 2·m·n·k operations."""
        seconds = seconds_per_call(call)
        self.rows.append(Row(name, seconds * 1e6, None, None, 2 * m * n * k / seconds / 1e12))


def rotating(make: Callable[[], Tensor]) -> list[Tensor]:
    """Copies of an input that together are four times as large as L2."""
    first = make()
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    number = min(_CALLS_PER_RUN, 1 + 4 * l2 // (first.numel() * first.element_size()))
    return [first] + [make() for _ in range(number - 1)]


def quantization(bench: Bench, shapes: Sequence[tuple[int, int]]) -> None:
    """amax, both modes of tensorwise quantisation, and the transposition of a payload."""
    for m, k in shapes:
        n = m * k
        at = f"{m}×{k}"
        xs = rotating(lambda m=m, k=k: torch.randn(m, k, device="cuda", dtype=torch.bfloat16))  # type: ignore[misc]
        scale, recorded = torch.tensor([0.01], device="cuda"), torch.zeros(1, device="cuda")

        def x(index: int, xs: list[Tensor] = xs) -> Tensor:
            return xs[index % len(xs)]

        bench.memory(f"amax {at}", 2 * n, lambda i, x=x: ops.amax(x(i)))  # type: ignore[misc]
        for layout, rowwise, transposed in (
            ("", True, False),
            (" + transposed", True, True),
            (" transposed", False, True),
        ):
            written = rowwise + transposed
            layouts = dict(rowwise=rowwise, transposed=transposed)
            bench.memory(
                f"quantize_current{layout} {at}",
                (2 + 2 + written) * n,
                lambda i, x=x, layouts=layouts: ops.quantize_current(x(i), E4M3, **layouts),  # type: ignore[misc]
            )
            bench.memory(
                f"quantize_with_scale{layout} {at}",
                (2 + written) * n,
                lambda i, x=x, layouts=layouts, scale=scale, recorded=recorded: ops.quantize_with_scale(  # type: ignore[misc]
                    x(i), scale, E4M3, amax_out=recorded, **layouts
                ),
            )
        payloads = [ops.quantize_current(x, E4M3)[0] for x in xs] * 2
        bench.memory(
            f"transpose {at}",
            2 * n,
            lambda i, payloads=payloads: ops.transpose(payloads[i % len(payloads)]),  # type: ignore[misc]
        )


def blockwise(bench: Bench, n: int) -> None:
    """Block-scaled storage: the gradient's quantisation and its norm."""
    x = torch.randn(n, device="cuda")
    payload = torch.empty(n, dtype=E4M3, device="cuda")
    scales = torch.empty(n // GRAD_BLOCK, device="cuda")
    at = f"2^{n.bit_length() - 1}"
    per_scale = 4 / GRAD_BLOCK
    bench.memory(
        f"quantize_blockwise_ FP32 → E4M3/{GRAD_BLOCK} {at}",
        (4 + 1 + per_scale) * n,
        lambda _: ops.quantize_blockwise_(x, payload, scales),
    )
    bench.memory(
        f"dequantize_blockwise E4M3/{GRAD_BLOCK} {at}",
        (1 + 4 + per_scale) * n,
        lambda _: ops.dequantize_blockwise(payload, scales),
    )
    bench.memory(
        f"squared_norm E4M3/{GRAD_BLOCK} {at}", (1 + per_scale) * n, lambda _: ops.squared_norm(payload, scales)
    )
    bench.memory(f"squared_norm FP32 {at}", 4 * n, lambda _: ops.squared_norm(x, None))
    for num_rows in (4, 8):
        shard = n // num_rows
        accumulator = torch.zeros(shard, device="cuda")
        for add in (False, True):
            bench.memory(
                f"accumulate_rows_ {num_rows} rows of 2^{shard.bit_length() - 1}{', add' if add else ''}",
                (num_rows * (1 + per_scale) + 4 * (1 + add)) * shard,
                lambda _, accumulator=accumulator, num_rows=num_rows, add=add: ops.accumulate_rows_(  # type: ignore[misc]
                    payload, scales, accumulator, factor=1 / num_rows, add=add
                ),
            )


def optimizer(bench: Bench, n: int, chunk: int = 4096) -> None:
    """The fused step at level O3 (and unscaled FP32, level bf16), and the FP8 weights derived after it."""
    at = f"2^{n.bit_length() - 1}"
    one = torch.ones(1, device="cuda")
    values = [1e-3 * torch.randn(n, device="cuda"), 1e-4 * torch.randn(n, device="cuda")]
    values += [1e-8 * torch.rand(n, device="cuda"), 0.02 * torch.randn(n, device="cuda")]
    weight = torch.empty(n, dtype=torch.bfloat16, device="cuda")
    unscaled = [operand for value in values for operand in (value, None)]
    bench.memory(
        f"adamw_step_ FP32 + BF16 weight {at}",
        (4 + 3 * 8 + 2) * n,
        lambda _: ops.adamw_step_(*unscaled, weight, None, one, one, **_HYPER),  # type: ignore[arg-type]
    )
    scaled: list[Tensor] = []
    forms = ((E4M3, GRAD_BLOCK), (E4M3, STATE_BLOCK), (torch.float16, STATE_BLOCK), (torch.float16, STATE_BLOCK))
    for value, (dtype, block) in zip(values, forms, strict=True):
        payload, scales = torch.empty(n, dtype=dtype, device="cuda"), torch.empty(n // block, device="cuda")
        ops.quantize_blockwise_(value, payload, scales)
        scaled += [payload, scales]
    chunk_amax = torch.empty(n // chunk, device="cuda")
    bench.memory(
        f"adamw_step_ O3 {at}",
        (1 + 2 * (1 + 2 + 2) + 4 / GRAD_BLOCK + 3 * 8 / STATE_BLOCK + 4 / chunk) * n,
        lambda _: ops.adamw_step_(*scaled, None, chunk_amax, one, one, **_HYPER),  # type: ignore[arg-type]
    )
    weights = torch.empty(n, dtype=E4M3, device="cuda")
    chunk_tensor = torch.zeros(n // chunk, dtype=torch.int32, device="cuda")
    bench.memory(
        f"derive_fp8_weights_ {at}",
        (2 + 1 + 4 / STATE_BLOCK + 4 / chunk) * n,
        lambda _: ops.derive_fp8_weights_(scaled[6], scaled[7], weights, one, chunk_tensor),
    )
    companded: list[Tensor] = []
    for value, dtype in zip(values[1:3], (torch.int8, torch.uint8), strict=True):
        companded += [torch.empty(n, dtype=dtype, device="cuda"), torch.empty(n // STATE_BLOCK, device="cuda")]
        ops.quantize_blockwise_(value, *companded[-2:])
        bench.memory(
            f"quantize_blockwise_ FP32 → {str(dtype).removeprefix('torch.')}/{STATE_BLOCK} {at}",
            (4 + 1 + 4 / STATE_BLOCK) * n,
            lambda _, value=value, state=companded[-2:]: ops.quantize_blockwise_(value, *state),  # type: ignore[misc]
        )
    moments = (1 + 2 * (1 + 1) + 4 / GRAD_BLOCK + 2 * 8 / STATE_BLOCK + 4 / chunk) * n
    bench.memory(
        f"adamw_step_ O3, int8 + uint8 moments {at}",
        moments + (2 * 2 + 8 / STATE_BLOCK) * n,
        lambda _: ops.adamw_step_(*scaled[:2], *companded, *scaled[6:], None, chunk_amax, one, one, **_HYPER),  # type: ignore[arg-type]
    )
    correction = torch.zeros(n, dtype=torch.int8, device="cuda")
    weight_scales, new_weight_scales = (torch.full((1,), 2.0**-11, device="cuda") for _ in range(2))
    bench.memory(
        f"adamw_split_step_ int8 + uint8 moments {at}",
        moments + 2 * (1 + 1) * n,
        lambda _: ops.adamw_split_step_(
            *(*scaled[:2], *companded, weights, correction, weight_scales, new_weight_scales),  # type: ignore[arg-type]
            *(chunk_tensor, chunk_amax, one, one),
            **_HYPER,  # type: ignore[arg-type]
        ),
    )


def gemms(bench: Bench, shapes: Sequence[tuple[int, int, int]]) -> None:
    """The FP8 GEMM with each accumulator beside BF16's."""
    one = torch.ones(1, device="cuda")
    for m, n, k in shapes:
        at = f"M={m} N={n} K={k}"
        a, b = (torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for rows in (m, n))
        out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        bench.gemm(f"matmul BF16 {at}", m, n, k, lambda _, a=a, b=b, out=out: torch.mm(a, b.t(), out=out))  # type: ignore[misc]
        for format_a, fast, name in (
            (E4M3, True, "E4M3 fast"),
            (E4M3, False, "E4M3 split"),
            (E5M2, False, "E5M2 split"),
        ):
            qa, qb = ops.quantize_current(a, format_a)[0], ops.quantize_current(b, E4M3)[0]
            bench.gemm(
                f"scaled_mm {name} {at}",
                m,
                n,
                k,
                lambda _, qa=qa, qb=qb, fast=fast: ops.scaled_mm(qa, qb, one, one, use_fast_accum=fast),  # type: ignore[misc]
            )


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text."""
    lines = [f"{'':54} {'µs':>9} {'floor':>9} {'× floor':>8} {'GB/s':>6} {'TFLOP/s':>8} {'host µs':>8}"]
    for row in rows:
        cells = [f"{row.name:54} {row.microseconds:9.1f}"]
        if row.floor_microseconds is None:
            cells.append(f"{'':9} {'':8} {'':6}")
        else:
            ratio = row.microseconds / row.floor_microseconds
            cells.append(f"{row.floor_microseconds:9.1f} {ratio:8.2f} {row.gb_per_s:6.0f}")
        cells.append(f"{row.tflop_per_s:8.0f}" if row.tflop_per_s else f"{'':8}")
        cells.append(f"{row.host_microseconds:8.1f}" if row.host_microseconds else "")
        lines.append(" ".join(cells).rstrip())
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--output", type=Path, help="write the rows as JSON")
    parser.add_argument("--log2-elements", type=int, default=28, help="size of the optimizer's flat storage")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    bench = Bench()
    quantization(bench, SHAPES)
    blockwise(bench, 2**arguments.log2_elements)
    optimizer(bench, 2**arguments.log2_elements)
    gemms(bench, GEMMS)
    print(table(bench.rows))
    if arguments.output:
        result = {
            "command": f"python benchmarks/kernels.py --log2-elements {arguments.log2_elements}",
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
            "copy_gb_per_s": bench.copy_bytes_per_second / 1e9,
            "rows": [asdict(row) for row in bench.rows],
        }
        arguments.output.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
