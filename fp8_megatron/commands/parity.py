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
on with them. Finished runs are kept in parity.json. That file alone, of some MB at most, is enough to go on elsewhere;
the folders runs/ hold checkpoints of unfinished runs and logs. With --whole-runs no run is started that the finished
ones say is too long for the time left.

Writes parity.json (all curves and figures), parity.md (the table) and parity.png.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType

from ..checkpoint.files import candidates, iteration_folder, named_checkpoint
from ..checkpoint.run_identity import RunIdentity
from ..checkpoint.run_lock import DEAD_AFTER_SECONDS, LOCK, POLL_SECONDS, RunLock
from ..config.io import own_and_run_flags
from ..config.schema import Config
from ..data.token_files import check_input_files
from ..errors import UserError
from ..outputs import writing_to
from ..reporting.parity import RunKey
from .arguments import Parser, nonempty, output_folder, real, seed, whole
from .launch import gpus_for_ranks
from .levels import levels_of
from .parity_plan import SEED, RunPlan, check_levels
from .parity_runs import SAVE_SECONDS, Session, read_results, show_table, write_results
from .program import exit_status, share_import_path

LEVELS = {
    **levels_of("bf16"),
    "te": levels_of("te-delayed")["te-delayed"],
    **levels_of("O1", "O2", "O3", "O3-delayed", "O3-blockwise", "default", "16-bit-head", "fast", "5-byte"),
}
#: Seconds that a call waits for what an earlier one has left: time enough to see that a holder of a lock is dead.
_WAIT_SECONDS = 2 * DEAD_AFTER_SECONDS
DEFAULT_LEVELS = ["bf16", "te", "O1", "O2", "O3", "fast", "5-byte"]


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
    slots = _slots(plan.num_gpus, plan.ranks_per_run)
    deadline = math.inf if plan.time_limit is None else started + plan.time_limit - SAVE_SECONDS
    with _locked(plan.output_dir):
        wait_for_earlier_runs(plan.output_dir)
        plan, finished = read_results(plan, config)
        plan = find_starts(plan, config, finished)
        write_results(plan, config, finished)  # the settings of runs that a kill leaves unfinished
        session = Session(plan, config, slots, deadline, finished)
        with _interrupts(session):
            session.run()
        parity = write_results(plan, config, finished)
    if parity is not None:
        show_table(parity)
    wanted = set(plan.keys)
    done = len(wanted & finished.keys())
    if done < len(wanted):
        missing = "" if not session.failed else f" ({len(session.failed)} failed)"
        print(f"{done} of {len(wanted)} runs are finished{missing}; the same command goes on", flush=True)
    diverged = [key for key in plan.keys if key in finished and finished[key].diverged]
    if diverged:
        runs = "; ".join(f"{level}, seed {number}" for level, number in diverged)
        print(f"error: diverged, with a loss at the end that is not finite: {runs}", file=sys.stderr, flush=True)
    if session.failed or diverged:
        return 1
    return 128 + session.stop_signal if session.stop_signal is not None and done < len(wanted) else 0


def _parse(words: Sequence[str], prog: str) -> RunPlan:
    parser = Parser(prog=prog, description=__doc__, passes_flags=True)
    parser.add_argument(
        "--levels",
        nargs="+",
        help=f"of {', '.join(LEVELS)} and those of --own-levels; the first is the reference "
        f"(default: {' '.join(DEFAULT_LEVELS)}; te if Transformer Engine is installed)",
    )
    parser.add_argument(
        "--own-levels",
        nargs="+",
        default=[],
        metavar="NAME=FLAGS",
        help="levels of your own, for --levels to name: "
        '--own-levels "head=--precision fp8 --fp8-recipe tensorwise --fp8-lm-head"',
    )
    starts = parser.add_mutually_exclusive_group()
    starts.add_argument(
        "--finetune-from", type=nonempty, metavar="CHECKPOINT", help="every run starts from these weights"
    )
    starts.add_argument(
        "--continue-from",
        type=nonempty,
        metavar="CHECKPOINT",
        help=f"every run continues this one; {SEED} in it is a run's seed, and is needed for several",
    )
    parser.add_argument("--seeds", type=seed, nargs="+", default=[1, 2, 3], help="of data and weights (default: 1 2 3)")
    parser.add_argument("--gpus", type=whole(), help="GPUs of all runs side by side (default: all GPUs)")
    parser.add_argument(
        "--ranks-per-run",
        type=whole(),
        default=1,
        metavar="N",
        help="ranks of each run, a GPU each, or processes without GPUs (default: 1)",
    )
    parser.add_argument(
        "--time-limit", type=real(above=SAVE_SECONDS, most=1e7), help=f"seconds, more than {SAVE_SECONDS:.0f}"
    )
    parser.add_argument("--whole-runs", action="store_true", help="start no run that would not end in the time left")
    parser.add_argument("--output-dir", type=output_folder, required=True)
    own, passed = own_and_run_flags(words)
    args = parser.parse_args(own)
    if not passed:
        parser.error("no flags of the run; put them behind --, e.g. -- --config FILE --data-path PREFIX")
    own_levels = _own_levels(parser, args.own_levels)
    flags = {**LEVELS, **own_levels}
    levels = args.levels
    if levels is None:
        has_te = importlib.util.find_spec("transformer_engine") is not None
        levels = [level for level in DEFAULT_LEVELS if level != "te" or has_te]
    if unknown := [level for level in levels if level not in flags]:
        parser.error(
            f"--levels {unknown[0]}: no such level; give --own-levels '{unknown[0]}=FLAGS' or one of "
            + ", ".join(LEVELS)
        )
    if unused := [level for level in own_levels if level not in levels]:
        parser.error(f"--own-levels {unused[0]} has no effect; name it in --levels, or leave it out")
    for name, given in (("levels", levels), ("seeds", args.seeds)):
        if repeated := [value for value in given if given.count(value) > 1]:
            parser.error(f"--{name} names {repeated[0]} twice; give it once")
    if args.whole_runs and args.time_limit is None:
        parser.error("--whole-runs has no effect without --time-limit; give both")
    if len(levels) < 2:
        parser.error(f"--levels {levels[0]}: give two or more to compare")
    if args.continue_from is not None and len(args.seeds) > 1 and SEED not in args.continue_from:
        parser.error(f"--continue-from {args.continue_from} is of one seed; put {SEED} into it, or give one of --seeds")
    return RunPlan(
        levels=levels,
        seeds=args.seeds,
        common_flags=passed,
        level_flags={level: flags[level] for level in levels},
        output_dir=args.output_dir,
        num_gpus=args.gpus,
        ranks_per_run=args.ranks_per_run,
        time_limit=args.time_limit,
        whole_runs=args.whole_runs,
        finetune_from=args.finetune_from,
        continue_from=args.continue_from,
    )


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


def find_starts(plan: RunPlan, config: Config, finished: Container[RunKey]) -> RunPlan:
    """Check the checkpoints of --continue-from and --finetune-from that unfinished runs need.

    The iteration that is found first is that of all runs (with --continue-from, of all of its seed), also if the run of
    the checkpoint has saved more since.

    Returns:
        The plan with these iterations, and the last ones of runs that continue others.

    Raises:
        UserError: there is none. One to continue is of the last step, or of another seed than its run.
    """
    seeds = [each for each in plan.seeds if any((level, each) not in finished for level in plan.levels)]
    if plan.finetune_from is not None and seeds:
        _, iteration = _newest_checkpoint("--finetune-from", Path(plan.finetune_from), plan.finetune_iteration)
        plan = replace(plan, finetune_iteration=iteration)
    if plan.continue_from is None:
        return plan
    from ..checkpoint.saved_settings import saved_samples, saved_seed  # imports torch

    steps_before, num_steps = dict(plan.steps_before), dict(plan.num_steps)
    for number in seeds:
        path = Path(plan.continue_from.replace(SEED, str(number)))
        folder, iteration = _newest_checkpoint("--continue-from", path, steps_before.get(number))
        consumed_samples = saved_samples(folder) if config.counts_samples else 0
        last = config.train_iters(plan.ranks_per_run, iteration=iteration, consumed_samples=consumed_samples)
        if iteration >= last:
            length = "train_samples" if config.counts_samples else "train_iters"
            raise UserError(
                f"--continue-from {path}: its checkpoint is of iteration {iteration}, and {length} is "
                f"{config.train_counts}; name an earlier one, such as iter_0000100"
            )
        saved = saved_seed(folder)
        if saved not in (number, None):
            raise UserError(
                f"--continue-from {path}: that run has seed {saved}, and its data would go on in the order of seed "
                f"{number}; give --seeds {saved}, or the checkpoint of a run with --seed {number}"
            )
        steps_before[number], num_steps[number] = iteration, last
    return replace(plan, steps_before=steps_before, num_steps=num_steps)


def _newest_checkpoint(flag: str, path: Path, iteration: int | None = None) -> tuple[Path, int]:
    """(folder, iteration) of the checkpoint that a path names, or of the one of `iteration`.

    Raises:
        UserError: there is none.
    """
    root, iteration = named_checkpoint(path, iteration)
    found = candidates(root, iteration)
    if not found:
        raise UserError(f"{flag} {path}: no checkpoint there; give the folder that a run's --save named")
    return iteration_folder(root, found[0]), found[0]


def _slots(num_gpus: int | None, ranks_per_run: int) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each run side by side; one empty one for the CPU.

    Raises:
        UserError: more GPUs are asked for than there are, or they do not divide into runs; or the cores cannot run one.
    """
    count = gpus_for_ranks(ranks_per_run, "--ranks-per-run")
    if num_gpus is not None and num_gpus > count:
        raise UserError(f"--gpus {num_gpus}, but this machine has {count}; give {count or 'no --gpus'}")
    if count == 0:
        return [""]
    if num_gpus is not None and num_gpus % ranks_per_run != 0:
        raise UserError(f"--gpus {num_gpus} is no multiple of --ranks-per-run {ranks_per_run}; give a multiple")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = visible.split(",") if visible else [str(index) for index in range(count)]
    num_runs = (num_gpus or count) // ranks_per_run
    return [",".join(names[run * ranks_per_run : (run + 1) * ranks_per_run]) for run in range(num_runs)]


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of --output-dir: a second call would go on with the same runs, and each would replace parity.json.

    Raises:
        UserError: another call holds it.
    """
    with writing_to(folder, "--output-dir"):
        folder.mkdir(parents=True, exist_ok=True)
        lock = RunLock(folder, RunIdentity.drawn())
        deadline = time.monotonic() + _WAIT_SECONDS
        while (holder := lock.attempt()) is not None:
            if holder.lives or time.monotonic() > deadline:
                raise UserError(
                    f"--output-dir {folder} is in use by process {holder.process} on {holder.host}, since "
                    f"{holder.since}; wait for its end, or give another folder"
                )
            time.sleep(POLL_SECONDS)
    try:
        yield
    finally:
        lock.release()


def wait_for_earlier_runs(folder: Path) -> None:
    """Wait for the runs below --output-dir of a call that was killed. They save and end by themselves.

    Raises:
        UserError: one does not end.
    """
    deadline = time.monotonic() + _WAIT_SECONDS
    for path in sorted(folder.glob(f"runs/*/checkpoints/{LOCK}")):
        save, waits = path.parent, False
        lock = RunLock(save, RunIdentity.drawn())
        while (holder := lock.attempt()) is not None:
            if time.monotonic() > deadline:
                raise UserError(
                    f"{save} is in use by process {holder.process} on {holder.host}, which an earlier call started; "
                    "wait for its end, or end it"
                )
            if not waits:
                print(f"waits for process {holder.process}, which an earlier call started, to save and end", flush=True)
                waits = True
            time.sleep(POLL_SECONDS)
        lock.release()


@contextmanager
def _interrupts(session: Session) -> Iterator[None]:
    """SIGTERM and SIGINT let the runs save and end."""

    def stop(number: int, frame: FrameType | None) -> None:
        session.stop_signal = number
        session.deadline = min(session.deadline, time.monotonic())

    previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
