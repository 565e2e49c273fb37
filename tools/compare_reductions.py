"""Signal-to-noise ratio of each way of reducing gradients, against FP64, on a CPU.

python tools/compare_reductions.py --output benchmarks/results/reduction_snr_cpu.json

Ranks are virtual: the collectives' own functions round and sum; only the wire is missing. Mode nccl is the emulated
ring. The gradient has eight tensors whose magnitudes lie a decade apart. Within each, blocks of 128 spread over two
decades. The worst tensor's ratio is printed. `Kind` says how the ranks' gradients are related.
"""

from __future__ import annotations

import importlib.util
import json
import platform
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

if importlib.util.find_spec("fp8_megatron") is None:  # a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fp8_megatron.collectives.autoscale import AutoScale
from fp8_megatron.collectives.native_sum import mean_of_sum, ring_sum
from fp8_megatron.collectives.wire import WireTensor, accumulate_rows_
from fp8_megatron.commands.arguments import Parser, output_file, whole
from fp8_megatron.commands.program import exit_status
from fp8_megatron.formats import E4M3, GRAD_BLOCK, StorageDtype
from fp8_megatron.outputs import write_output
from fp8_megatron.quantization.stats import snr_db
from fp8_megatron.sharding.partition import StorageClass
from fp8_megatron.sharding.storage import ModelStorage

#: Shown for an exact sum.
MAX_DB = 200.0
NUM_RANKS = (2, 4, 8, 16, 32, 64)
NUM_TENSORS = 8
BLOCKS_PER_TENSOR = 64
#: Power of each rank's own noise in correlated gradients; the shared gradient has power 1.
NOISE_POWER = 0.25
RANKS_PER_NODE = 8
#: Reductions of one gradient after which mode nccl's μ has settled: from 1 to about 1/64 it halves six times.
SETTLING_REDUCTIONS = 10
NUM_MICRO_BATCHES = 256
ACCUMULATION_RANKS = 4
ACCUMULATION_OF_OURS = "each reduced in E4M3 into FP32"
ACCUMULATION_IN_BF16 = "each reduced in E4M3 into BF16"
#: Numbers of micro-batches that one replica adds up, around `MAX_BF16_MICRO_BATCHES`.
NUM_LOCAL_MICRO_BATCHES = (8, 32, 64, 256, 1024)
#: Degrees of freedom of Student's t: below 2 its variance is infinite.
TAIL_DEGREES = 1.5
#: How ranks' gradients are related. uncorrelated: normal and independent. correlated: a shared normal gradient with
#: noise of power `NOISE_POWER`. equal: the shared gradient alone. anti-correlated F: the mean over ranks is F times as
#: large as a rank's gradient. heavy tails: independent, of Student's t.
Kind = Literal["uncorrelated", "correlated", "equal", "anti-correlated 0.1", "anti-correlated 0.001", "heavy tails"]
CPU = torch.device("cpu")


def main(argv: list[str]) -> int:
    """Measure, print, write; returns the exit status."""
    parser = Parser(description="Signal-to-noise ratios of gradient reductions.")
    parser.add_argument("--output", type=output_file, help="JSON file to write")
    parser.add_argument("--num-ranks", type=whole(least=0), nargs="+", default=list(NUM_RANKS), help="virtual ranks")
    parser.add_argument("--micro-batches", type=whole(), default=NUM_MICRO_BATCHES, help="on 4 ranks")
    parser.add_argument(
        "--local-micro-batches", type=whole(), nargs="+", default=list(NUM_LOCAL_MICRO_BATCHES), help="on one replica"
    )
    parser.add_argument(
        "--blocks-per-tensor", type=whole(most=1 << 20), default=BLOCKS_PER_TENSOR, help="of 128 elements"
    )
    args = parser.parse_args(argv)
    blocks = args.blocks_per_tensor
    allowed = [n for n in range(2, NUM_TENSORS * blocks + 1) if NUM_TENSORS * blocks % n == 0]
    if wrong := [n for n in args.num_ranks if n not in allowed]:
        numbers = ", ".join(map(str, allowed))
        parser.error(f"--num-ranks {wrong[0]}: give one of {numbers} (with --blocks-per-tensor {blocks})")
    console = Console(width=110)
    reductions = {kind: measure_reductions(args.num_ranks, kind, blocks_per_tensor=blocks) for kind in get_args(Kind)}
    for kind, rows in reductions.items():
        console.print(_table(f"dB by number of ranks, {kind} gradients", [str(n) for n in args.num_ranks], rows))
    accumulation = {
        kind: measure_accumulation(args.micro_batches, kind, blocks_per_tensor=blocks) for kind in ACCUMULATED_KINDS
    }
    ways = accumulation[ACCUMULATED_KINDS[0]]
    rows = {way: {kind: accumulation[kind][way] for kind in ACCUMULATED_KINDS} for way in ways}
    title = f"dB after {args.micro_batches} micro-batches on {ACCUMULATION_RANKS} ranks"
    console.print(_table(title, list(ACCUMULATED_KINDS), rows))
    local = {kind: measure_local_sums(args.local_micro_batches, kind) for kind in ACCUMULATED_KINDS}
    for kind, rows in local.items():
        title = f"dB of one replica's sum by number of micro-batches, {kind} gradients"
        console.print(_table(title, [str(n) for n in args.local_micro_batches], rows))
    if args.output is not None:
        report = {
            "command": shlex.join(["python", "tools/compare_reductions.py", *argv]),
            "device": "cpu",
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "gradient": {
                "num_tensors": NUM_TENSORS,
                "blocks_per_tensor": blocks,
                "noise_power_if_correlated": NOISE_POWER,
            },
            "snr_db_by_ranks": reductions,
            "micro_batches": args.micro_batches,
            "snr_db_of_accumulation": accumulation,
            "snr_db_of_local_sums": local,
        }
        write_output(args.output, (json.dumps(report, indent=1) + "\n").encode(), "--output")
    return 0


ACCUMULATED_KINDS: tuple[Kind, ...] = ("uncorrelated", "correlated", "equal")


class GradientSource:
    """Random gradients from one seed; each element has its own fixed magnitude.

    Attributes:
        numel: elements of a gradient: eight tensors of `blocks_per_tensor` blocks.
    """

    def __init__(self, kind: Kind, *, seed: int = 0, blocks_per_tensor: int = BLOCKS_PER_TENSOR) -> None:
        self._kind = kind
        self._generator = torch.Generator().manual_seed(seed)
        self._tails = np.random.default_rng(seed)
        tensors = torch.logspace(-7, 0, NUM_TENSORS).repeat_interleave(blocks_per_tensor)
        blocks = 10.0 ** (2.0 * torch.rand(tensors.numel(), generator=self._generator) - 1.0)
        self._magnitudes = (tensors * blocks).repeat_interleave(GRAD_BLOCK)
        self.numel = self._magnitudes.numel()
        has_common = kind in ("correlated", "equal") or kind.startswith("anti-correlated")
        self._common = torch.randn(self.numel, generator=self._generator) if has_common else torch.zeros(self.numel)

    def draw(self, num_ranks: int) -> Tensor:
        """The next gradient of each rank, FP32 [num_ranks, numel]."""
        return self._values(num_ranks) * self._magnitudes

    def _values(self, num_ranks: int) -> Tensor:
        if self._kind == "heavy tails":
            return torch.from_numpy(self._tails.standard_t(TAIL_DEGREES, (num_ranks, self.numel))).float()
        if self._kind == "equal":
            return self._common.expand(num_ranks, -1)
        noise = torch.randn(num_ranks, self.numel, generator=self._generator)
        if self._kind == "uncorrelated":
            return noise
        if self._kind == "correlated":
            return self._common + NOISE_POWER**0.5 * noise
        mean = float(self._kind.split()[1])
        rest = noise - noise.mean(dim=0)  # of power 1 - 1 / num_ranks
        return mean * self._common + ((1 - mean**2) / (1 - 1 / num_ranks)) ** 0.5 * rest


def worst_snr_db(value: Tensor, exact: Tensor) -> float:
    """The lowest `snr_db` of the tensors in a gradient [numel]."""
    parts = zip(value.chunk(NUM_TENSORS), exact.chunk(NUM_TENSORS), strict=True)
    return min(snr_db(part, exact_part) for part, exact_part in parts)


def measure_reductions(
    num_ranks: list[int], kind: Kind, *, blocks_per_tensor: int = BLOCKS_PER_TENSOR
) -> dict[str, dict[str, float]]:
    """SNR in dB, by way of reducing and number of ranks."""
    table: dict[str, dict[str, float]] = {name: {} for name in REDUCTIONS}
    for ranks in num_ranks:
        values = GradientSource(kind, blocks_per_tensor=blocks_per_tensor).draw(ranks)
        exact = values.double().mean(dim=0)
        for name, reduce in REDUCTIONS.items():
            table[name][str(ranks)] = worst_snr_db(reduce(values), exact)
    return table


def reduce_all_to_all(values: Tensor, dtype: StorageDtype = StorageDtype.FP8, *, factor: float | None = None) -> Tensor:
    """What `reduce_scatter_mean` computes of values FP32 [d, n]: the mean [n] (or `factor` times the sum)."""
    num_ranks, numel = values.shape
    rows = WireTensor.empty(num_ranks * numel, dtype, CPU)
    for rank, value in enumerate(values):
        rows.slice(rank * numel, (rank + 1) * numel).store_(value)
    mean = torch.empty(numel)
    accumulate_rows_(rows, num_ranks, mean, factor=1.0 / num_ranks if factor is None else factor, add=False)
    return mean


def reduce_hierarchical(values: Tensor, intra: StorageDtype) -> Tensor:
    """What `hierarchical_reduce_scatter_mean` computes on nodes of 8 ranks, or on two nodes for fewer than 16 ranks."""
    num_ranks = values.shape[0]
    nodes = values.split(min(RANKS_PER_NODE, num_ranks // 2))
    partial = torch.stack([reduce_all_to_all(node, intra, factor=1.0) for node in nodes])
    return reduce_all_to_all(partial, factor=1.0 / num_ranks)


def reduce_nccl(values: Tensor, *, num_reductions: int = 1, initial_mu: float = 1.0) -> tuple[Tensor, AutoScale]:
    """What mode nccl computes (emulated ring) at the last of several reductions of the same values; rank 0's μ."""
    num_ranks, numel = values.shape
    block_tensor = torch.arange(numel // GRAD_BLOCK) // (numel // GRAD_BLOCK // NUM_TENSORS)
    autoscales = [AutoScale(NUM_TENSORS, block_tensor, CPU, initial_mu=initial_mu) for _ in range(num_ranks)]
    sent = [WireTensor.empty(numel, StorageDtype.FP8, CPU) for _ in range(num_ranks)]
    for tensor, value in zip(sent, values, strict=True):
        tensor.store_(value)
    codes = torch.empty(num_ranks, numel, dtype=E4M3)
    mean = torch.empty(numel)
    for _ in range(num_reductions):
        shared = torch.stack([a.measure(*_parts(s)) for a, s in zip(autoscales, sent, strict=True)]).amax(dim=0)
        for rank, (autoscale, tensor) in enumerate(zip(autoscales, sent, strict=True)):
            autoscale.update(shared)
            autoscale.requantize_(*_parts(tensor), codes[rank])
        shard = numel // num_ranks
        for owner, autoscale in enumerate(autoscales):
            elements = slice(owner * shard, (owner + 1) * shard)
            blocks = slice(elements.start // GRAD_BLOCK, elements.stop // GRAD_BLOCK)
            total = ring_sum(codes[:, elements], first=(owner + 1) % num_ranks)
            autoscale.note_sum(total, blocks.start)
            mean[elements] = mean_of_sum(total, autoscale.block_scales[blocks], num_ranks)
    return mean, autoscales[0]


def _parts(tensor: WireTensor) -> tuple[Tensor, Tensor]:
    assert tensor.scales is not None
    return tensor.payload, tensor.scales


REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "all_to_all": reduce_all_to_all,
    "all_to_all, bf16 on the wire": lambda values: reduce_all_to_all(values, StorageDtype.BF16),
    "hierarchical, intra bf16": lambda values: reduce_hierarchical(values, StorageDtype.BF16),
    "hierarchical, intra fp8": lambda values: reduce_hierarchical(values, StorageDtype.FP8),
    "nccl (emulated), settled": lambda values: reduce_nccl(values, num_reductions=SETTLING_REDUCTIONS)[0],
    "nccl (emulated), first step": lambda values: reduce_nccl(values)[0],
}


def measure_accumulation(
    num_micro_batches: int, kind: Kind, *, blocks_per_tensor: int = BLOCKS_PER_TENSOR
) -> dict[str, float]:
    """SNR in dB of the mean over micro-batches and ranks, by way of accumulating. The last two ways reduce every
    micro-batch; the others add on each rank and reduce once, in E4M3.
    """
    source = GradientSource(kind, blocks_per_tensor=blocks_per_tensor)
    numel = source.numel
    in_e4m3 = WireTensor.empty(ACCUMULATION_RANKS * numel, StorageDtype.FP8, CPU)
    in_e4m3.store_(torch.zeros(in_e4m3.numel))
    in_bf16 = torch.zeros(ACCUMULATION_RANKS, numel, dtype=torch.bfloat16)
    in_fp32 = torch.zeros(ACCUMULATION_RANKS, numel)
    sharded, sharded_bf16 = torch.zeros(numel), torch.zeros(numel, dtype=torch.bfloat16)
    exact = torch.zeros(numel, dtype=torch.float64)
    rows = WireTensor.empty(ACCUMULATION_RANKS * numel, StorageDtype.FP8, CPU)
    for _ in range(num_micro_batches):
        values = source.draw(ACCUMULATION_RANKS)
        exact += values.double().mean(dim=0)
        in_e4m3.store_(in_e4m3.load() + values.view(-1))
        in_bf16 += values.bfloat16()
        in_fp32 += values
        rows.store_(values.view(-1))
        for shard in (sharded, sharded_bf16):
            accumulate_rows_(rows, ACCUMULATION_RANKS, shard, factor=1.0 / ACCUMULATION_RANKS, add=True)
    results = {
        "added in E4M3": reduce_all_to_all(in_e4m3.load().view(ACCUMULATION_RANKS, numel)),
        "added in BF16, then E4M3 once": reduce_all_to_all(in_bf16.float()),
        "added in FP32, then E4M3 once": reduce_all_to_all(in_fp32),
        ACCUMULATION_OF_OURS: sharded,
        ACCUMULATION_IN_BF16: sharded_bf16,
    }
    return {way: worst_snr_db(result, exact) for way, result in results.items()}


def measure_local_sums(num_micro_batches: list[int], kind: Kind) -> dict[str, dict[str, float]]:
    """SNR in dB of the sum that one replica stores, by dtype of the sum and number of micro-batches; nothing is cast to
    FP8. "default" is what `ModelStorage` chooses.
    """
    table: dict[str, dict[str, float]] = {"bf16": {}, "fp32": {}, "default": {}}
    for count in num_micro_batches:
        source = GradientSource(kind, blocks_per_tensor=8)
        sums = {name: torch.zeros(source.numel, dtype=StorageDtype(name).torch_dtype) for name in ("bf16", "fp32")}
        exact = torch.zeros(source.numel, dtype=torch.float64)
        for _ in range(count):
            grad = source.draw(1)[0].bfloat16()
            exact += grad.double()
            for total in sums.values():
                total.add_(grad)
        for name, total in sums.items():
            table[name][str(count)] = min(worst_snr_db(total, exact), MAX_DB)
        chosen = ModelStorage(num_micro_batches=count).of_grads(StorageClass.LINEAR).local
        table["default"][str(count)] = table["bf16" if chosen is StorageDtype.FP8 else chosen.value][str(count)]
    return table


def _table(title: str, columns: list[str], rows: dict[str, dict[str, Any]]) -> Table:
    table = Table(title=title)
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    for name, values in rows.items():
        table.add_row(name, *(f"{values[column]:.1f}" for column in columns))
    return table


if __name__ == "__main__":
    sys.exit(exit_status(partial(main, sys.argv[1:])))
