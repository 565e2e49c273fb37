"""Train under faults drawn at random, and compare the end with an undisturbed run, bit for bit. On CPU ranks.

    python benchmarks/chaos.py --ranks 2 --faults 60 --seed 1 --output chaos.json

A tiny model trains under ``torchrun --max-restarts``. The driver brings one fault after the other, each when training
has reached a drawn iteration, and waits until training goes on. Where torchrun itself has ended, the driver starts the
same command again, as a scheduler would. After each fault it checks what was lost. Kinds of faults, in equal numbers:

    kill rank, stop rank, term rank     SIGKILL, SIGSTOP, SIGTERM of one rank
    kill torchrun, term torchrun        SIGKILL, SIGTERM of torchrun; after SIGKILL its ranks live on for a while
    damaged checkpoint                  a file of the newest checkpoint is cut, changed or removed, and a rank killed
    full disk                           no rank can write more than 4 KiB to a file, until a save has failed
    slow disk                           each sync takes a second, until a checkpoint is saved
    second run                          the same command over the same folder; it must refuse and name the first
    nan burst                           NaN in a weight of one rank, for good
    bit flip                            one bit of a weight of one rank

The exit status is 0 if nothing was lost and the ends are equal.
"""

# the path to the package comes before its import
from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.chaos_faults import ACTIONS, Chaos, Fault, draw_faults, steps_for
from benchmarks.chaos_job import LAYOUTS, SAVE_INTERVAL, Failed, Job, rank_environment, run_command
from fp8_megatron.checkpoint.files import iteration_folder, saved_iterations
from fp8_megatron.checkpoint.manifest import problem_with, read_manifest
from fp8_megatron.commands.program import exit_status


def final_state(orders: Path, num_ranks: int) -> list[dict[str, str]]:
    """By rank, SHA-256 of the state at the end."""
    return [json.loads((orders / f"final_rank{rank}.json").read_text()) for rank in range(num_ranks)]


def undisturbed(folder: Path, num_ranks: int, train_iters: int) -> list[dict[str, str]]:
    """Train without faults; the state at the end."""
    orders = folder / "orders_undisturbed"
    orders.mkdir()
    command = run_command(num_ranks, folder / "undisturbed", train_iters)
    job = Job(command, rank_environment(orders), folder / "log_undisturbed")
    if job.process.wait() != 0:
        raise Failed("the undisturbed run failed\n" + "\n".join(job.lines[-20:]))
    return final_state(orders, num_ranks)


def run_chaos(chaos: Chaos, num_faults: int, seconds: float) -> None:
    """Bring all faults, or as many as `seconds` allow; train to the end, and verify what is on disk."""
    deadline = time.monotonic() + seconds
    chaos.orders.mkdir(parents=True)
    chaos.start()
    try:
        for fault in draw_faults(num_faults, chaos.draw):
            if time.monotonic() > deadline:
                break
            chaos.faults.append(fault)
            chaos.bring(fault)
            print(describe(fault), flush=True)
        (chaos.orders / "limit").unlink()
        chaos.wait(chaos.is_done, "end of training")
    finally:
        for job in chaos.jobs:
            job.end()
    for iteration in saved_iterations(chaos.save):
        folder = iteration_folder(chaos.save, iteration)
        problems = [problem for record in read_manifest(folder) if (problem := problem_with(folder, record))]
        if problems:
            raise Failed(f"{folder} is announced and damaged: {problems[0]}")


def describe(fault: Fault) -> str:
    """A line on one fault."""
    went_on = "went on" if fault.resumed is None else f"resumed at {fault.resumed}, {fault.lost} steps again"
    return f"{fault.number:3} {fault.kind:18} at {fault.reached:5} {fault.target:40} {went_on}, {fault.seconds:.1f} s"


def summary(faults: Sequence[Fault]) -> list[dict[str, Any]]:
    """A row for each kind."""
    rows = []
    for kind in ACTIONS:
        of_kind = [fault for fault in faults if fault.kind == kind]
        if of_kind:
            rows.append(
                {
                    "name": kind,
                    "faults": len(of_kind),
                    "most_steps_again": max(fault.lost for fault in of_kind),
                    "mean_seconds": round(mean(fault.seconds for fault in of_kind), 1),
                    "most_seconds": max(fault.seconds for fault in of_kind),
                }
            )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The summary in Markdown."""
    lines = ["| fault | times | most steps trained again | seconds until training went on: mean, most |"]
    lines.append("| --- | --- | --- | --- |")
    for row in rows:
        seconds = f"{row['mean_seconds']:.0f}, {row['most_seconds']:.0f}"
        lines.append(f"| {row['name']} | {row['faults']} | {row['most_steps_again']} | {seconds} |")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    """Run; 0 if the ends are equal and nothing was lost."""
    return exit_status(partial(_main, words))


def _main(words: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, choices=sorted(LAYOUTS), default=2, help="CPU ranks (default 2)")
    parser.add_argument("--faults", type=int, default=60, metavar="N", help="number of faults (default 60)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="bring no more faults after this time")
    parser.add_argument(
        "--seed",
        type=int,
        nargs="+",
        default=[1],
        help="of kinds, iterations and targets (default 1); several seeds are runs side by side, with --faults each",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the result, as JSON")
    parser.add_argument("--folder", type=Path, help="where to train (default: a temporary folder, removed at the end)")
    own = parser.parse_args(words)
    if own.faults < 1:
        parser.error(f"--faults {own.faults}: give 1 or more")
    if len(set(own.seed)) < len(own.seed):
        parser.error(f"--seed {' '.join(map(str, own.seed))}: a seed stands twice")
    folder = Path(tempfile.mkdtemp(prefix="chaos")) if own.folder is None else own.folder
    started = time.monotonic()
    with ThreadPoolExecutor(len(own.seed)) as side_by_side:
        runs = list(side_by_side.map(partial(disturbed, own, folder), own.seed))
    faults = [fault for chaos, _ in runs for fault in chaos.faults]
    problems = [f"seed {seed}: {problem}" for seed, (_, problem) in zip(own.seed, runs, strict=True) if problem]
    rows = summary(faults)
    result = {
        "command": f"python benchmarks/chaos.py --ranks {own.ranks} --faults {own.faults} "
        + f"--seed {' '.join(map(str, own.seed))} --output {own.output.name}"
        + (f" --minutes {own.minutes:g}" if math.isfinite(own.minutes) else ""),
        "device": f"CPU, {os.cpu_count()} cores, {platform.machine()}",
        "train_iters": [chaos.train_iters for chaos, _ in runs],
        "save_interval": SAVE_INTERVAL,
        "jobs_started": sum(len(chaos.jobs) for chaos, _ in runs),
        "minutes": round((time.monotonic() - started) / 60, 1),
        "same_state_at_the_end": not problems,
        "problem": "\n".join(problems),
        "kinds": rows,
        "faults": [asdict(fault) for fault in faults],
    }
    own.output.write_text(json.dumps(result, indent=1) + "\n")
    print(table(rows))
    print(
        result["problem"]
        or f"{len(faults)} faults, {result['jobs_started']} jobs: the same state at the end, bit for bit"
    )
    if own.folder is None:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if problems else 0


def disturbed(own: argparse.Namespace, folder: Path, seed: int) -> tuple[Chaos, str]:
    """The run of one seed, and what went wrong, if anything."""
    folder = folder / f"seed_{seed}"
    folder.mkdir(parents=True)
    num_steps = steps_for(draw_faults(own.faults, random.Random(seed)))
    chaos = Chaos(folder, own.ranks, num_steps, random.Random(seed))
    try:
        expected = undisturbed(folder, own.ranks, num_steps)
        run_chaos(chaos, own.faults, 60 * own.minutes)
        if final_state(chaos.orders, own.ranks) != expected:
            return chaos, "the state at the end differs from the undisturbed run's"
    except Failed as error:
        return chaos, str(error)
    return chaos, ""


if __name__ == "__main__":
    sys.exit(main())
