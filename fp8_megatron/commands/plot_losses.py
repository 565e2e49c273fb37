"""Draw the losses of one run, or the curves of several: fp8-megatron plot runs/a runs/b --output losses.png

Each run is an output folder or its metrics.jsonl. With several runs, gaps are measured against the first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ..errors import UserError
from ..outputs import check_output_file
from ..reporting.metrics_file import METRICS_FILE
from .arguments import Parser, path
from .program import exit_status


def metrics_path(run: Path) -> Path:
    """The metrics file of a run given as its folder or as the file itself."""
    metrics = run / METRICS_FILE if run.is_dir() else run
    if not metrics.is_file():
        raise ValueError(f"no {METRICS_FILE} at {metrics}: give the --output-dir of a run that has logged a step")
    return metrics


def run_names(runs: list[Path]) -> list[str]:
    """Folder names as labels, or whole paths where two folders have the same name."""
    folders = [run if run.is_dir() else run.parent for run in runs]
    names = [folder.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else [str(run) for run in runs]


def _with_suffix(output: Path) -> Path:
    return output if output.suffix else output.with_name(f"{output.name}.png")


def parse_arguments(words: Sequence[str] | None = None, prog: str | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(prog=prog, description=__doc__)
    parser.add_argument("runs", nargs="+", type=path, help="output folders or metrics.jsonl files")
    parser.add_argument("--output", type=path, required=True, help="PNG file to write")
    parser.add_argument("--labels", nargs="+", help="legend names, one a run (default: the folders' names)")
    parser.add_argument("--title", help="heading of the figure")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None, prog: str = "plot_losses.py") -> int:
    """Exit status: 0, or 2 after an error."""
    return exit_status(partial(run, parse_arguments(words, prog)), ValueError)


def run(options: argparse.Namespace) -> int:
    """Draw; returns the exit status.

    Raises:
        UserError: a run cannot be read, or the output cannot be written.
        ValueError: labels do not match the runs, or a run has no losses.
    """
    from ..reporting.plot import compare_losses, image_format, plot_losses

    output = _with_suffix(options.output)
    check_output_file(output, "--output")
    image_format(output)
    try:
        labels = options.labels if options.labels is not None else run_names(options.runs)
        if len(labels) != len(options.runs) or len(set(labels)) != len(labels):
            raise ValueError(f"{len(options.runs)} runs need as many different --labels, got {labels}")
        paths = [metrics_path(run) for run in options.runs]
        if len(paths) == 1:
            plot_losses(paths[0], output, title=options.title or labels[0])
        else:
            runs = dict(zip(labels, paths, strict=True))
            compare_losses(runs, output, title=options.title or "Training loss")
    except OSError as error:
        raise UserError(f"{error}; give runs that can be read") from error
    print(output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
