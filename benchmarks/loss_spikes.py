"""How far losses lie from the last steps': python benchmarks/loss_spikes.py RUN ... --output loss_spikes_cpu.json

For each run: the steps, and the largest distances above the last steps', in the robust standard deviations that
`--loss-spike-threshold` counts: of the loss, and of the logarithm of the gradient norm. A threshold belongs between
those of healthy runs and those of disturbed ones.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fp8_megatron.commands.arguments import Parser, output_file, path
from fp8_megatron.commands.program import exit_status
from fp8_megatron.outputs import write_output
from fp8_megatron.reporting.metrics_file import METRICS_FILE, read_records
from fp8_megatron.training.loss_spikes import RobustWindow

#: Largest distances that are kept of a run.
_KEPT = 4


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(prog="loss_spikes.py", description=__doc__)
    parser.add_argument("runs", type=path, nargs="+", help="output folders of runs")
    parser.add_argument("--output", type=output_file, required=True, help="JSON file to write")
    return parser.parse_args(words)


def largest_distances(values: Sequence[tuple[int, float | None]]) -> list[tuple[float, int]]:
    """(distance, iteration) of the values that lie farthest above those before them, the farthest first.

    Args:
        values: (iteration, value). A value that is not finite is left out.
    """
    window, found = RobustWindow(), []
    for iteration, value in values:
        if value is not None and math.isfinite(value):
            found.append((round(window.deviations(value), 2), iteration))
            window.add(value)
    return sorted(found, reverse=True)[:_KEPT]


def of_run(folder: Path) -> dict[str, Any]:
    """The row of one run.

    Raises:
        ValueError: it has no steps.
    """
    steps = [record for record in read_records(folder / METRICS_FILE) if record["kind"] == "train"]
    if not steps:
        raise ValueError(f"{folder / METRICS_FILE} has no steps; name the output folder of a run")
    losses = largest_distances([(record["iteration"], record["loss"]) for record in steps])
    norms = largest_distances([(record["iteration"], math.log(record["grad_norm"] or math.nan)) for record in steps])
    figures = {"largest": losses[0][0], "at": losses, "largest_norm": norms[0][0], "norm_at": norms}
    return {"run": folder.name, "steps": len(steps), **figures}


def run(options: argparse.Namespace) -> int:
    """Write the rows; returns the exit status."""
    rows = [of_run(folder) for folder in options.runs]
    for row in rows:
        place, norm_place = row["at"][0][1], row["norm_at"][0][1]
        print(
            f"{row['run']}: {row['steps']} steps; loss {row['largest']:.2f} at iteration {place}, "
            f"gradient norm {row['largest_norm']:.2f} at iteration {norm_place}"
        )
    result: dict[str, Any] = {"runs": rows, "steps": sum(row["steps"] for row in rows)}
    result |= {name: max(row[name] for row in rows) for name in ("largest", "largest_norm")}
    write_output(options.output, (json.dumps(result, indent=1) + "\n").encode(), "--output")
    return 0


def main(words: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 after an error."""
    return exit_status(partial(run, parse_arguments(words)), ValueError, OSError)


if __name__ == "__main__":
    sys.exit(main())
