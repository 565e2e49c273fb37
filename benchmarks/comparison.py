"""Output of compare.py: a table, a chart, and a file with every figure."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.provenance import commit, device_name, versions

#: Packages whose version changes what is measured.
_PACKAGES = ("torch", "triton", "megatron-core", "transformer_engine", "torchao")


@dataclass
class Result:
    """One run. Memory in 10^9 bytes; TFLOP/s count attention in full (Megatron's convention) and causally. A loss that
    is not finite is None.

    Profiled steps are by rank (compute, communication without overlap, idle). Times by kind of kernel are rank 0's.
    `recorded`: steps were a CUDA graph, whether asked for or chosen.
    """

    name: str
    command: str
    tokens_per_second_per_gpu: float
    step_ms: float
    tflops_per_gpu: float
    causal_tflops_per_gpu: float
    mfu: float | None
    peak_gb: float
    final_loss: float | None
    losses: list[float | None]
    ms_by_kind_of_kernel: dict[str, float] = field(default_factory=dict)
    profiled_step_ms: list[dict[str, float]] = field(default_factory=list)
    recorded: bool = False

    @property
    def broken_steps(self) -> list[int]:
        """Steps, from 1, without a finite loss: their speed means nothing."""
        return [step for step, loss in enumerate(self.losses, 1) if loss is None]


def finite(loss: float | None) -> float | None:
    return loss if loss is not None and math.isfinite(loss) else None


def table_of(args: argparse.Namespace, results: list[Result]) -> Table:
    work = f"GPT-{args.model}, {args.nproc_per_node} GPUs, micro {args.micro_batch_size} × {args.num_micro_batches}"
    table = Table(title=work)
    for heading in ("run", "tok/s/GPU", "step ms", "TFLOP/s/GPU", "causal", "MFU", "peak GB", "last loss"):
        table.add_column(heading, justify="left" if heading == "run" else "right")
    for result in results:
        table.add_row(
            result.name,
            f"{result.tokens_per_second_per_gpu:,.0f}",
            f"{result.step_ms:.1f}",
            f"{result.tflops_per_gpu:.0f}",
            f"{result.causal_tflops_per_gpu:.0f}",
            "-" if result.mfu is None else f"{result.mfu:.1%}",
            f"{result.peak_gb:.1f}",
            "NaN" if result.final_loss is None else f"{result.final_loss:.4f}",
        )
    return table


def write_report(args: argparse.Namespace, results: list[Result]) -> None:
    report: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "commit": commit(),
        "device": device_name(),
        "versions": versions(_PACKAGES),
        "results": [asdict(result) for result in results],
    }
    (args.output_dir / "comparison.json").write_text(json.dumps(report, indent=1) + "\n")
    with (args.output_dir / "comparison.md").open("w") as file:
        Console(file=file, width=150).print(table_of(args, results))
    _plot(args, results)


def _plot(args: argparse.Namespace, results: list[Result]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [result.name for result in results]
    figure, (speed, memory) = pyplot.subplots(1, 2, figsize=(11, 0.5 * len(names) + 1.6), sharey=True)
    for axes, values, title in (
        (speed, [result.tokens_per_second_per_gpu for result in results], "tokens/s/GPU"),
        (memory, [result.peak_gb for result in results], "peak memory, GB"),
    ):
        bars = axes.barh(names, values, color=["#2a6f97" if name.startswith("O") else "#b8b8b8" for name in names])
        axes.bar_label(bars, fmt="{:,.0f}" if axes is speed else "{:.1f}", padding=3)
        axes.set_title(title)
        axes.margins(x=0.15)
        axes.spines[["top", "right"]].set_visible(False)
    speed.invert_yaxis()
    figure.suptitle(f"GPT-{args.model}, micro {args.micro_batch_size} × {args.num_micro_batches}")
    figure.tight_layout()
    figure.savefig(args.output_dir / "comparison.png", dpi=150)
    pyplot.close(figure)
