"""Summarise the casts of a run: python benchmarks/cast_health.py RUN --output benchmarks/results/cast_health_cpu.json

For each role: median, least and largest value of each quantity over all layers and samples.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fp8_megatron.commands.arguments import Parser, output_file, path
from fp8_megatron.commands.program import exit_status
from fp8_megatron.outputs import write_output
from fp8_megatron.reporting.health_file import HEALTH_FILE, QUANTITIES
from fp8_megatron.reporting.metrics_file import read_records


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(prog="cast_health.py", description=__doc__)
    parser.add_argument("run", type=path, help="output folder of the run")
    parser.add_argument("--output", type=output_file, required=True, help="JSON file to write")
    return parser.parse_args(words)


def summary(samples: Sequence[dict[str, list]]) -> dict[str, dict[str, dict[str, float]]]:
    """Role → quantity → median, least, largest."""
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        for quantity in QUANTITIES:
            for role, value in zip(sample["roles"], sample[quantity], strict=True):
                if value is not None:
                    values[role][quantity].append(value)
    return {
        role: {
            quantity: {"median": float(f"{median(found):.4g}"), "least": min(found), "largest": max(found)}
            for quantity, found in of_role.items()
        }
        for role, of_role in values.items()
    }


def run(options: argparse.Namespace) -> int:
    """Write the summary; returns the exit status."""
    samples = read_records(options.run / HEALTH_FILE)
    result = {"samples": len(samples), "roles": summary(samples)}
    write_output(options.output, (json.dumps(result, indent=1) + "\n").encode(), "--output")
    print(options.output)
    return 0


def main(words: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 after an error."""
    return exit_status(partial(run, parse_arguments(words)), ValueError)


if __name__ == "__main__":
    sys.exit(main())
