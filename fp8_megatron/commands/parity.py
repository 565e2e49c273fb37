"""Train one configuration at several precision levels and from several seeds, and compare the losses.

    fp8-megatron parity --levels bf16 O3 fast --seeds 1 2 3 --gpus 2 --output-dir runs/parity -- \
        --config configs/gpt_125m.yaml --data-path PREFIX --tokenizer-model FILE --train-iters 3200

All flags after -- go to training. Unless they say otherwise, a run keeps one checkpoint and has neither TensorBoard's
events nor a progress bar. Runs of one seed see the same data from the same initial weights. The first level is the
reference. Each run takes one GPU, or --ranks-per-run of them; runs are side by side on --gpus GPUs. Without GPUs they
run one after another on the CPU.
--own-levels NAME=FLAGS adds levels of your own.
--continue-from CHECKPOINT lets every run continue one run of its seed: weights, optimizer state, schedule and data are
those of its checkpoint, whatever its level. Early in training, small differences grow by chance; runs that share it
differ less.
--finetune-from CHECKPOINT starts every run from the weights of a checkpoint, with a new optimizer and schedule.

--time-limit S ends the command after S seconds: runs that have not ended save a checkpoint, and the same command goes
on with them. Finished runs are kept in parity.json; the folders runs/ hold checkpoints of unfinished runs and logs.

Writes parity.json (all curves and figures), parity.md (the table) and parity.png.
"""

from __future__ import annotations

import math
import re
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from ..checkpoint.run_lock import DEAD_AFTER_SECONDS, LOCK, POLL_SECONDS, RunIdentity, RunLock
from ..config.io import own_and_run_flags
from ..data.token_files import check_input_files
from ..errors import UserError
from ..outputs import writing_to
from ..reporting.parity import markdown_table
from .arguments import Parser, nonempty, output_folder, real, seed, whole
from .parity_plan import SEED, RunPlan, check_levels, find_starts
from .parity_runs import SAVE_SECONDS, Results, RunQueue, slots
from .program import exit_status, share_import_path
from .run_settings import LEVELS

DEFAULT_LEVELS = ["bf16", "O1", "O2", "O3", "fast", "5-byte"]
#: Seconds that a call waits for what an earlier one has left: time enough to see that a holder of a lock is dead.
_WAIT_SECONDS = 2 * DEAD_AFTER_SECONDS


def main(words: Sequence[str] | None = None, prog: str = "parity.py") -> int:
    """Exit status: 0, also if the time limit left runs unfinished; 1 if a run failed or diverged; 2 after an error; a
    shell's status of SIGINT or SIGTERM if that left runs unfinished."""
    return exit_status(partial(run, _parse(sys.argv[1:] if words is None else words, prog)), OSError)


def run(plan: RunPlan) -> int:
    """Train what is missing, compare, write; returns the exit status."""
    started = time.monotonic()
    share_import_path()
    config = check_levels(plan)
    check_input_files(config)
    devices = slots(plan.gpus, plan.ranks_per_run)
    deadline = math.inf if plan.time_limit is None else started + plan.time_limit - SAVE_SECONDS
    with _locked(plan.output_dir):
        results = Results.read(plan, config)
        find_starts(plan, config, results.finished)
        results.write()  # the settings of runs that a kill leaves unfinished
        session = RunQueue(results, devices, deadline)
        session.run()
        parity = results.write()
    if parity is not None:
        print(markdown_table(parity))
    finished = results.finished
    done = sum(key in finished for key in plan.keys)
    if done < len(plan.keys):
        failed = f" ({len(session.failed)} failed)" if session.failed else ""
        print(f"{done} of {len(plan.keys)} runs are finished{failed}; the same command goes on", flush=True)
    diverged = [key for key in plan.keys if key in finished and finished[key].diverged]
    if diverged:
        runs = "; ".join(f"{level}, seed {number}" for level, number in diverged)
        print(f"error: diverged, with a loss at the end that is not finite: {runs}", file=sys.stderr, flush=True)
    if session.failed or diverged:
        return 1
    return 128 + session.stop_signal if session.stop_signal is not None and done < len(plan.keys) else 0


def _parse(words: Sequence[str], prog: str) -> RunPlan:
    parser = _parser(prog)
    own, passed = own_and_run_flags(words)
    args = parser.parse_args(own)
    if not passed:
        parser.error("no flags of the run; put them behind --, e.g. -- --config FILE --data-path PREFIX")
    own_levels = _own_levels(parser, args.own_levels)
    flags = {**LEVELS, **own_levels}
    for name, values in (("levels", args.levels), ("seeds", args.seeds)):
        if repeated := [value for value in values if values.count(value) > 1]:
            parser.error(f"--{name} names {repeated[0]} twice; give it once")
    if unknown := [level for level in args.levels if level not in flags]:
        known = ", ".join(LEVELS)
        parser.error(f"--levels {unknown[0]}: no such level; give --own-levels '{unknown[0]}=FLAGS' or one of {known}")
    if unused := [level for level in own_levels if level not in args.levels]:
        parser.error(f"--own-levels {unused[0]} has no effect; name it in --levels, or leave it out")
    if len(args.levels) < 2:
        parser.error(f"--levels {args.levels[0]}: give two or more to compare")
    if args.continue_from is not None and len(args.seeds) > 1 and SEED not in args.continue_from:
        parser.error(f"--continue-from {args.continue_from} is of one seed; put {SEED} into it, or give one of --seeds")
    chosen = {level: list(flags[level]) for level in args.levels}
    given = {name: value for name, value in vars(args).items() if name != "own_levels"}
    return RunPlan(**{**given, "levels": chosen, "common_flags": passed})


def _parser(prog: str) -> Parser:
    parser = Parser(prog=prog, description=__doc__, passes_flags=True)
    levels = f"of {', '.join(LEVELS)} and those of --own-levels; the first is the reference"
    default = " ".join(DEFAULT_LEVELS)
    parser.add_argument("--levels", nargs="+", default=DEFAULT_LEVELS, help=f"{levels} (default: {default})")
    own = (
        "levels of your own, for --levels to name: "
        '--own-levels "head=--precision fp8 --fp8-recipe tensorwise --fp8-lm-head"'
    )
    parser.add_argument("--own-levels", nargs="+", default=[], metavar="NAME=FLAGS", help=own)
    starts = parser.add_mutually_exclusive_group()
    weights = f"every run starts from these weights; {SEED} in it is a run's seed"
    whole_run = f"every run continues this one; {SEED} in it is a run's seed, and is needed for several"
    starts.add_argument("--finetune-from", type=nonempty, metavar="CHECKPOINT", help=weights)
    starts.add_argument("--continue-from", type=nonempty, metavar="CHECKPOINT", help=whole_run)
    parser.add_argument("--seeds", type=seed, nargs="+", default=[1, 2, 3], help="of data and weights (default: 1 2 3)")
    parser.add_argument("--gpus", type=whole(), help="GPUs of all runs side by side (default: all GPUs)")
    ranks = "ranks of each run, a GPU each, or processes without GPUs (default: 1)"
    parser.add_argument("--ranks-per-run", type=whole(), default=1, metavar="N", help=ranks)
    limit = real(above=SAVE_SECONDS, most=1e7)
    parser.add_argument("--time-limit", type=limit, help=f"seconds, more than {SAVE_SECONDS:.0f}")
    parser.add_argument("--output-dir", type=output_folder, required=True)
    return parser


def _own_levels(parser: Parser, given: Sequence[str]) -> dict[str, list[str]]:
    """The levels of --own-levels: name → flags."""
    levels: dict[str, list[str]] = {}
    for text in given:
        name, equals, flags = text.partition("=")
        if not equals or not re.fullmatch(r"[\w.-]+", name) or name in LEVELS or name in levels:
            parser.error(f"--own-levels {text!r}: give NAME=FLAGS with a new name of letters, digits, dots and hyphens")
        try:
            levels[name] = shlex.split(flags)
        except ValueError as error:
            parser.error(f"--own-levels {text!r}: {error}")
    return levels


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of --output-dir, and wait for the runs of a call that was killed. They save and end by themselves.

    A second call would go on with the same runs, and each would replace parity.json.

    Raises:
        UserError: another call holds it, or a run does not end.
    """
    with writing_to(folder, "--output-dir"):
        folder.mkdir(parents=True, exist_ok=True)
        lock = _take(folder, f"--output-dir {folder}", waits=False)
    try:
        for path in sorted(folder.glob(f"runs/*/checkpoints/{LOCK}")):
            _take(path.parent, f"{path.parent}, of a run that an earlier call started,", waits=True).release()
        yield
    finally:
        lock.release()


def _take(folder: Path, name: str, *, waits: bool) -> RunLock:
    """The lock of a folder. Waits for a holder that may be dead, and with `waits` for the end of one that lives."""
    lock, end, told = RunLock(folder, RunIdentity.drawn()), time.monotonic() + _WAIT_SECONDS, not waits
    while (holder := lock.attempt()) is not None:
        if (holder.lives and not waits) or time.monotonic() > end:
            raise UserError(f"{name} is in use by {holder}; wait for its end, or end it")
        if not told:
            print(f"waits for process {holder.process}, which an earlier call started, to save and end", flush=True)
            told = True
        time.sleep(POLL_SECONDS)
    return lock


if __name__ == "__main__":
    sys.exit(main())
