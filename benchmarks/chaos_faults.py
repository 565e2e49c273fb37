"""The faults of a chaos run (`chaos.py`): how each is brought, and what may be lost by it."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.chaos_job import MAX_RESTARTS, SAVE_INTERVAL, Failed, Job, rank_environment, run_command, send_signal
from fp8_megatron.checkpoint.files import iteration_folder, saved_iterations

#: The range of steps between two faults.
GAP = (4, 14)
#: Steps that the ranks train past a fault's iteration before they wait for it: a fault meets ranks that train.
_SLACK = 6
#: Steps that the ranks may train until a save has failed and another has succeeded.
_STEPS_OF_A_DISK = 2 * SAVE_INTERVAL + _SLACK
#: Seconds within which training must go on, or a fault must show. More means that the job hangs.
PATIENCE = 420.0
_FULL_BYTES = 4096


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
        """The folder that the job saves into."""
        return self.folder / "run"

    @property
    def orders(self) -> Path:
        """The folder of orders to the ranks (`chaos_rank`)."""
        return self.folder / "orders"

    @property
    def job(self) -> Job:
        """The newest torchrun."""
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

    def allow(self, iteration: int) -> None:
        """Let the ranks train up to this iteration."""
        assert iteration <= self.train_iters, (iteration, self.train_iters)
        (self.orders / "limit").write_text(str(iteration))

    def is_done(self) -> bool:
        """Whether the job has trained to its end."""
        return self.job.process.poll() == 0 and self.job.iteration >= self.train_iters

    def bring(self, fault: Fault) -> None:
        """Wait for the fault's iteration, bring it, wait until training goes on, and check what was lost."""
        self.allow(max(fault.at, self.job.iteration) + _SLACK)
        # At least one step after the last start: a fault then meets ranks that train.
        self.wait(lambda: bool(self.job.begins) and self.job.iteration >= fault.at, f"iteration {fault.at}")
        time.sleep(self.draw.uniform(0.0, 0.2))
        job, started = self.job, time.monotonic()
        announced, num_begins = self._newest_saved(), len(job.begins)
        # Ranks that wait for the next fault obey neither a signal to stop nor an order.
        self.allow(max(fault.at, self.job.iteration) + 2 * _SLACK)
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
        self.allow(max(fault.at, self.job.iteration) + 2 * _SLACK)  # a step is told when the next one is queued
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
        """Note the last iteration that was trained."""
        fault.reached = self.job.iteration

    def some_rank(self, fault: Fault) -> int:
        """A process to hurt; waits for one. Notes which."""
        self.wait(lambda: len(self.job.ranks()) == self.num_ranks, "rank to hurt")
        rank, process = self.draw.choice(sorted(self.job.ranks().items()))
        fault.target = f"rank {rank}"
        self.note(fault)
        return process


def signal_rank(number: signal.Signals) -> Callable[[Chaos, Fault], None]:
    """Send a signal to one rank."""

    def act(chaos: Chaos, fault: Fault) -> None:
        send_signal(chaos.some_rank(fault), number)

    return act


def signal_torchrun(number: signal.Signals) -> Callable[[Chaos, Fault], None]:
    """Send a signal to torchrun, and wait for its end."""

    def act(chaos: Chaos, fault: Fault) -> None:
        chaos.note(fault)
        fault.target = "torchrun"
        send_signal(chaos.job.process.pid, number)
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
    send_signal(process, signal.SIGKILL)
    return saved[-2]


def fill_disk(chaos: Chaos, fault: Fault) -> None:
    """Let every rank write 4 KiB to a file at most, until a save has failed; then until one has succeeded."""
    chaos.wait(lambda: len(chaos.job.ranks()) == chaos.num_ranks, "ranks")
    job, failed = chaos.job, chaos.job.num_failed_saves
    processes = list(job.ranks().values())
    unlimited = resource.RLIM_INFINITY
    for process in processes:
        resource.prlimit(process, resource.RLIMIT_FSIZE, (_FULL_BYTES, unlimited))
    chaos.allow(chaos.job.iteration + _STEPS_OF_A_DISK)
    chaos.wait(lambda: job.num_failed_saves > failed or chaos.job is not job, "save that fails")
    for process in processes:
        try:
            resource.prlimit(process, resource.RLIMIT_FSIZE, (unlimited, unlimited))
        except ProcessLookupError as error:
            raise Failed("a full disk ended a rank\n" + "\n".join(job.lines[-20:])) from error
    _wait_for_save(chaos, job)


def slow_disk(chaos: Chaos, fault: Fault) -> None:
    """Let each sync take a second until a checkpoint is saved."""
    chaos.allow(chaos.job.iteration + _STEPS_OF_A_DISK)
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
    """Let one rank spoil its own weights (`chaos_rank`)."""

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


def steps_for(faults: list[Fault]) -> int:
    """Steps of a run that all these faults meet before its end, whatever the ranks train beside them."""
    num_disks = sum(fault.kind in ("full disk", "slow disk") for fault in faults)
    return faults[-1].at + 4 * len(faults) * _SLACK + num_disks * _STEPS_OF_A_DISK + SAVE_INTERVAL + 5
