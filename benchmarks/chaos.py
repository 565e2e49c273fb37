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

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import psutil

from fp8_megatron.checkpoint.files import iteration_folder, saved_iterations
from fp8_megatron.checkpoint.manifest import problem_with, read_manifest

ROOT = Path(__file__).parents[1]
#: Steps between checkpoints, and the range of steps between two faults.
SAVE_INTERVAL = 10
GAP = (4, 14)
#: Steps past a fault's iteration at which the ranks wait for it.
_SLACK = 30
#: Seconds within which training must go on, or a fault must show. More means that the job hangs.
PATIENCE = 420.0
#: Restarts that torchrun may make before the driver starts it again.
MAX_RESTARTS = 5
_FULL_BYTES = 4096

MODEL = """--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 32 --vocab-size 128
--make-vocab-size-divisible-by 32 --micro-batch-size 2 --mock-data --num-workers 0 --eval-interval 0 --lr 1e-3
--fp8-recipe delayed --log-interval 1 --no-tensorboard --progress off --max-skipped-steps 3 --keep-last 3
--check-weight-hash-across-dp-replicas-interval 1""".split()
LAYOUTS = {2: [], 4: ["--tensor-model-parallel-size", "2", "--sequence-parallel"]}

_STEP = re.compile(r"iter +(\d+)/\d+ \| loss")
_BEGIN = re.compile(r"training (?:starts from scratch|resumes after iteration (\d+)) on ")
_SAVED = re.compile(r"^saved \S*iter_0*(\d+) ")
_NOT_SAVED = re.compile(r"was not saved: ")


class Failed(RuntimeError):
    """A promise was broken."""


class Job:
    """One torchrun and its ranks. A thread reads what they print, also after torchrun has ended."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        self.lines: list[str] = []
        self.iteration = 0
        self.begins: list[int] = []
        self.saved: list[int] = []
        self.num_failed_saves = 0
        self._log = log
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def ranks(self) -> dict[int, int]:
        """Rank → process, of the ranks that run."""
        found = {}
        try:
            for child in psutil.Process(self.process.pid).children():
                rank = child.environ().get("RANK")
                if rank is not None and child.status() != psutil.STATUS_ZOMBIE:
                    found[int(rank)] = child.pid
        except psutil.Error:
            pass
        return found

    def end(self) -> None:
        """Kill torchrun and its ranks."""
        for process in [*self.ranks().values(), self.process.pid]:
            _signal(process, signal.SIGKILL)
        self.process.wait()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self._log.open("a") as log:
            for line in self.process.stdout:
                log.write(line)
                log.flush()
                self.lines.append(line.rstrip())
                if match := _STEP.search(line):
                    self.iteration = int(match[1])
                elif match := _BEGIN.search(line):
                    self.iteration = int(match[1] or 0)
                    self.begins.append(self.iteration)
                elif match := _SAVED.search(line):
                    self.saved.append(int(match[1]))
                elif _NOT_SAVED.search(line):
                    self.num_failed_saves += 1


@dataclass
class Fault:
    """One fault and what came of it.

    Attributes:
        at: the iteration that it was drawn for.
        reached: the last iteration that was trained when it came.
        resumed: the iteration that training went on from; None where it was not interrupted.
        lost: reached - resumed.
        seconds: until training went on.
    """

    number: int
    kind: str
    at: int
    target: str = ""
    reached: int = 0
    resumed: int | None = None
    lost: int = 0
    seconds: float = 0.0
    restarted_by: str = ""


@dataclass
class Chaos:
    """The disturbed run."""

    folder: Path
    num_ranks: int
    train_iters: int
    draw: random.Random
    faults: list[Fault] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)

    @property
    def save(self) -> Path:
        return self.folder / "run"

    @property
    def orders(self) -> Path:
        return self.folder / "orders"

    @property
    def job(self) -> Job:
        return self.jobs[-1]

    def start(self) -> None:
        """Start the job, again."""
        self.jobs.append(self.new_job("log"))

    def new_job(self, log: str, max_restarts: int = MAX_RESTARTS, **environment: str) -> Job:
        """The job's command as a process."""
        command = run_command(self.num_ranks, self.save, self.train_iters, max_restarts)
        return Job(command, rank_environment(self.orders) | environment, self.folder / log)

    def wait(self, until: Callable[[], bool], what: str) -> None:
        """Wait, and start the job again where torchrun has ended."""
        deadline = time.monotonic() + PATIENCE
        while not until():
            if time.monotonic() > deadline:
                raise Failed(f"no {what} within {PATIENCE:.0f} s\n" + "\n".join(self.job.lines[-20:]))
            if self.job.process.poll() is not None and not self.is_done():
                self.start()
            time.sleep(0.05)

    def is_done(self) -> bool:
        """Whether the job has trained to its end."""
        return self.job.process.poll() == 0 and self.job.iteration >= self.train_iters

    def bring(self, fault: Fault) -> None:
        """Wait for the fault's iteration, bring it, wait until training goes on, and check what was lost."""
        (self.orders / "limit").write_text(str(fault.at + _SLACK))
        # At least one step after the last start: a fault then meets ranks that train.
        self.wait(lambda: bool(self.job.begins) and self.job.iteration >= fault.at, f"iteration {fault.at}")
        time.sleep(self.draw.uniform(0.0, 0.2))
        job, started = self.job, time.monotonic()
        announced, num_begins = self._newest_saved(), len(job.begins)
        older = ACTIONS[fault.kind](self, fault)
        if fault.kind in UNINTERRUPTED:
            fault.reached = self.job.iteration
            fault.seconds = round(time.monotonic() - started, 1)
            return
        self.wait(lambda: self._begun_since(job, num_begins) is not None, "restart")
        fault.reached = max(fault.reached, job.iteration if self.job is not job else fault.at)
        resumed = self._begun_since(job, num_begins)
        assert resumed is not None
        fault.resumed, fault.lost = resumed, max(0, fault.reached - resumed)
        fault.restarted_by = "torchrun" if self.job is job else "driver"
        self.wait(lambda: self.job.iteration > resumed or self.is_done(), "step after the restart")
        fault.seconds = round(time.monotonic() - started, 1)
        self._check_lost(fault, announced, older)

    def _begun_since(self, job: Job, num_begins: int) -> int | None:
        """Where training went on after a fault of `job`; None until it does."""
        begins = self.job.begins if self.job is not job else job.begins[num_begins:]
        return begins[-1] if begins else None

    def _newest_saved(self) -> int:
        return max((iteration for job in self.jobs for iteration in job.saved), default=0)

    def _check_lost(self, fault: Fault, announced: int, older: int | None) -> None:
        """Nothing that was announced as saved is lost, and no more than a save interval of steps.

        Args:
            announced: the newest checkpoint when the fault came.
            older: the newest one that the fault did not damage; None if it damaged none.
        """
        assert fault.resumed is not None
        keeps = announced if older is None else older
        if fault.resumed < keeps:
            raise Failed(f"{fault}: iteration {keeps} had been announced as saved")
        allowed = SAVE_INTERVAL + max(0, announced - keeps)
        if fault.lost > allowed:
            raise Failed(f"{fault}: more than {allowed} steps are lost")

    def note(self, fault: Fault) -> None:
        fault.reached = self.job.iteration

    def some_rank(self, fault: Fault) -> int:
        """A process to hurt; waits for one. Notes which."""
        self.wait(lambda: len(self.job.ranks()) == self.num_ranks, "rank to hurt")
        rank, process = self.draw.choice(sorted(self.job.ranks().items()))
        fault.target = f"rank {rank}"
        self.note(fault)
        return process


def _signal(process: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, number)


def signal_rank(number: signal.Signals) -> Callable[[Chaos, Fault], None]:
    def act(chaos: Chaos, fault: Fault) -> None:
        _signal(chaos.some_rank(fault), number)

    return act


def signal_torchrun(number: signal.Signals) -> Callable[[Chaos, Fault], None]:
    def act(chaos: Chaos, fault: Fault) -> None:
        chaos.note(fault)
        fault.target = "torchrun"
        _signal(chaos.job.process.pid, number)
        # What its ranks still train is theirs; the next job reads where they stopped.
        chaos.job.process.wait(timeout=PATIENCE)

    return act


def damage_checkpoint(chaos: Chaos, fault: Fault) -> int | None:
    """Damage a file of the newest checkpoint, and kill a rank. Returns the checkpoint before it."""
    saved = saved_iterations(chaos.save)
    if len(saved) < 2:  # no older one to go back to
        signal_rank(signal.SIGKILL)(chaos, fault)
        return None
    process = chaos.some_rank(fault)
    files = [path for path in sorted(iteration_folder(chaos.save, saved[-1]).iterdir()) if path.stat().st_size > 0]
    path, how = chaos.draw.choice(files), chaos.draw.choice(["cut", "changed", "removed"])
    content = bytearray(path.read_bytes())
    if how == "cut":
        os.truncate(path, chaos.draw.randrange(len(content)))
    elif how == "changed":
        content[chaos.draw.randrange(len(content))] ^= 1 << chaos.draw.randrange(8)
        path.write_bytes(content)
    else:
        path.unlink()
    fault.target += f", {path.name} {how}"
    _signal(process, signal.SIGKILL)
    return saved[-2]


def fill_disk(chaos: Chaos, fault: Fault) -> None:
    """Let every rank write 4 KiB to a file at most, until a save has failed; then until one has succeeded."""
    chaos.wait(lambda: len(chaos.job.ranks()) == chaos.num_ranks, "ranks")
    job, failed = chaos.job, chaos.job.num_failed_saves
    processes = list(job.ranks().values())
    unlimited = resource.RLIM_INFINITY
    for process in processes:
        resource.prlimit(process, resource.RLIMIT_FSIZE, (_FULL_BYTES, unlimited))
    (chaos.orders / "limit").write_text(str(fault.at + 2 * SAVE_INTERVAL + _SLACK))
    chaos.wait(lambda: job.num_failed_saves > failed or chaos.job is not job, "save that fails")
    for process in processes:
        try:
            resource.prlimit(process, resource.RLIMIT_FSIZE, (unlimited, unlimited))
        except ProcessLookupError as error:
            raise Failed("a full disk ended a rank\n" + "\n".join(job.lines[-20:])) from error
    _wait_for_save(chaos, job)


def slow_disk(chaos: Chaos, fault: Fault) -> None:
    """Let each sync take a second until a checkpoint is saved."""
    (chaos.orders / "limit").write_text(str(fault.at + 2 * SAVE_INTERVAL + _SLACK))
    (chaos.orders / "slow").touch()
    try:
        _wait_for_save(chaos, chaos.job)
    finally:
        (chaos.orders / "slow").unlink()


def _wait_for_save(chaos: Chaos, job: Job) -> None:
    count = len(job.saved)
    chaos.wait(lambda: len(job.saved) > count or chaos.job is not job, "save")


def second_run(chaos: Chaos, fault: Fault) -> None:
    """Start the same command again. It must end, and name the first run's process."""
    holder = chaos.job.ranks().get(0)
    other = chaos.new_job("log_second_run", max_restarts=0, CHAOS_WAIT_SECONDS="8")
    try:
        status = other.process.wait(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        other.end()
        raise Failed(f"a second run did not end within {PATIENCE:.0f} s") from None
    said = "\n".join(other.lines)
    if status == 0 or f"process {holder} on " not in said:
        raise Failed(f"a second run ended with status {status} and did not name process {holder}:\n{said[-3000:]}")
    if other.begins:
        raise Failed("a second run trained")


def order(what: str) -> Callable[[Chaos, Fault], None]:
    def act(chaos: Chaos, fault: Fault) -> None:
        rank = chaos.draw.randrange(chaos.num_ranks)
        fault.target = f"rank {rank}"
        job, path = chaos.job, chaos.orders / f"rank{rank}"
        path.with_suffix(".tmp").write_text(what)
        os.replace(path.with_suffix(".tmp"), path)
        chaos.wait(lambda: not path.exists() or chaos.job is not job, "fault that was ordered")
        chaos.note(fault)

    return act


ACTIONS: dict[str, Callable[[Chaos, Fault], int | None]] = {
    "kill rank": signal_rank(signal.SIGKILL),
    "stop rank": signal_rank(signal.SIGSTOP),
    "term rank": signal_rank(signal.SIGTERM),
    "kill torchrun": signal_torchrun(signal.SIGKILL),
    "term torchrun": signal_torchrun(signal.SIGTERM),
    "damaged checkpoint": damage_checkpoint,
    "full disk": fill_disk,
    "slow disk": slow_disk,
    "second run": second_run,
    "nan burst": order("nan"),
    "bit flip": order("flip"),
}
UNINTERRUPTED = ("full disk", "slow disk", "second run")


def draw_faults(count: int, draw: random.Random) -> list[Fault]:
    """Kinds in random order, in numbers that differ by one at most; iterations with random gaps."""
    kinds: list[str] = []
    while len(kinds) < count:
        kinds += draw.sample(list(ACTIONS), len(ACTIONS))
    iteration, faults = 2 * SAVE_INTERVAL, []
    for number, kind in enumerate(draw.sample(kinds[:count], count)):
        iteration += draw.randint(*GAP)
        faults.append(Fault(number + 1, kind, iteration))
    return faults


def run_command(num_ranks: int, save: Path, train_iters: int, max_restarts: int = MAX_RESTARTS) -> list[str]:
    """The job's command; it resumes from what it finds."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    folders = ["--save", str(save), "--load", str(save), "--save-interval", str(SAVE_INTERVAL)]
    return [
        *torchrun,
        *("--max-restarts", str(max_restarts), str(Path(__file__).with_name("chaos_rank.py"))),
        *(*MODEL, *LAYOUTS[num_ranks], *folders, "--train-iters", str(train_iters)),
        *("--distributed-timeout-minutes", "0.5"),
    ]


def rank_environment(orders: Path) -> dict[str, str]:
    """The environment of the ranks: on the CPU, a thread each."""
    own = {"CHAOS_ORDERS": str(orders), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, **own, "PYTHONPATH": path}


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
                    "kind": kind,
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
        lines.append(f"| {row['kind']} | {row['faults']} | {row['most_steps_again']} | {seconds} |")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    """Run; 0 if the ends are equal and nothing was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, choices=sorted(LAYOUTS), default=2, help="CPU ranks (default 2)")
    parser.add_argument("--faults", type=int, default=60, metavar="N", help="number of faults (default 60)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="bring no more faults after this time")
    parser.add_argument("--seed", type=int, default=1, help="of kinds, iterations and targets (default 1)")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the result, as JSON")
    parser.add_argument("--folder", type=Path, help="where to train (default: a temporary folder, removed at the end)")
    own = parser.parse_args(words)
    if own.faults < 1:
        parser.error(f"--faults {own.faults}: give 1 or more")
    folder = Path(tempfile.mkdtemp(prefix="chaos")) if own.folder is None else own.folder
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    draw = random.Random(own.seed)
    last = draw_faults(own.faults, random.Random(own.seed))[-1].at
    chaos = Chaos(folder, own.ranks, last + SAVE_INTERVAL + 5, draw)
    problem = ""
    try:
        expected = undisturbed(folder, own.ranks, chaos.train_iters)
        run_chaos(chaos, own.faults, 60 * own.minutes)
        if final_state(chaos.orders, own.ranks) != expected:
            problem = "the state at the end differs from the undisturbed run's"
    except Failed as error:
        problem = str(error)
    rows = summary(chaos.faults)
    result = {
        "command": "python benchmarks/chaos.py "
        + f"--ranks {own.ranks} --faults {own.faults} --seed {own.seed} --output {own.output.name}"
        + (f" --minutes {own.minutes:g}" if math.isfinite(own.minutes) else ""),
        "device": f"CPU, {os.cpu_count()} cores, {platform.machine()}",
        "train_iters": chaos.train_iters,
        "save_interval": SAVE_INTERVAL,
        "jobs_started": len(chaos.jobs),
        "minutes": round((time.monotonic() - started) / 60, 1),
        "same_state_at_the_end": not problem,
        "problem": problem,
        "kinds": rows,
        "faults": [asdict(fault) for fault in chaos.faults],
    }
    own.output.write_text(json.dumps(result, indent=1) + "\n")
    print(table(rows))
    print(problem or f"{len(chaos.faults)} faults, {len(chaos.jobs)} jobs: the same state at the end, bit for bit")
    if own.folder is None:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
