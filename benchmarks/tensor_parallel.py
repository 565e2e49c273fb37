"""Time FP8 GEMMs that gather or sum rows over tensor-parallel ranks:

torchrun --nproc-per-node 2 benchmarks/tensor_parallel.py --output runs/tensor_parallel.json

Each GEMM alone, with collectives (NCCL; gloo on a CPU) and, between the GPUs of a node, part by part over copy engines
(`collectives.row_exchange`); device and host time of a call, and whether the results are equal. On GPUs calls are also
timed in a CUDA graph, as in a recorded step: the parts with their exchange, and the parts alone. Gathered rows are also
timed from BF16, over collectives: cast, gather in FP8 and multiply, against gather in BF16, cast and multiply. Then the
bytes are checked while other copies keep the engines busy and memory is reused as early as allowed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

# Run as a script from a clone, installed or not.
sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.provenance import commit
from fp8_megatron.collectives.row_exchange import gather_rows, share_memory, sum_rows
from fp8_megatron.collectives.transport import copy_engine, recording
from fp8_megatron.commands.arguments import Parser, output_file, whole
from fp8_megatron.commands.program import exit_status
from fp8_megatron.device import cuda_graph
from fp8_megatron.device.device import distributed_backend, select_device
from fp8_megatron.formats import E4M3
from fp8_megatron.kernels import ops
from fp8_megatron.mcore.runtime import runtime
from fp8_megatron.outputs import write_output

Group = torch.distributed.ProcessGroup
_WARM_UP_CALLS, _CALLS = 6, 30
_RECORDED_CALLS = 20
#: Rows of each rank, gathered beside the checked rows.
_LOAD_BYTES = 64 * 2**20


@dataclass
class Row:
    """One GEMM [tokens, k] × [n, k]ᵀ; microseconds of the slowest rank."""

    name: str
    n: int
    k: int
    alone: float
    collectives: float
    collectives_host: float
    cast_then_gathered: float | None = None
    gathered_then_cast: float | None = None
    by_parts: float | None = None
    by_parts_host: float | None = None
    by_parts_recorded: float | None = None
    parts_alone_recorded: float | None = None
    equal: bool | None = None


def main() -> int:
    """Measure, check, print and write; returns the exit status."""
    args = _parse()
    # With one queue every stream would wait for any stream that waits.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    device = select_device()
    torch.distributed.init_process_group(
        distributed_backend(device), device_id=device if device.type == "cuda" else None
    )
    # A failed rank leaves without meeting the others again: torchrun ends them.
    group = torch.distributed.group.WORLD
    assert group is not None
    with runtime(device):
        rows, wrong = _run(args, group, device)
    if group.rank() == 0:
        _report(args, rows, wrong, device)
    torch.distributed.destroy_process_group()
    return int(wrong > 0 or any(row.equal is False for row in rows))


def _parse() -> argparse.Namespace:
    parser = Parser(description="Time FP8 GEMMs with what they gather or sum over ranks.")
    parser.add_argument("--tokens", type=whole(), default=8192, help="of the whole sequence and micro-batch")
    parser.add_argument("--hidden", type=whole(), default=5120)
    parser.add_argument("--check-exchanges", type=whole(least=0), default=400)
    parser.add_argument("--output", type=output_file, help="JSON of every figure")
    return parser.parse_args()


def _run(args: argparse.Namespace, group: Group, device: torch.device) -> tuple[list[Row], int]:
    """The rows, and how many exchanges brought wrong bytes."""
    cases = [_Case(name, n, k, gathers, args.tokens, group, device) for name, n, k, gathers in _shapes(args, group)]
    rows = []
    for case in cases:
        alone, _ = _time(case.alone, group, device)
        both, host = _time(case.exchange, group, device)
        row = Row(case.name, case.n, case.k, alone, both, host)
        if case.gathers:
            row.cast_then_gathered, _ = _time(case.cast_then_gathered, group, device)
            row.gathered_then_cast, _ = _time(case.gathered_then_cast, group, device)
            assert torch.equal(case.cast_then_gathered(), case.gathered_then_cast()), row.name
        rows.append(row)
    expected = [case.expected() for case in cases]
    if device.type == "cuda":
        share_memory(group, device)
        for case, row, y in zip(cases, rows, expected, strict=True):
            row.equal = torch.equal(case.exchange(), y)
            row.by_parts, row.by_parts_host = _time(case.exchange, group, device)
            row.by_parts_recorded = _time_recorded(case.exchange, group, device)
            row.parts_alone_recorded = _time_recorded(case.parts_alone, group, device)
    return rows, _wrong_exchanges(args.check_exchanges, group, device)


def _shapes(args: argparse.Namespace, group: Group) -> list[tuple[str, int, int, bool]]:
    """(name, N, K, whether the input is gathered; else the output is summed) of a layer's forward on one rank."""
    hidden, size = args.hidden, group.size()
    return [
        ("qkv", 3 * hidden // size, hidden, True),
        ("fc1", 4 * hidden // size, hidden, True),
        ("proj", hidden, hidden // size, False),
        ("fc2", hidden, 4 * hidden // size, False),
    ]


class _Case:
    """A GEMM on random operands with its exchange."""

    def __init__(
        self, name: str, n: int, k: int, gathers: bool, tokens: int, group: Group, device: torch.device
    ) -> None:
        self.name, self.n, self.k, self.gathers = name, n, k, gathers
        self._tokens, self._group = tokens, group
        self._wide = torch.randn(tokens // group.size() if gathers else tokens, k, device=device).bfloat16()
        self._x = self._wide.to(E4M3)
        self._whole = self._x.view(torch.uint8).repeat(group.size(), 1).view(E4M3) if gathers else self._x
        self._weight = torch.randn(n, k, device=device).to(E4M3)
        self._scale = torch.ones(1, device=device)

    def alone(self) -> Tensor:
        """The GEMM alone: as many rows, all present, no sum."""
        return ops.scaled_mm(self._whole, self._weight, self._scale, self._scale)

    def parts_alone(self) -> Tensor:
        """As `alone`, in as many parts as there are ranks."""
        y = torch.empty((self._tokens, self.n), dtype=torch.bfloat16, device=self._x.device)
        for own, part in zip(y.chunk(self._group.size()), self._whole.chunk(self._group.size()), strict=True):
            self._multiply(own, part)
        return y

    def expected(self) -> Tensor:
        """The result of `exchange`, from collectives of whole matrices; sums are FP32 in rank order."""
        if self.gathers:
            return self.exchange()
        own = self.alone()
        matrices = [torch.empty_like(own) for _ in range(self._group.size())]
        torch.distributed.all_gather(matrices, own, group=self._group)
        parts = [matrix.chunk(self._group.size())[self._group.rank()] for matrix in matrices]
        return ops.sum_of_rows(torch.stack(parts))

    def exchange(self) -> Tensor:
        """y [tokens, n] of gathered rows, or this rank's part of the sum."""
        if not self.gathers:
            return sum_rows(
                lambda rows, out, _: self._multiply(out, self._x[rows]),
                (self._tokens, self.n),
                torch.bfloat16,
                self._x.device,
                self._group,
            ).wait()
        return self._gathered_product(self._x)

    def cast_then_gathered(self) -> Tensor:
        """As `exchange`, from this rank's rows in BF16: one byte an element travels."""
        return self._gathered_product(self._cast(self._wide))

    def gathered_then_cast(self) -> Tensor:
        """The same bits, but two bytes an element travel and every rank casts all rows."""
        whole = self._wide.new_empty(self._tokens, self.k)
        torch.distributed.all_gather_into_tensor(whole, self._wide, group=self._group)
        y = torch.empty((self._tokens, self.n), dtype=torch.bfloat16, device=self._x.device)
        self._multiply(y, self._cast(whole))
        return y

    def _gathered_product(self, x: Tensor) -> Tensor:
        y = torch.empty((self._tokens, self.n), dtype=torch.bfloat16, device=self._x.device)
        for rows, part in gather_rows(x, self._group).parts():
            self._multiply(y[rows], part)
        return y

    def _cast(self, x: Tensor) -> Tensor:
        return ops.quantize_with_scale(x, self._scale, E4M3, rowwise=True, transposed=False)[0]

    def _multiply(self, out: Tensor, x: Tensor) -> None:
        ops.scaled_mm_into_(out, x, self._weight, self._scale, self._scale)


def _time(call: Callable[[], object], group: Group, device: torch.device) -> tuple[float, float]:
    """Microseconds of a call on the device (a CPU: of the host) and of the host, on the slowest rank."""
    for _ in range(_WARM_UP_CALLS):
        call()
    _synchronize(device)
    torch.distributed.barrier(group)
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(_CALLS):
        call()
    queued = time.perf_counter() - start
    _synchronize(device)
    done = time.perf_counter() - start
    slowest = 1e6 / _CALLS * torch.tensor([done, queued], device=device)
    torch.distributed.all_reduce(slowest, op=torch.distributed.ReduceOp.MAX, group=group)
    whole, host = slowest.tolist()
    return whole, host


def _time_recorded(call: Callable[[], object], group: Group, device: torch.device) -> float:
    """Microseconds of a call in a CUDA graph of many, on the slowest rank."""

    def calls() -> None:
        with recording.recording():
            for _ in range(_RECORDED_CALLS):
                call()

    _synchronize(device)
    torch.distributed.barrier(group)
    graph, _ = cuda_graph.capture(calls, torch.cuda.graph_pool_handle())
    whole, _ = _time(lambda: recording.launch(graph.replay), group, device)
    return whole / _RECORDED_CALLS


def _wrong_exchanges(count: int, group: Group, device: torch.device) -> int:
    """How many of `count` gathers and sums of fresh values are wrong on some rank.

    Concurrent copies keep the engines busy. As soon as the interface allows, an exchange's operands are released and
    their memory is overwritten.
    """
    rank, size = group.rank(), group.size()
    n, k = 64 * size, 4096
    wrong = torch.zeros(1, device=device)
    generator = torch.Generator(device).manual_seed(5)
    load = None
    if device.type == "cuda":
        full = copy_engine.allocate(size * _LOAD_BYTES, group, device)
        memory = copy_engine.memory_of(full, group)
        assert memory is not None
        load = (memory, full, full.view(size, -1)[rank])
    for exchange in range(count):
        if load is not None and exchange % 4 == 0:
            copy_engine.start_all_gathers([load])
        values = torch.randint(0, 256, (size, n // size, k), generator=generator, device=device, dtype=torch.uint8)
        taken = torch.empty(size, n // size, k, device=device, dtype=torch.uint8)
        shard = values[rank].clone()
        for rows, part in gather_rows(shard, group).parts():
            taken.view(n, k)[rows] = part
        del shard, part
        junk = torch.full((n // size, k), 255, device=device, dtype=torch.uint8)
        matrices = torch.randint(-64, 64, (size, n, k), generator=generator, device=device).bfloat16()
        summing = sum_rows(
            lambda rows, out, _, mine=matrices[rank]: out.copy_(mine[rows]),  # type: ignore[misc]
            (n, k),
            torch.bfloat16,
            device,
            group,
        )
        total = summing.wait()
        del summing
        junk = torch.full((n // size, k), torch.nan, device=device, dtype=torch.bfloat16)
        expected = matrices.view(size, size, n // size, k)[:, rank].float().sum(dim=0).bfloat16()
        wrong += ((taken != values).any() | (total != expected).any()).float()
        del junk
    torch.distributed.all_reduce(wrong, op=torch.distributed.ReduceOp.MAX, group=group)
    return int(wrong.item())


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _report(args: argparse.Namespace, rows: list[Row], wrong: int, device: torch.device) -> None:
    print(
        f"{'µs':24} {'alone':>9} {'collectives':>12} {'(host)':>8} {'FP8 gather':>10} {'BF16':>8}"
        f" {'by parts':>9} {'(host)':>8} {'graph':>9} {'no rows':>9}  equal"
    )
    for row in rows:
        gathers = " " * 19
        if row.cast_then_gathered is not None:
            gathers = f"{row.cast_then_gathered:10.1f} {row.gathered_then_cast:8.1f}"
        parts = ""
        if row.by_parts is not None:
            recorded = f"{row.by_parts_recorded:9.1f} {row.parts_alone_recorded:9.1f}"
            parts = f"{row.by_parts:9.1f} {row.by_parts_host:8.1f} {recorded}  {row.equal}"
        shape = f"{row.name} [{row.n}, {row.k}]"
        print(f"{shape:24} {row.alone:9.1f} {row.collectives:12.1f} {row.collectives_host:8.1f} {gathers} {parts}")
    print(f"{wrong} of {args.check_exchanges} exchanges wrong")
    if args.output is None:
        return
    report = {
        "command": shlex.join(["torchrun", *sys.argv]),
        "commit": commit(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "ranks": int(os.environ["WORLD_SIZE"]),
        "launch_queues": os.environ["CUDA_DEVICE_MAX_CONNECTIONS"],
        "torch": torch.__version__,
        "tokens": args.tokens,
        "rows": [asdict(row) for row in rows],
        "checked_exchanges": args.check_exchanges,
        "wrong_exchanges": wrong,
    }
    write_output(args.output, (json.dumps(report, indent=1) + "\n").encode(), "--output")


if __name__ == "__main__":
    sys.exit(exit_status(main))
