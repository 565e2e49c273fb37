"""The FP8-LM paper's ablations of scaling (arXiv 2310.18313, section 2.1 and figure 7), on a CPU.

python benchmarks/ablations.py --output benchmarks/results/ablations_cpu.json

How gradients are scaled for an FP8 sum over N ranks: divided by N before the sum (pre), after it (post), with
auto-scaling (auto), and this project's sum, which sends E4M3 with block scales and adds in FP32 (ours). For each, the
signal-to-noise ratio of the mean against FP64; the underflow, non-zero elements that are sent as zero; the overflow,
elements of the sum at ±448. pre, post and auto are one scale a tensor and an emulated ring of E4M3 sums, with μ = 1/N,
1, and what auto-scaling settles at.

How operands of GEMMs are scaled: from their own values (current), from the amaxes of steps before (delayed), and per
1 × 128 elements (blockwise). The operand is normal and has channels of 30 times that size. It is as large as in the
steps before, 3 times as large, or 1 / 100 as large, as after a spike.

Ranks are virtual. The gradient is that of tools/compare_reductions.py: eight tensors a decade apart, blocks over two
decades within each. docs/ablations.md sets the results beside the paper's.
"""

from __future__ import annotations

import json
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

# Run as a script from a clone, installed or not.
sys.path.insert(0, str(Path(__file__).parents[1]))
from fp8_megatron.collectives.native_sum import ring_sum
from fp8_megatron.commands.arguments import Parser, output_file, whole
from fp8_megatron.commands.program import exit_status
from fp8_megatron.formats import E4M3, GRAD_BLOCK, MAX_FINITE, StorageDtype
from fp8_megatron.kernels import ops
from fp8_megatron.outputs import write_output
from fp8_megatron.quantization.stats import snr_db
from tools.compare_reductions import (
    BLOCKS_PER_TENSOR,
    NUM_TENSORS,
    GradientSource,
    Kind,
    reduce_all_to_all,
    reduce_nccl,
    worst_snr_db,
)

KINDS: tuple[Kind, ...] = ("uncorrelated", "correlated", "heavy tails")
NUM_RANKS = (8, 64)
#: Size of an operand against the steps before.
GROWTHS = {"as before": 1.0, "3 times": 3.0, "after a spike": 0.01}
#: Reductions after which auto-scaling has settled, from μ = 1.
_SETTLING_REDUCTIONS = 10
_MAX = MAX_FINITE[E4M3]


@dataclass(frozen=True)
class WireFigures:
    """What one way of scaling makes of a gradient.

    Attributes:
        snr_db: of the mean, the worst of the tensors.
        underflow: share of non-zero elements that are sent as zero, over all ranks.
        overflow: share of the sum's elements at ±448; with block scales and an FP32 sum there are none.
        mu: what the payloads were multiplied by; None with block scales.
    """

    snr_db: float
    underflow: float
    overflow: float
    mu: float | None


@dataclass(frozen=True)
class CastFigures:
    """What one cast to E4M3 makes of an operand.

    Attributes:
        snr_db: of the cast.
        underflow: share of non-zero elements that become zero. saturated: share that is clamped to ±448.
    """

    snr_db: float
    underflow: float
    saturated: float


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = Parser(description=__doc__)
    parser.add_argument("--output", type=output_file, help="JSON file to write")
    parser.add_argument("--num-ranks", type=whole(least=2, most=512), nargs="+", default=list(NUM_RANKS))
    parser.add_argument("--blocks-per-tensor", type=whole(most=1 << 20), default=BLOCKS_PER_TENSOR)
    args = parser.parse_args(words)
    blocks = args.blocks_per_tensor
    if wrong := [n for n in args.num_ranks if NUM_TENSORS * blocks % n]:
        parser.error(f"--num-ranks {wrong[0]} does not divide {NUM_TENSORS} × --blocks-per-tensor({blocks})")
    wire = {kind: {str(n): measure_wire(kind, n, blocks_per_tensor=blocks) for n in args.num_ranks} for kind in KINDS}
    for kind, by_ranks in wire.items():
        Console(width=110).print(_table(kind, by_ranks))
    casts = {case: measure_casts(growth) for case, growth in GROWTHS.items()}
    Console(width=110).print(_table_of_casts(casts))
    if args.output is not None:
        report = {
            "command": shlex.join(["python", "benchmarks/ablations.py", *words]),
            "device": "cpu",
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "casts": {case: {way: asdict(found) for way, found in ways.items()} for case, ways in casts.items()},
            "wire": {
                kind: {n: {way: asdict(found) for way, found in ways.items()} for n, ways in by_ranks.items()}
                for kind, by_ranks in wire.items()
            },
        }
        write_output(args.output, (json.dumps(report, indent=1) + "\n").encode(), "--output")
    return 0


def measure_wire(kind: Kind, num_ranks: int, *, blocks_per_tensor: int = BLOCKS_PER_TENSOR) -> dict[str, WireFigures]:
    """Figures of every way of scaling one gradient of `num_ranks` ranks."""
    values = GradientSource(kind, blocks_per_tensor=blocks_per_tensor).draw(num_ranks)
    exact = values.double().mean(dim=0)
    _, autoscale = reduce_nccl(values, num_reductions=_SETTLING_REDUCTIONS)
    settled = autoscale.mu.repeat_interleave(values.shape[1] // NUM_TENSORS)
    tensors = torch.ones_like(settled)
    return {
        "pre": native_sum(values, exact, tensors / num_ranks),
        "post": native_sum(values, exact, tensors),
        "auto": native_sum(values, exact, settled),
        "ours": _block_scaled_sum(values, exact),
    }


def measure_casts(growth: float) -> dict[str, CastFigures]:
    """Figures of every way of scaling an operand that is `growth` times as large as in the steps before."""
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(1024, 1024, generator=generator)
    before[:, ::64] *= 30.0
    operand = growth * before
    blocks = operand.view(1024, -1, GRAD_BLOCK).abs().amax(dim=-1)
    scales = {
        "current": operand.abs().max() / _MAX,
        "delayed": before.abs().max() / _MAX,
        "blockwise": ops.round_up_to_power_of_two(blocks / _MAX).repeat_interleave(GRAD_BLOCK, dim=1),
    }
    found = {}
    for way, scale in scales.items():
        scaled = operand / scale
        sent = scaled.clamp(-_MAX, _MAX).to(E4M3).float()
        found[way] = CastFigures(
            snr_db=snr_db(sent * scale, operand),
            underflow=_underflow(operand, sent),
            saturated=(scaled.abs() > _MAX * (1 + 2**-20)).float().mean().item(),
        )
    return found


def native_sum(values: Tensor, exact: Tensor, mu: Tensor) -> WireFigures:
    """A ring's sum of E4M3 payloads with one scale a tensor over all ranks.

    Args:
        values: FP32 [ranks, n]. exact: their mean. mu: [n], what each tensor's payloads are multiplied by.
    """
    num_ranks, numel = values.shape
    amaxes = values.abs().amax(dim=0).view(NUM_TENSORS, -1).amax(dim=1).repeat_interleave(numel // NUM_TENSORS)
    scale = ops.round_up_to_power_of_two(amaxes / _MAX / mu)
    codes = torch.stack([(value / scale).clamp(-_MAX, _MAX).to(E4M3) for value in values])
    shard = numel // num_ranks
    parts = [
        ring_sum(codes[:, owner * shard : (owner + 1) * shard], first=(owner + 1) % num_ranks)
        for owner in range(num_ranks)
    ]
    total = torch.cat(parts).float()
    return WireFigures(
        snr_db=worst_snr_db(total * scale / num_ranks, exact),
        underflow=_underflow(values, codes.float()),
        overflow=(total.abs() >= _MAX).float().mean().item(),
        mu=mu.float().mean().item(),
    )


def _block_scaled_sum(values: Tensor, exact: Tensor) -> WireFigures:
    sent = torch.stack([reduce_all_to_all(value[None], StorageDtype.FP8) for value in values])
    return WireFigures(
        snr_db=worst_snr_db(reduce_all_to_all(values), exact),
        underflow=_underflow(values, sent),
        overflow=0.0,
        mu=None,
    )


def _underflow(values: Tensor, sent: Tensor) -> float:
    nonzero = values != 0
    return ((sent == 0) & nonzero).sum().item() / max(1, nonzero.sum().item())


def _table_of_casts(casts: dict[str, dict[str, CastFigures]]) -> Table:
    table = Table(title="Scaling of an operand")
    for heading in ("size", "way", "SNR, dB", "underflow", "saturated"):
        table.add_column(heading, justify="right" if heading in ("SNR, dB", "underflow", "saturated") else "left")
    for case, ways in casts.items():
        for way, found in ways.items():
            table.add_row(case, way, f"{found.snr_db:.1f}", f"{found.underflow:.4%}", f"{found.saturated:.4%}")
    return table


def _table(kind: str, by_ranks: dict[str, dict[str, WireFigures]]) -> Table:
    table = Table(title=f"Scaling for the wire, {kind} gradients")
    for heading in ("ranks", "way", "SNR, dB", "underflow", "overflow", "μ"):
        table.add_column(heading, justify="left" if heading == "way" else "right")
    for ranks, ways in by_ranks.items():
        for way, found in ways.items():
            mu = "" if found.mu is None else f"{found.mu:.4f}"
            table.add_row(ranks, way, f"{found.snr_db:.1f}", f"{found.underflow:.4%}", f"{found.overflow:.4%}", mu)
    return table


if __name__ == "__main__":
    sys.exit(exit_status(partial(main)))
