"""Train one configuration at several precision levels from one seed and print losses, speed and memory side by side.

    fp8-megatron compare --levels bf16 O1 O2 O3 --nproc-per-node 2 --output-dir runs/levels -- \
        --config configs/gpt_quickstart.yaml --train-iters 200

All flags after -- go to training. The first level is the reference. Levels run one after another on the same devices;
those of --speed-levels run only a few steps, for speed and memory. Writes one folder per level, comparison.json and
comparison.png. (fp8-megatron plot draws existing runs.)
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..config.checks import ConfigError, check_config
from ..config.command_line import flags_of
from ..config.io import own_and_run_flags
from ..outputs import write_output, writing_to
from ..reporting.metrics_file import METRICS_FILE, read_records
from .arguments import Parser, output_folder, whole
from .child_runs import run_environment, training_command
from .launch import gpus_for_ranks
from .levels import levels_of, training_config
from .origin import origin
from .program import exit_status, share_import_path

LEVELS = levels_of("bf16", "te-tensorwise", "te-delayed", "O1", "O2", "O3", "O3-delayed", "O3-blockwise")
#: Steps left out of the throughput: compilation, library start-up, the allocator's first blocks.
WARM_UP_STEPS = 10
#: Ranks that a node can hold.
MAX_RANKS = 1024


def main(words: Sequence[str] | None = None, prog: str = "compare_levels.py") -> int:
    """Exit status: 0, 1 if a level failed, or 2 after an error."""
    return exit_status(partial(run, _parse(sys.argv[1:] if words is None else words, prog)), OSError)


def run(args: argparse.Namespace) -> int:
    """Run the levels, then print the table; returns the exit status. A level that fails is left out."""
    check_levels(args)
    on_gpus = gpus_for_ranks(args.nproc_per_node, "--nproc-per-node") > 0
    share_import_path()
    with writing_to(args.output_dir, "--output-dir"):
        args.output_dir.mkdir(parents=True, exist_ok=True)
    for name in ("comparison.json", "comparison.png"):  # from an older comparison
        (args.output_dir / name).unlink(missing_ok=True)
    results: dict[str, dict[str, Any]] = {}
    status = 0
    for level in [*args.levels, *args.speed_levels]:
        folder = args.output_dir / level
        command = training_command(_flags(args, level, folder), args.nproc_per_node, on_gpus=on_gpus)
        print(f"== {level}: {shlex.join(command)}", flush=True)
        ended = subprocess.run(command, check=False, env=run_environment()).returncode
        if ended != 0:
            print(f"error: {level} ended with status {ended}", file=sys.stderr)
            status = 1
            continue
        try:
            figures = _read(folder)
        except (OSError, ValueError, KeyError, TypeError) as error:  # the last two: a record without a figure
            print(f"error: {level} left no figures: {error}", file=sys.stderr)
            status = 1
            continue
        results[level] = {"command": shlex.join(command), **figures}
        _add_gaps(args, results)
        _write(args, results)
    if not results:
        return status
    _print(results, args.levels[0])
    for level, result in results.items():
        if result["final_loss"] is None:
            print(f"error: {level} ends without a finite loss", file=sys.stderr)
            status = 1
    return max(status, _plot(args, results))


def _parse(words: Sequence[str], prog: str) -> argparse.Namespace:
    parser = Parser(prog=prog, description=__doc__, passes_flags=True)
    default = ["bf16", "O1", "O2", "O3"]
    parser.add_argument("--levels", nargs="+", choices=list(LEVELS), default=default, help="the first is the reference")
    parser.add_argument("--speed-levels", nargs="*", choices=list(LEVELS), default=[], help="levels to time only")
    parser.add_argument("--speed-iters", type=whole(), default=60, help="their steps, at most (default 60)")
    parser.add_argument("--nproc-per-node", type=whole(most=MAX_RANKS), default=1, help="ranks of each run (default 1)")
    parser.add_argument("--output-dir", type=output_folder, required=True, help="one folder per level goes in here")
    own, passed = own_and_run_flags(words)
    args = parser.parse_args(own)
    args.passed = passed
    if not passed:
        parser.error("no flags of the run; put them behind --, e.g. -- --config FILE --data-path PREFIX")
    if len(args.levels) < 2:
        parser.error(f"--levels {args.levels[0]}: give two or more to compare")
    every = [*args.levels, *args.speed_levels]
    if repeated := [level for level in every if every.count(level) > 1]:
        parser.error(f"--levels and --speed-levels name {repeated[0]} twice; a level has one folder, give it once")
    return args


def check_levels(args: argparse.Namespace) -> None:
    """Check the configuration of every level before the first one runs.

    Raises:
        ConfigError: a level cannot run with it, it does not train, or a flag of the runs has no effect on it.
    """
    for level in [*args.levels, *args.speed_levels]:
        try:
            own = _own_flags(args, level, args.output_dir / level)
            _check_not_overridden(args.passed, own)
            check_config(training_config([*args.passed, *own]), args.nproc_per_node)
        except ConfigError as error:
            raise ConfigError(f"level {level}: {error}") from error


def _check_not_overridden(passed: Sequence[str], own: Sequence[str]) -> None:
    """Raise `ConfigError` for a flag of the runs whose setting one of this command's flags sets to another value."""
    ours = {one.name.removeprefix("no_"): one for one in flags_of(own)}
    for given in flags_of(passed):
        other = ours.get(given.name.removeprefix("no_"))
        if other is not None and (given.name, given.words) != (other.name, other.words):
            raise ConfigError(
                f"{' '.join((given.flag, *given.words))} has no effect: this command gives the run "
                f"{' '.join((other.flag, *other.words))}; leave it out"
            )


def _flags(args: argparse.Namespace, level: str, folder: Path) -> list[str]:
    """Flags of pretrain_gpt.py for a level."""
    return [*args.passed, *_own_flags(args, level, folder)]


def _own_flags(args: argparse.Namespace, level: str, folder: Path) -> list[str]:
    """Those that this command sets."""
    own = [*LEVELS[level], "--output-dir", str(folder), "--save", "none", "--save-interval", "none"]
    timed = ["--exit-interval", str(args.speed_iters)]  # it stops early, and its schedules stay those of a whole run
    return [*own, *(timed if level in args.speed_levels else [])]


def _read(folder: Path) -> dict[str, Any]:
    """A run's figures from its metrics.jsonl: the final loss is the last validation's, or else the mean of 10 steps. A
    loss that is not finite is None.

    Raises:
        ValueError: the file has no training step.
    """
    records = read_records(folder / METRICS_FILE)
    steps = [record for record in records if record["kind"] == "train"]
    if not steps:
        raise ValueError(f"no training step in {folder / METRICS_FILE}")
    valid = [record for record in records if record["kind"] == "eval" and record["split"] == "valid"]
    timed = steps[WARM_UP_STEPS:] or steps
    last = [record["loss"] for record in steps[-10:]]
    train_loss = None if None in last else statistics.fmean(last)
    return {
        "num_steps": len(steps),
        "final_train_loss": train_loss,
        "final_validation_loss": valid[-1]["loss"] if valid else None,
        "final_loss": valid[-1]["loss"] if valid else train_loss,
        "tokens_per_second_per_gpu": statistics.median(r["tokens_per_second_per_gpu"] for r in timed),
        "tflops_per_gpu_full_attention": statistics.median(r["tflops_per_gpu"] for r in timed),
        "step_seconds": statistics.median(r["step_seconds"] for r in timed),
        "peak_memory_gib": max(r["peak_memory_gib"] for r in steps),
        "skipped_steps": steps[-1]["skipped_steps"],
        "train_losses": {r["iteration"]: r["loss"] for r in steps if r["iteration"] % max(1, len(steps) // 50) == 0},
        "validation_losses": {r["iteration"]: r["loss"] for r in valid},
    }


def _add_gaps(args: argparse.Namespace, results: dict[str, dict[str, Any]]) -> None:
    """Add each level's final loss minus the first level's; None if either has none or the level was only timed."""
    reference = results.get(args.levels[0], {}).get("final_loss")
    for level, result in results.items():
        loss = None if level in args.speed_levels else result["final_loss"]
        result["loss_gap"] = None if loss is None or reference is None else loss / reference - 1.0


def _write(args: argparse.Namespace, results: dict[str, dict[str, Any]]) -> None:
    report = {"command": shlex.join(["python", *sys.argv]), **origin(), "results": results}
    text = json.dumps(report, indent=1, allow_nan=False) + "\n"
    write_output(args.output_dir / "comparison.json", text.encode(), "--output-dir")


def _plot(args: argparse.Namespace, results: dict[str, dict[str, Any]]) -> int:
    """Draw the losses of all levels that have losses; returns the exit status."""
    from ..reporting.plot import compare_losses

    output = args.output_dir / "comparison.png"
    runs = {level: args.output_dir / level / METRICS_FILE for level in args.levels if level in results}
    try:
        compare_losses(runs, output, title="Training loss by precision level")
    except ValueError as error:
        print(f"error: no {output}: {error}", file=sys.stderr)
        return 1
    return 0


def _print(results: dict[str, dict[str, Any]], reference: str) -> None:
    table = Table(title=f"Levels side by side (gap against {reference})")
    for heading in ("level", "validation loss", "train loss", "gap", "tok/s/GPU", "step ms", "peak GiB", "skipped"):
        table.add_column(heading, justify="left" if heading == "level" else "right")
    for level, result in results.items():
        table.add_row(
            level,
            _shown(result["final_validation_loss"]) if result["validation_losses"] else "-",
            _shown(result["final_train_loss"]),
            "-" if result["loss_gap"] is None else f"{result['loss_gap']:+.2%}",
            f"{result['tokens_per_second_per_gpu']:,.0f}",
            f"{1e3 * result['step_seconds']:.1f}",
            f"{result['peak_memory_gib']:.2f}",
            str(result["skipped_steps"]),
        )
    Console(width=110).print(table)


def _shown(loss: float | None) -> str:
    return "NaN" if loss is None else f"{loss:.4f}"


if __name__ == "__main__":
    sys.exit(main())
