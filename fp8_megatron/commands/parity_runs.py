"""The runs of a comparison of precision levels, processes side by side, and what they leave: parity.json, .md, .png."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from ..checkpoint.files import TRACKER
from ..config.schema import Config
from ..errors import UserError
from ..outputs import write_output
from ..reporting.metrics_file import METRICS_FILE, rename_older
from ..reporting.parity import Parity, RunKey, RunResult, compare_runs, draw_parity, markdown_table, read_run
from ..reporting.run_log import EVENTS_FILE, EventKind, read_events
from .environment import run_environment, training_command
from .launch import gpus_for_ranks
from .parity_plan import RunPlan
from .program import clone, told_error

RESULTS_FILE = "parity.json"
#: Seconds before the time limit at which runs are asked to save and end.
SAVE_SECONDS = 40.0
_POLL_SECONDS = 0.2
#: Output of a run, of all its processes.
LOG_FILE = "log.txt"


@dataclass
class Results:
    """What parity.json holds.

    Attributes:
        plan: of this call.
        settings: by level, also of earlier calls (`RunPlan.settings`). Under "" what all runs have in common.
        finished: results, of earlier calls too.
    """

    plan: RunPlan
    settings: dict[str, dict[str, Any]]
    finished: dict[RunKey, RunResult] = field(default_factory=dict)

    @classmethod
    def read(cls, plan: RunPlan, config: Config) -> Results:
        """The results of earlier calls. The plan gets the starts of their runs.

        Raises:
            UserError: the file is damaged, or its runs have other settings; or it is gone, and unfinished runs are
                there.
        """
        levels = {level: plan.settings(plan.config(level)) for level in plan.levels}
        results = cls(plan, {"": plan.settings(config), **levels})
        path = plan.output_dir / RESULTS_FILE
        saved = next(plan.output_dir.glob(f"runs/*/checkpoints/{TRACKER}"), None)
        if not path.exists():
            if saved is not None:
                raise UserError(
                    f"{path} is gone, and {saved.parent} is of an unfinished run; give another --output-dir"
                )
            return results
        try:
            report = json.loads(path.read_text())
            runs = [RunResult.from_json(values) for values in report["runs"]]
            before = {level: dict(settings) for level, settings in report["settings"].items()}
            starts = {str(start): int(iteration) for start, iteration in report["starts"].items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise UserError(f"{path} is no result of this command ({error}); give another --output-dir") from error
        if not runs and saved is None:
            return results  # nothing was trained
        for level, now in results.settings.items():
            results._check(level, before.get(level, {}), now)
        results.settings = before | results.settings
        results.finished = {(found.level, found.seed): found for found in runs}
        plan.starts.update(starts)
        return results

    def _check(self, level: str, before: dict[str, Any], now: dict[str, Any]) -> None:
        """Raise `UserError` if runs would not have the settings of those before. New ones came with a later version."""
        name = next((name for name, value in now.items() if name in before and before[name] != value), None)
        if name is not None:
            raise UserError(
                f"{self.plan.output_dir} has runs{level and ' of level '}{level} with {name}({before[name]}), flags "
                f"and files now say {name}({now[name]}); give the same again, or another --output-dir"
            )

    def check_files(self, level: str) -> None:
        """Raise `UserError` if a file of settings does not say what it said when this call began."""
        self._check(level, self.settings[level], self.plan.settings(self.plan.config(level)))

    def write(self) -> Parity | None:
        """Write the files of what is finished; returns the comparison if there is one."""
        folder, levels = self.plan.output_dir, list(self.plan.levels)
        order = {level: index for index, level in enumerate(levels)}
        runs = sorted(self.finished.values(), key=lambda run: (order.get(run.level, len(order)), run.seed))
        parity = compare_runs(runs, levels[0])
        report = {
            "settings": self.settings,
            "starts": self.plan.starts,
            **origin(),
            "comparison": None if parity is None else asdict(parity),
            "runs": [asdict(run) for run in runs],
        }
        write_output(folder / RESULTS_FILE, (json.dumps(report, allow_nan=False) + "\n").encode(), "--output-dir")
        if parity is None or len(parity.levels) < 2:
            return None
        write_output(folder / "parity.md", markdown_table(parity).encode(), "--output-dir")
        draw_parity(runs, parity, folder / "parity.png")
        return parity


@dataclass
class _Process:
    """A run that is going on.

    Attributes:
        num_events, log_bytes: what earlier processes of the run have left of events, and in its log.
        is_asked_to_end: by this command, for the time limit, a signal or an error.
        is_killed: because it had not ended after that.
    """

    popen: subprocess.Popen[bytes]
    num_events: int
    log_bytes: int
    is_asked_to_end: bool = False
    is_killed: bool = False


@dataclass
class RunQueue:
    """The runs of one call.

    Attributes:
        slots: a value of CUDA_VISIBLE_DEVICES for each run side by side; one empty value for the CPU.
        deadline: `time.monotonic` at which runs are asked to end; infinite without a limit.
        failed: runs that ended without a result in this call.
        stop_signal: that has asked for the end; no further run starts then.
    """

    results: Results
    slots: list[str]
    deadline: float
    failed: list[RunKey] = field(default_factory=list)
    stop_signal: int | None = None

    def run(self) -> None:
        """Train what is not finished, until all is or the time is up. Runs that are left then save and end.

        So they do after SIGTERM and SIGINT.
        """
        handlers = {number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT)}
        pending = [key for key in self.results.plan.keys if key not in self.results.finished]
        running: dict[str, tuple[RunKey, _Process]] = {}
        try:
            while (pending or running) and self.stop_signal is None and time.monotonic() < self.deadline:
                for slot in self.slots:
                    if slot not in running and pending:
                        key = pending.pop(0)
                        running[slot] = (key, self._start(key, slot))
                for slot, (key, process) in list(running.items()):
                    if process.popen.poll() is not None:
                        del running[slot]
                        self._ended(key, process)
                time.sleep(_POLL_SECONDS)
        finally:
            self._end([process for _, process in running.values()])
            for number, handler in handlers.items():
                signal.signal(number, handler)
            for key, process in running.values():
                self._ended(key, process)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stop_signal = number

    def _start(self, key: RunKey, slot: str) -> _Process:
        self.results.check_files(key[0])
        plan = self.results.plan
        folder = plan.folder(key)
        goes_on = (folder / "checkpoints" / TRACKER).exists()
        folder.mkdir(parents=True, exist_ok=True)
        if not goes_on and (folder / METRICS_FILE).exists():
            # Of an earlier comparison: a run that fails before its first step must not end with those losses.
            rename_older(folder / METRICS_FILE)
        num_events = len(read_events(folder / EVENTS_FILE))
        command = training_command(plan.run_flags(key, folder), plan.ranks_per_run, on_gpus=slot != "")
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
        return _Process(popen, num_events, log_bytes)

    def _end(self, running: list[_Process]) -> None:
        """Let runs save and end. Kill what has not ended in time."""
        for process in running:
            process.is_asked_to_end = process.popen.poll() is None
            process.popen.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + SAVE_SECONDS
        for process in running:
            try:
                process.popen.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.is_killed = True
                _kill(process.popen)

    def _ended(self, key: RunKey, process: _Process) -> None:
        """Read a finished run and remove its checkpoints; report a failed one."""
        plan, (level, seed), status = self.results.plan, key, process.popen.returncode
        folder = plan.folder(key)
        steps = {"num_steps": plan.last_steps[seed], "steps_before": plan.steps_before(seed)}
        result = read_run(folder, level, seed, **steps, ended_early=_ended_for_losses(folder, process.num_events))
        if result is not None:
            self.results.finished[key] = result
            self.results.write()  # first: without it, the checkpoint has the result
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
            end = "diverged" if result.diverged else f"validation loss {result.final_loss:.4f}"
            print(f"{level}, seed {seed}: {end}", flush=True)
        elif status != 0 and not process.is_asked_to_end:
            told = told_error(_text(folder / LOG_FILE, start=process.log_bytes))
            print(f"error: {level}, seed {seed} ended with status {status}: {told}", file=sys.stderr, flush=True)
            self.failed.append(key)
        else:
            why = f"it had not ended {SAVE_SECONDS:.0f} s after SIGTERM and was killed; " if process.is_killed else ""
            print(f"{level}, seed {seed}: not finished; {why}the same command goes on with it", flush=True)


def _ended_for_losses(folder: Path, num_events: int) -> bool:
    """Whether training has ended because losses were not finite, by the events behind the first `num_events`."""
    faults = read_events(folder / EVENTS_FILE)[num_events:]
    return any(one["kind"] == EventKind.FAULT.value and one.get("error") == "TrainingDiverged" for one in faults)


def _text(log: Path, *, start: int) -> str:
    """A log from this byte on."""
    with log.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")


def _kill(popen: subprocess.Popen[bytes]) -> None:
    """End a run at once, with the ranks that it started."""
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(popen.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
    popen.kill()
    popen.wait()


def slots(num_gpus: int | None, ranks_per_run: int) -> list[str]:
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


def origin() -> dict[str, Any]:
    """The commit of this project, None outside of a clone or without git, the device, and versions."""
    import torch

    return {
        "commit": _commit(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "megatron-core": version("megatron-core"),
        },
    }


def _commit() -> str | None:
    root = clone()
    if root is None:  # a repository around an installed package is another one
        return None
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None
