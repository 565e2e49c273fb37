"""The runs of a comparison of precision levels: processes side by side, each on GPUs of its own."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from ..checkpoint.files import TRACKER
from ..config.command_line import flags_of
from ..config.io import parse_config
from ..config.schema import Config
from ..errors import UserError
from ..outputs import write_output
from ..reporting.metrics_file import METRICS_FILE, set_aside
from ..reporting.parity import (
    Parity,
    RunKey,
    RunResult,
    compare_runs,
    draw_parity,
    markdown_table,
    read_run,
    table_rows,
)
from ..reporting.run_log import EVENTS_FILE, EventKind, read_events
from .child_runs import run_environment, training_command
from .origin import origin
from .parity_plan import RunPlan

#: Seconds before the time limit at which runs are asked to save and end.
SAVE_SECONDS = 40.0
_POLL_SECONDS = 0.2
#: Output of a run, of all its processes.
LOG_FILE = "log.txt"
#: How programs begin the line of an error (`program.show`).
_ERROR = re.compile(r"(internal )?error( on rank \d+)?: ")


@dataclass
class _Process:
    """A run that is going on.

    Attributes:
        started: `time.monotonic`.
        num_events, log_bytes: what earlier processes of the run have left of events, and in its log.
        goes_on: it started from a checkpoint of its own.
        is_asked_to_end: by this command, for the time limit or a signal.
        is_killed: because it had not ended after that.
    """

    popen: subprocess.Popen[bytes]
    started: float
    num_events: int
    log_bytes: int
    goes_on: bool
    is_asked_to_end: bool = False
    is_killed: bool = False


@dataclass
class Session:
    """The runs of one call.

    Attributes:
        slots: a value of CUDA_VISIBLE_DEVICES for each run side by side; one empty value for the CPU.
        deadline: `time.monotonic` at which runs are asked to end; infinite without a limit.
        finished: results, of earlier calls too.
        failed: runs that ended without a result in this call.
        stop_signal: that has asked for the end; no further run starts then.
    """

    plan: RunPlan
    config: Config
    slots: list[str]
    deadline: float
    finished: dict[RunKey, RunResult]
    failed: list[RunKey] = field(default_factory=list)
    stop_signal: int | None = None

    def run(self) -> None:
        """Train what is not finished, until all is or the time is up."""
        pending = [key for key in self.plan.keys if key not in self.finished]
        running: dict[str, tuple[RunKey, _Process]] = {}
        asked = False
        try:
            while pending or running:
                if self.stop_signal is not None or time.monotonic() > self.deadline:
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
                        _kill(process.popen)
                        process.is_killed = True
                time.sleep(_POLL_SECONDS)
        finally:
            self._end(running)  # after an error

    def _next(self, pending: list[RunKey]) -> RunKey | None:
        """Take the first pending run that there is time for."""
        left = self.deadline - time.monotonic()
        for key in pending:
            if not self.plan.whole_runs or self._seconds(key[0]) < left:
                pending.remove(key)
                return key
        pending.clear()
        return None

    def _seconds(self, level: str) -> float:
        """Seconds that a run takes, from finished runs of its level, else of all; 0 if there are none."""
        for runs in ([run for run in self.finished.values() if run.level == level], list(self.finished.values())):
            known = [run.wall_seconds for run in runs if run.wall_seconds is not None]
            if known:
                return max(known)
        return 0.0

    def _check_files(self, level: str) -> None:
        """Raise `UserError` if a file of settings does not say what it said to the runs before."""
        before, now = self.plan.level_settings.get(level, {}), settings_of_level(self.plan, level)
        if (name := first_difference(before, now)) is not None:
            raise UserError(
                f"a file of settings says {name}({now[name]}) now, and said {name}({before[name]}) when this command "
                "began; put it back, and the same command goes on"
            )

    def _start(self, key: RunKey, slot: str) -> _Process:
        self._check_files(key[0])
        folder = self.plan.folder(key)
        goes_on = (folder / "checkpoints" / TRACKER).exists()
        folder.mkdir(parents=True, exist_ok=True)
        if not goes_on and (folder / METRICS_FILE).exists():
            # Of an earlier comparison: a run that fails before its first step must not end with those losses.
            set_aside(folder / METRICS_FILE)
        num_events = len(read_events(folder / EVENTS_FILE))
        command = training_command(self.plan.run_flags(key, folder), self.plan.ranks_per_run, on_gpus=slot != "")
        with (folder / LOG_FILE).open("ab") as log:
            log_bytes = log.tell()
            # Its own session: an interrupt of the terminal reaches this program, which ends the runs in order.
            popen = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**run_environment(), "CUDA_VISIBLE_DEVICES": slot},
                start_new_session=True,
            )
        print(f"{key[0]}, seed {key[1]}: {'goes on' if goes_on else 'starts'}", flush=True)
        return _Process(popen, time.monotonic(), num_events, log_bytes, goes_on)

    def _ask_to_end(self, running: dict[str, tuple[RunKey, _Process]]) -> None:
        for _, process in running.values():
            if not process.is_asked_to_end:  # a launcher takes a second signal for haste
                process.popen.send_signal(signal.SIGTERM)
                process.is_asked_to_end = True

    def _end(self, running: dict[str, tuple[RunKey, _Process]]) -> None:
        """Let runs save and end. Kill what has not ended in time."""
        self._ask_to_end(running)
        deadline = time.monotonic() + SAVE_SECONDS
        for _, process in running.values():
            try:
                process.popen.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _kill(process.popen)

    def _ended(self, key: RunKey, process: _Process) -> None:
        """Read a finished run and remove its checkpoints; report a failed one."""
        folder, status = self.plan.folder(key), process.popen.returncode
        is_whole = not (process.goes_on or process.is_asked_to_end)
        seconds = time.monotonic() - process.started if is_whole else None
        # On a number of samples, it depends on the batches of the run that is continued.
        num_steps = self.plan.num_steps.get(key[1]) or self.config.train_iters(self.plan.ranks_per_run)
        result = read_run(
            folder,
            *key,
            num_steps=num_steps,
            wall_seconds=seconds,
            steps_before=self.plan.steps_before.get(key[1], 0),
            ended_early=_ended_for_losses(folder, process.num_events),
        )
        if result is not None:
            self.finished[key] = result
            write_results(self.plan, self.config, self.finished)  # first: without it, the checkpoint has the result
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
            took = "" if seconds is None else f", {seconds:.0f} s"
            end = "diverged" if result.diverged else f"validation loss {result.final_loss:.4f}"
            print(f"{key[0]}, seed {key[1]}: {end}{took}", flush=True)
        elif status != 0 and not process.is_asked_to_end:
            told = _told_error(folder / LOG_FILE, process.log_bytes)
            print(f"error: {key[0]}, seed {key[1]} ended with status {status}: {told}", file=sys.stderr, flush=True)
            self.failed.append(key)
        else:
            why = f"it had not ended {SAVE_SECONDS:.0f} s after SIGTERM and was killed; " if process.is_killed else ""
            print(f"{key[0]}, seed {key[1]}: not finished; {why}the same command goes on with it", flush=True)


def _ended_for_losses(folder: Path, num_events: int) -> bool:
    """Whether training has ended because losses were not finite, by the events behind the first `num_events`."""
    faults = read_events(folder / EVENTS_FILE)[num_events:]
    return any(one["kind"] == EventKind.FAULT.value and one.get("error") == "TrainingDiverged" for one in faults)


def _told_error(log: Path, start: int) -> str:
    """The line with the error of a run whose log begins at this byte: the first that a rank told, else the last one."""
    with log.open("rb") as file:
        file.seek(start)
        lines = file.read().decode(errors="replace").strip().splitlines()
    told = [line for line in lines if _ERROR.match(line)]
    return told[0] if told else (lines or ["its log says nothing"])[-1]


def _kill(popen: subprocess.Popen[bytes]) -> None:
    """End a run at once, with the ranks that it started."""
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(popen.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
    popen.kill()


RESULTS_FILE = "parity.json"
#: Settings that may differ between calls: seeds, where things are, how long ranks wait.
_MAY_DIFFER = {"seed", "data_cache_path", "nccl_communicator_config_path", "distributed_timeout_minutes"}
#: Sections of the configuration whose settings all runs share.
_COMMON = ("model", "data", "training", "optimizer", "parallel")
#: Fields of the plan that say from which checkpoint the runs start.
_STARTS = ("finetune_from", "continue_from")


def common_settings(config: Config) -> dict[str, Any]:
    """What all runs of a comparison have in common, as plain values."""
    return _settings(config, _COMMON)


def settings_of_level(plan: RunPlan, level: str) -> dict[str, Any]:
    """What the flags and files of a level and of all runs say now, as plain values."""
    config = parse_config([*plan.common_flags, *plan.level_flags[level]])
    return _settings(config, (*_COMMON, "precision"))


def first_difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """The name of a setting that differs. One that is not in `before` came with a later version."""
    return next((name for name, value in now.items() if name in before and before[name] != value), None)


def _settings(config: Config, names: Sequence[str]) -> dict[str, Any]:
    sections = json.loads(json.dumps(asdict(config), default=str))
    return {name: value for section in names for name, value in sections[section].items() if name not in _MAY_DIFFER}


def read_results(plan: RunPlan, config: Config) -> tuple[RunPlan, dict[RunKey, RunResult]]:
    """The finished runs of earlier calls, and the plan with the flags of their levels and the steps before their runs.

    Raises:
        UserError: the file is damaged, or its runs have other settings; or it is gone, and unfinished runs are there.
    """
    plan = replace(plan, level_settings={level: settings_of_level(plan, level) for level in plan.levels})
    path = plan.output_dir / RESULTS_FILE
    saved = next(plan.output_dir.glob(f"runs/*/checkpoints/{TRACKER}"), None)
    if not path.exists():
        if saved is not None:
            raise UserError(
                f"{saved.parent} is of an unfinished run, and {path} with its settings is gone; put it back, remove "
                f"{plan.output_dir / 'runs'}, or give another --output-dir"
            )
        return plan, {}
    try:
        report = json.loads(path.read_text())
        runs = [RunResult.from_json(values) for values in report["runs"]]
        finetune_iteration = report.get("finetune_iteration")
        if finetune_iteration is not None:
            finetune_iteration = int(finetune_iteration)
        before, flags = dict(report["settings"]), dict(report.get("flags", {}))
        if any(not isinstance(word, str) for words in flags.values() for word in words):
            raise ValueError("the flags of a level are no words")
        of_levels = {level: dict(settings) for level, settings in report.get("level_settings", {}).items()}
        starts = {int(number): int(iteration) for number, iteration in report.get("starts", {}).items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is no result of this command ({error}); give another --output-dir") from error
    if not runs and saved is None:
        return plan, {}  # nothing was trained
    for name in _STARTS:
        given = getattr(plan, name)
        if given != (start := report.get(name, given)):
            raise UserError(
                f"{path} has runs with {name}({start}), this command has {name}({given}); give the same checkpoint, or "
                "another --output-dir"
            )
    if plan.ranks_per_run != (ranks := report.get("ranks_per_run", 1)):
        raise UserError(
            f"{path} has runs with --ranks-per-run {ranks}, this command has {plan.ranks_per_run}; give the same, or "
            "another --output-dir"
        )
    for level in plan.levels:
        if flags.get(level, plan.level_flags[level]) != plan.level_flags[level]:
            raise UserError(
                f"{path} has runs of level {level} with {shlex.join(flags[level])!r}, this command has "
                f"{shlex.join(plan.level_flags[level])!r}; give another --output-dir"
            )
    now = common_settings(config)
    if (differs := first_difference(before, now)) is not None:
        raise UserError(
            f"{path} has runs with {differs}({before[differs]}), this command has {differs}({now[differs]}); give the "
            "same flags, or another --output-dir"
        )
    for level, own in plan.level_settings.items():
        if (differs := first_difference(of_levels.get(level, {}), own)) is not None:
            raise UserError(
                f"{path} has runs of level {level} with {differs}({of_levels[level][differs]}), its files say "
                f"{differs}({own[differs]}) now; put them back, or give another --output-dir"
            )
    plan = replace(
        plan,
        level_flags={**flags, **plan.level_flags},
        level_settings={**of_levels, **plan.level_settings},
        finetune_iteration=finetune_iteration,
        steps_before=starts,
    )
    return plan, {(found.level, found.seed): found for found in runs}


def write_results(plan: RunPlan, config: Config, finished: Mapping[RunKey, RunResult]) -> Parity | None:
    """Write parity.json, parity.md and parity.png of what is finished; returns the comparison if there is one."""
    folder = plan.output_dir
    order = {level: index for index, level in enumerate(plan.levels)}
    runs = sorted(finished.values(), key=lambda found: (order.get(found.level, len(order)), found.seed))
    parity = compare_runs(runs, plan.levels[0])
    report = {
        "settings": common_settings(config),
        "flags": plan.level_flags,
        "level_settings": {
            level: settings for level, settings in plan.level_settings.items() if _has_file(plan.level_flags[level])
        },
        **{name: getattr(plan, name) for name in _STARTS},
        "finetune_iteration": plan.finetune_iteration,
        "starts": plan.steps_before,
        "ranks_per_run": plan.ranks_per_run,
        **origin(),
        "comparison": None if parity is None else asdict(parity),
        "runs": [found.to_json() for found in runs],
    }
    write_output(folder / RESULTS_FILE, (json.dumps(report, allow_nan=False) + "\n").encode(), "--output-dir")
    if parity is None or len(parity.levels) < 2:
        return None
    write_output(folder / "parity.md", markdown_table(parity).encode(), "--output-dir")
    tokens = plan.ranks_per_run * statistics.fmean(
        (found.num_steps - found.steps_before) * found.tokens_per_second * found.step_seconds for found in runs
    )
    draw_parity(runs, parity, folder / "parity.png", title=f"Precision levels over {tokens / 1e6:,.1f} M tokens")
    return parity


def _has_file(flags: Sequence[str]) -> bool:
    """Whether these flags name a file of settings. They say all there is to say otherwise."""
    return any(one.name == "config" for one in flags_of(flags))


def show_table(parity: Parity) -> None:
    """Print the comparison."""
    headings, *rows = table_rows(parity)
    table = Table(title=f"Against {parity.reference}")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "level" else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=150).print(table)
