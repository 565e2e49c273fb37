"""Scaling over the GPUs of a node: compare.py for several numbers of GPUs and layouts, in one table.

python benchmarks/scaling.py --model 7b --gpus 1 2 4 --tensor-parallel 2 4 --runs O3-lean bf16 --output-dir runs/scaling

weak    every GPU keeps its micro-batches; the global batch grows with the GPUs
strong  the global batch stays what the most GPUs have in weak scaling; fewer GPUs take more micro-batches
TP      the most GPUs, each layer over 2 and 4 of them with sequence parallelism; the global batch of strong scaling

Everything after -- goes to pretrain_gpt.py. Speed is per GPU; efficiency is against the fewest GPUs of the same run and
kind (TP: against the same GPUs without it). Writes scaling.json and scaling.md; every run's own files lie beside them.
--side-by-side runs points that need few GPUs at the same time, each on separate GPUs; they share only the host.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fp8_megatron.commands.arguments import Parser, output_folder, whole
from fp8_megatron.commands.program import exit_status
from fp8_megatron.config.io import own_and_run_flags


@dataclass(frozen=True)
class Layout:
    """One point: `kind` is weak, strong or tp; the micro-batches are those of a data-parallel rank and step."""

    kind: str
    num_gpus: int
    tensor_parallel: int
    num_micro_batches: int

    @property
    def name(self) -> str:
        """Its folder."""
        return f"{self.kind}-{self.num_gpus}gpus" + (f"-tp{self.tensor_parallel}" if self.tensor_parallel > 1 else "")

    def flags(self) -> list[str]:
        """For pretrain_gpt.py."""
        if self.tensor_parallel == 1:
            return []
        return ["--tensor-model-parallel-size", str(self.tensor_parallel), "--sequence-parallel"]


def plan(gpus: Sequence[int], tensor_parallel: Sequence[int], num_micro_batches: int) -> list[Layout]:
    """Every point, each once: the most GPUs are the same in weak and strong scaling.

    Raises:
        ValueError: a number of GPUs that does not divide the largest.
    """
    most = max(gpus)
    for number in (*gpus, *tensor_parallel):
        if number < 1 or most % number:
            raise ValueError(f"{number} does not divide the most GPUs ({most})")
    weak = [Layout("weak", n, 1, num_micro_batches) for n in sorted(set(gpus))]
    strong = [Layout("strong", n, 1, num_micro_batches * most // n) for n in sorted(set(gpus) - {most})]
    tensor = [Layout("tp", most, t, num_micro_batches * t) for t in sorted(set(tensor_parallel) - {1})]
    return weak + strong + tensor


def rounds(layouts: Sequence[Layout], most: int, *, side_by_side: bool) -> list[list[tuple[Layout, list[int]]]]:
    """Which points run at the same time, each with the indices of its GPUs; side by side, the largest come first."""
    if not side_by_side:
        return [[(layout, list(range(layout.num_gpus)))] for layout in layouts]
    planned: list[list[tuple[Layout, list[int]]]] = []
    taken = most
    for layout in sorted(layouts, key=lambda point: -point.num_gpus):
        if taken + layout.num_gpus > most:
            planned.append([])
            taken = 0
        planned[-1].append((layout, list(range(taken, taken + layout.num_gpus))))
        taken += layout.num_gpus
    return planned


def rows(measured: dict[Layout, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The table's rows from every point's results of compare.py, with the efficiency of each."""
    most = max(layout.num_gpus for layout in measured)
    speeds = {
        (layout, result["name"]): result["tokens_per_second_per_gpu"]
        for layout, results in measured.items()
        for result in results
    }
    fewest = {
        kind: min((p for p in measured if p.kind == kind), key=lambda p: p.num_gpus, default=None) for kind in _KINDS
    }
    full = next((layout for layout in measured if layout.kind == "weak" and layout.num_gpus == most), None)
    table = []
    for layout, results in measured.items():
        kinds = ["weak", "strong"] if layout is full and fewest["strong"] is not None else [layout.kind]
        for kind, result in ((kind, result) for kind in kinds for result in results):
            base = full if kind == "tp" else fewest[kind]
            against = speeds.get((base, result["name"])) if base is not None else None
            table.append(
                {
                    "kind": kind,
                    "run": result["name"],
                    "gpus": layout.num_gpus,
                    "tensor_parallel": layout.tensor_parallel,
                    "micro_batches": layout.num_micro_batches,
                    "tokens_per_second_per_gpu": result["tokens_per_second_per_gpu"],
                    "step_ms": result["step_ms"],
                    "peak_gb": result["peak_gb"],
                    "efficiency": None if not against else result["tokens_per_second_per_gpu"] / against,
                }
            )
    return sorted(table, key=lambda row: (_KINDS.index(row["kind"]), row["run"], row["gpus"], row["tensor_parallel"]))


_KINDS = ("weak", "strong", "tp")


def main() -> int:
    """Run every point, then print and write the table; returns the exit status."""
    args = _parse()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    measured: dict[Layout, list[dict[str, Any]]] = {}
    commands: dict[str, str] = {}
    status = 0
    for at_once in rounds(args.plan, max(args.gpus), side_by_side=args.side_by_side):
        processes = []
        for layout, gpus in at_once:
            command = _command(args, layout, args.output_dir / layout.name)
            # If compare.py fails, an older file would be taken for this point's.
            (args.output_dir / layout.name / "comparison.json").unlink(missing_ok=True)
            commands[layout.name] = shlex.join(["python", *command[1:]])
            processes.append(subprocess.Popen(command, env=_environment(gpus)))
        for process in processes:
            status |= process.wait() != 0
        for layout, _ in at_once:
            result = args.output_dir / layout.name / "comparison.json"
            if result.is_file():
                measured[layout] = json.loads(result.read_text())["results"]
                _write(args, commands, rows(measured))
    if measured:
        Console(width=130).print(_table(args, rows(measured)))
    return int(status)


def _parse() -> argparse.Namespace:
    parser = Parser(
        description="Weak and strong scaling, and tensor parallelism, on one node.",
    )
    parser.add_argument("--model", required=True, help="as compare.py's")
    parser.add_argument("--gpus", type=whole(), nargs="+", default=[1, 2, 4])
    parser.add_argument("--tensor-parallel", type=whole(), nargs="*", default=[])
    parser.add_argument("--runs", nargs="+", default=["O3-lean", "bf16"], help="as compare.py's")
    parser.add_argument("--micro-batch-size", type=whole(), default=4)
    parser.add_argument("--num-micro-batches", type=whole(), default=1, help="per rank and step in weak scaling")
    parser.add_argument("--train-iters", type=whole(), default=14)
    parser.add_argument("--timeout", type=whole(most=10**7), default=600, help="seconds for one run")
    parser.add_argument("--side-by-side", action="store_true", help="several points at once, each on GPUs of its own")
    parser.add_argument("--output-dir", type=output_folder, required=True)
    own, passed = own_and_run_flags(sys.argv[1:])
    args = parser.parse_args(own)
    args.passed = passed
    try:
        args.plan = plan(args.gpus, args.tensor_parallel, args.num_micro_batches)
    except ValueError as error:
        parser.error(str(error))
    return args


def _environment(gpus: Sequence[int]) -> dict[str, str]:
    """This process's environment, limited to these of its GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(index) for index in range(max(gpus) + 1)]
    return {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(names[index] for index in gpus)}


def _command(args: argparse.Namespace, layout: Layout, folder: Path) -> list[str]:
    compare = Path(__file__).parent / "compare.py"
    return [
        *(sys.executable, str(compare), "--model", args.model, "--runs", *args.runs),
        *("--nproc-per-node", str(layout.num_gpus), "--micro-batch-size", str(args.micro_batch_size)),
        *("--num-micro-batches", str(layout.num_micro_batches), "--train-iters", str(args.train_iters)),
        *("--profiled-steps", "0"),  # the table has no breakdown
        *("--timeout", str(args.timeout), "--output-dir", str(folder), "--", *args.passed, *layout.flags()),
    ]


def _table(args: argparse.Namespace, table_rows: list[dict[str, Any]]) -> Table:
    table = Table(title=f"GPT-{args.model}, micro-batch {args.micro_batch_size}")
    for heading in ("scaling", "run", "GPUs", "TP", "micro-batches", "tok/s/GPU", "step ms", "peak GB", "efficiency"):
        table.add_column(heading, justify="left" if heading in ("scaling", "run") else "right")
    for row in table_rows:
        table.add_row(
            row["kind"],
            row["run"],
            *(str(row[name]) for name in ("gpus", "tensor_parallel", "micro_batches")),
            f"{row['tokens_per_second_per_gpu']:,.0f}",
            f"{row['step_ms']:.1f}",
            f"{row['peak_gb']:.1f}",
            "-" if row["efficiency"] is None else f"{row['efficiency']:.1%}",
        )
    return table


def _write(args: argparse.Namespace, commands: dict[str, str], table_rows: list[dict[str, Any]]) -> None:
    report = {"command": shlex.join(["python", *sys.argv]), "commands": commands, "rows": table_rows}
    (args.output_dir / "scaling.json").write_text(json.dumps(report, indent=1) + "\n")
    with (args.output_dir / "scaling.md").open("w") as file:
        Console(file=file, width=130).print(_table(args, table_rows))


if __name__ == "__main__":
    sys.exit(exit_status(main))
