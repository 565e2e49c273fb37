"""Train one configuration at several precision levels and from several seeds, and compare the losses.

    fp8-megatron parity --levels bf16 O3 fast --seeds 1 2 3 --gpus 2 --output-dir runs/parity -- \
        --config configs/gpt_125m.yaml --data-path PREFIX --tokenizer-model FILE --train-iters 3200

All flags after -- go to training. Runs of one seed see the same data from the same initial weights. The first level is
the reference. Each run takes one GPU; --gpus runs side by side. Without GPUs they run one after another on the CPU.
--own-levels NAME=FLAGS adds levels of your own. --finetune-from CHECKPOINT starts every run from the weights of one
checkpoint, with a new optimizer and schedule.

--time-limit S ends the command after S seconds: runs that have not ended save a checkpoint, and the same command goes
on with them. Finished runs are kept in parity.json. That file alone, of some MB at most, is enough to go on elsewhere;
the folders runs/ hold checkpoints of unfinished runs and logs. With --whole-runs no run is started that the finished
ones say is too long for the time left.

Writes parity.json (all curves and figures), parity.md (the table) and parity.png.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.table import Table

from ..checkpoint.files import TRACKER
from ..config.checks import ConfigError, check_config
from ..config.io import own_and_run_flags, parse_config
from ..config.schema import Config, PrecisionConfig
from ..errors import UserError
from ..outputs import write_output
from ..reporting.parity import Parity, RunResult, compare_runs, read_run
from ..reporting.parity_report import draw_parity, markdown_table, table_rows
from . import levels
from .arguments import Parser, output_folder, real, seed, whole
from .program import exit_status, share_import_path

LEVELS = {
    "bf16": list(levels.LEVELS["bf16"]),
    "te": list(levels.LEVELS["te-delayed"]),  # as the committed results had it
    **levels.levels_of("O1", "O2", "O3", "O3-delayed", "O3-blockwise", "fast", "5-byte"),
}
DEFAULT_LEVELS = ["bf16", "te", "O1", "O2", "O3", "fast", "5-byte"]
RESULTS_FILE = "parity.json"
#: Settings that may differ between calls: where things are.
_PLACES = {"output_dir", "save", "load", "seed", "data_cache_path"}
#: Seconds before the time limit at which runs are asked to save and end.
SAVE_SECONDS = 40.0
_POLL_SECONDS = 0.2


@dataclass
class _Process:
    """A run that is going on."""

    popen: subprocess.Popen[bytes]
    started: float
    was_interrupted: bool


@dataclass
class Session:
    """The runs of one call.

    Attributes:
        slots: a value of CUDA_VISIBLE_DEVICES for each run side by side; empty for the CPU.
        deadline: `time.monotonic` at which runs are asked to end; infinite without a limit.
        finished: results by level and seed, of earlier calls too.
    """

    args: argparse.Namespace
    config: Config
    slots: list[str]
    deadline: float
    finished: dict[tuple[str, int], RunResult]
    failed: list[tuple[str, int]] = field(default_factory=list)
    stops: bool = False

    def run(self) -> None:
        """Train what is not finished, until all is or the time is up."""
        # Seeds in the outer order: the levels of a seed are compared as soon as they are there.
        pending = [(level, each) for each in self.args.seeds for level in self.args.levels]
        pending = [key for key in pending if key not in self.finished]
        running: dict[str, tuple[tuple[str, int], _Process]] = {}
        asked = False
        try:
            while pending or running:
                if self.stops or time.monotonic() > self.deadline:
                    pending = []
                    if not asked:
                        asked = True
                        self._ask_to_end(running)
                for slot in self.slots:
                    if slot not in running and (key := self._next(pending)) is not None:
                        running[slot] = (key, self._start(key, slot))
                for slot, (key, process) in list(running.items()):
                    if process.popen.poll() is not None:
                        del running[slot]
                        self._ended(key, process)
                    elif time.monotonic() > self.deadline + SAVE_SECONDS:
                        process.popen.kill()
                time.sleep(_POLL_SECONDS)
        finally:
            for _, process in running.values():
                process.popen.kill()

    def folder(self, key: tuple[str, int]) -> Path:
        """Of a run's logs and checkpoints."""
        return Path(self.args.output_dir) / "runs" / f"{key[0]}_seed_{key[1]}"

    def _next(self, pending: list[tuple[str, int]]) -> tuple[str, int] | None:
        """Take the first pending run that there is time for."""
        left = self.deadline - time.monotonic()
        for key in pending:
            if not self.args.whole_runs or self._seconds(key[0]) < left:
                pending.remove(key)
                return key
        pending.clear()
        return None

    def _seconds(self, level: str) -> float:
        """What a run takes, from finished runs of its level, else of all; 0 if there are none."""
        for runs in ([run for run in self.finished.values() if run.level == level], list(self.finished.values())):
            known = [run.wall_seconds for run in runs if run.wall_seconds is not None]
            if known:
                return max(known)
        return 0.0

    def _start(self, key: tuple[str, int], slot: str) -> _Process:
        folder = self.folder(key)
        was_interrupted = (folder / "checkpoints").exists()
        folder.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": slot}
        command = [sys.executable, "-m", "fp8_megatron.commands.pretrain_gpt", *run_flags(self.args, key, folder)]
        with (folder / "log.txt").open("ab") as log:
            # Its own session: an interrupt of the terminal reaches this program, which ends the runs in order.
            popen = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        print(f"{key[0]}, seed {key[1]}: {'goes on' if was_interrupted else 'starts'}", flush=True)
        return _Process(popen, time.monotonic(), was_interrupted)

    def _ask_to_end(self, running: dict[str, tuple[tuple[str, int], _Process]]) -> None:
        for _, process in running.values():
            process.popen.send_signal(signal.SIGTERM)
            process.was_interrupted = True

    def _ended(self, key: tuple[str, int], process: _Process) -> None:
        """Read a finished run and remove its checkpoints; report a failed one."""
        folder, status = self.folder(key), process.popen.returncode
        seconds = None if process.was_interrupted else time.monotonic() - process.started
        try:
            result = read_run(folder, *key, num_steps=self.config.train_iters(1), wall_seconds=seconds)
        except ValueError as error:
            print(f"error: {key[0]}, seed {key[1]}: {error}", file=sys.stderr, flush=True)
            self.failed.append(key)
            return
        if result is not None:
            self.finished[key] = result
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
            write_results(self)
            took = "" if seconds is None else f", {seconds:.0f} s"
            print(f"{key[0]}, seed {key[1]}: validation loss {result.final_loss:.4f}{took}", flush=True)
        elif status != 0 and not process.was_interrupted:
            lines = (folder / "log.txt").read_text(errors="replace").strip().splitlines()
            print(f"error: {key[0]}, seed {key[1]} ended with status {status}: {(lines or [''])[-1]}", file=sys.stderr)
            self.failed.append(key)
        else:
            print(f"{key[0]}, seed {key[1]}: not finished; the same command goes on with it", flush=True)


def main(words: Sequence[str] | None = None, prog: str = "parity.py") -> int:
    """Exit status: 0, also if the time limit left runs unfinished; 1 if a run failed; 2 after an error."""
    return exit_status(partial(run, _parse(sys.argv[1:] if words is None else words, prog)), OSError)


def run(args: argparse.Namespace) -> int:
    """Train what is missing, compare, write; returns the exit status."""
    started = time.monotonic()
    share_import_path()
    config = check_levels(args)
    finished = read_results(args, config)
    slots = _slots(args.gpus)
    deadline = math.inf if args.time_limit is None else started + args.time_limit - SAVE_SECONDS
    session = Session(args, config, slots, deadline, finished)
    with _interrupts(session):
        session.run()
    wanted = {(level, each) for level in args.levels for each in args.seeds}
    parity = write_results(session)
    if parity is not None:
        show_table(parity)
    done = len(wanted & finished.keys())
    if done < len(wanted):
        missing = "" if not session.failed else f" ({len(session.failed)} failed)"
        print(f"{done} of {len(wanted)} runs are finished{missing}; the same command goes on", flush=True)
    return 1 if session.failed else 0


def _parse(words: Sequence[str], prog: str) -> argparse.Namespace:
    parser = Parser(prog=prog, description=__doc__)
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
        help='levels of your own, for --levels to name: --own-levels "head=--precision fp8 --fp8-lm-head"',
    )
    parser.add_argument("--finetune-from", metavar="CHECKPOINT", help="every run starts from these weights")
    parser.add_argument("--seeds", type=seed, nargs="+", default=[1, 2, 3], help="of data and weights (default: 1 2 3)")
    parser.add_argument("--gpus", type=whole(), help="runs side by side, one a GPU (default: all GPUs)")
    parser.add_argument(
        "--time-limit", type=real(above=SAVE_SECONDS, most=1e7), help=f"seconds, more than {SAVE_SECONDS:.0f}"
    )
    parser.add_argument("--whole-runs", action="store_true", help="start no run that would not end in the time left")
    parser.add_argument("--output-dir", type=output_folder, required=True)
    own, passed = own_and_run_flags(words)
    args = parser.parse_args(own)
    args.passed = passed
    args.flags = {**LEVELS, **_own_levels(parser, args.own_levels)}
    if args.levels is None:
        has_te = importlib.util.find_spec("transformer_engine") is not None
        args.levels = [level for level in DEFAULT_LEVELS if level != "te" or has_te]
    if unknown := [level for level in args.levels if level not in args.flags]:
        parser.error(
            f"--levels {unknown[0]}: no such level; give --own-levels '{unknown[0]}=FLAGS' or one of "
            + ", ".join(LEVELS)
        )
    for name in ("levels", "seeds"):
        given = getattr(args, name)
        if repeated := [value for value in given if given.count(value) > 1]:
            parser.error(f"--{name} names {repeated[0]} twice; give it once")
    if len(args.levels) < 2:
        parser.error(f"--levels {args.levels[0]}: give two or more to compare")
    return args


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


def run_flags(args: argparse.Namespace, key: tuple[str, int], folder: Path) -> list[str]:
    """Flags of one run of pretrain_gpt.py."""
    level, number = key
    own = folder / "checkpoints"
    load = ["--load", str(own)]
    if args.finetune_from is not None and not (own / TRACKER).exists():
        load = ["--load", args.finetune_from, "--finetune"]
    places = ["--output-dir", str(folder), "--save", str(own), *load]
    quiet = ["--no-tensorboard", "--progress", "off"]
    return [*args.passed, *args.flags[level], "--seed", str(number), *places, "--keep-last", "1", *quiet]


def check_levels(args: argparse.Namespace) -> Config:
    """The common configuration of the runs.

    Raises:
        ConfigError: a level cannot run with it, its precision is not the levels', or nothing is validated at its end.
    """
    config = parse_config(args.passed)
    if config.precision != PrecisionConfig():
        default = asdict(PrecisionConfig())
        name = next(name for name, value in asdict(config.precision).items() if value != default[name])
        raise ConfigError(f"{name}: the levels set everything of precision; leave it out")
    training = config.training
    train_iters = config.train_iters(1)
    if training.eval_interval == 0 or training.eval_iters == 0 or train_iters % training.eval_interval:
        raise ConfigError(
            f"train_iters({train_iters}) is not a multiple of eval_interval({training.eval_interval}) with "
            f"eval_iters({training.eval_iters}) above 0: the losses compared are of a validation after the last step"
        )
    for level in args.levels:
        try:
            key = (level, args.seeds[0])
            check_config(parse_config(run_flags(args, key, Path(args.output_dir) / "runs")), 1)
        except ConfigError as error:
            raise ConfigError(f"level {level}: {error}") from error
    return config


def common_settings(config: Config) -> dict[str, Any]:
    """What all runs of a comparison have in common, as plain values."""
    sections = json.loads(json.dumps(asdict(config), default=str))
    return {
        name: value
        for section in ("model", "data", "training", "optimizer")
        for name, value in sections[section].items()
        if name not in _PLACES
    }


def read_results(args: argparse.Namespace, config: Config) -> dict[tuple[str, int], RunResult]:
    """The finished runs of an earlier call.

    Raises:
        UserError: the file is damaged, or its runs have other settings.
    """
    path = Path(args.output_dir) / RESULTS_FILE
    if not path.exists():
        return {}
    try:
        report = json.loads(path.read_text())
        runs = [RunResult.from_json(values) for values in report["runs"]]
        before, flags = dict(report["settings"]), dict(report.get("flags", {}))
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(f"{path} is no result of this command ({error}); give another --output-dir") from error
    if args.finetune_from != (start := report.get("finetune_from", args.finetune_from)):
        raise UserError(
            f"{path} has runs with finetune_from({start}), this command has finetune_from({args.finetune_from}); give "
            "the same checkpoint, or another --output-dir"
        )
    for level in args.levels:
        if flags.get(level, args.flags[level]) != args.flags[level]:
            raise UserError(
                f"{path} has runs of level {level} with {shlex.join(flags[level])!r}, this command has "
                f"{shlex.join(args.flags[level])!r}; give another --output-dir"
            )
    for name, value in common_settings(config).items():
        # A setting that the runs do not know came with a later version.
        if name in before and before[name] != value:
            raise UserError(
                f"{path} has runs with {name}({before[name]}), this command has {name}({value}); give the same "
                "flags, or another --output-dir"
            )
    return {(found.level, found.seed): found for found in runs}


def write_results(session: Session) -> Parity | None:
    """Write parity.json, parity.md and parity.png of what is finished; returns the comparison if there is one."""
    args, folder = session.args, Path(session.args.output_dir)
    order = {level: index for index, level in enumerate(args.levels)}
    runs = sorted(session.finished.values(), key=lambda found: (order.get(found.level, len(order)), found.seed))
    parity = compare_runs(runs, args.levels[0])
    report = {
        "settings": common_settings(session.config),
        "flags": {level: args.flags[level] for level in args.levels},
        "finetune_from": args.finetune_from,
        **_machine(),
        "comparison": None if parity is None else asdict(parity),
        "runs": [found.to_json() for found in runs],
    }
    write_output(folder / RESULTS_FILE, (json.dumps(report, allow_nan=False) + "\n").encode(), "--output-dir")
    if parity is None or len(parity.levels) < 2:
        return None
    write_output(folder / "parity.md", markdown_table(parity).encode(), "--output-dir")
    tokens = statistics.fmean(found.num_steps * found.tokens_per_second * found.step_seconds for found in runs)
    draw_parity(runs, parity, folder / "parity.png", title=f"Precision levels over {tokens / 1e6:,.1f} M tokens")
    return parity


def show_table(parity: Parity) -> None:
    """Print the comparison."""
    headings, *rows = table_rows(parity)
    table = Table(title=f"Against {parity.reference}")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "level" else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=150).print(table)


def _machine() -> dict[str, Any]:
    import torch

    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "commit": commit or None,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def _slots(num_gpus: int | None) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each run side by side; one empty one for the CPU.

    Raises:
        UserError: more GPUs are asked for than there are.
    """
    import torch

    count = torch.cuda.device_count()
    if num_gpus is not None and num_gpus > count:
        raise UserError(f"--gpus {num_gpus}, but this machine has {count}; give {count or 'no --gpus'}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = visible.split(",") if visible else [str(index) for index in range(count)]
    return names[: num_gpus or count] if count else [""]


@contextmanager
def _interrupts(session: Session) -> Iterator[None]:
    """SIGTERM and SIGINT let the runs save and end."""

    def stop(number: int, frame: FrameType | None) -> None:
        session.stops = True
        session.deadline = min(session.deadline, time.monotonic())

    previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
