"""How far losses lie from the last steps': python benchmarks/loss_spikes.py RUN ... --output loss_spikes_cpu.json

For each run: the steps, and the largest distances of a loss above the last steps', in the robust standard deviations
that `--loss-spike-threshold` counts. A threshold belongs between those of healthy runs and those of disturbed ones.
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


def distances(losses: Sequence[float | None]) -> list[float]:
    """Of every loss but those that are not finite; 0 for the first ones, which have too few before them."""
    window, found = RobustWindow(), []
    for loss in losses:
        if loss is not None and math.isfinite(loss):
            found.append(window.deviations(loss))
            window.add(loss)
    return found


def of_run(folder: Path) -> dict[str, Any]:
    """The row of one run.

    Raises:
        ValueError: it has no steps.
    """
    steps = [record for record in read_records(folder / METRICS_FILE) if record["kind"] == "train"]
    if not steps:
        raise ValueError(f"{folder / METRICS_FILE} has no steps; name the output folder of a run")
    found = distances([record["loss"] for record in steps])
    largest = sorted(((round(far, 2), steps[place]["iteration"]) for place, far in enumerate(found)), reverse=True)
    return {"run": folder.name, "steps": len(steps), "largest": largest[0][0], "at": largest[:_KEPT]}


def run(options: argparse.Namespace) -> int:
    """Write the rows; returns the exit status."""
    rows = [of_run(folder) for folder in options.runs]
    for row in rows:
        print(f"{row['run']}: {row['steps']} steps, {row['largest']:.2f} at iteration {row['at'][0][1]}")
    result = {"runs": rows, "steps": sum(row["steps"] for row in rows), "largest": max(row["largest"] for row in rows)}
    write_output(options.output, (json.dumps(result, indent=1) + "\n").encode(), "--output")
    return 0


def main(words: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 after an error."""
    return exit_status(partial(run, parse_arguments(words)), ValueError, OSError)


if __name__ == "__main__":
    sys.exit(main())
