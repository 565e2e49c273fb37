"""A rank that dies or stops ends the run on every other rank, and each of them names it.

docs/failures.md has the whole picture.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
import re
import socket
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from ..collectives.transport import copy_engine
from ..device.device import world_size
from ..device.variables import number
from ..mcore.topology import Topology
from . import flight_recorder
from .flight_recorder import CallSite
from .heartbeat import Heartbeat, Pace, RankStatus, Sighting, State
from .restarts import Fault, GaveUp, log_fault

#: Exit status of a rank that ended because of another one: sysexits' "temporary failure, try again".
EXIT_STATUS = 75

#: Seconds to find the cause of an error, report it, and leave the process groups.
_LEAVE_WITHIN_SECONDS = 60.0
_BROKEN_COLLECTIVE = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|broken pipe|timed out waiting|socket timeout", re.IGNORECASE
)


class RankFailure(RuntimeError):
    """Another rank is gone. The message names it, and the collective in which this rank waited for it."""


@dataclass(frozen=True)
class Cause:
    """Why this rank must end, for a message; the rank and the host that are at fault, where they are known."""

    text: str
    rank: int | None = None
    host: str = ""
    fault: Fault = Fault.RANK_LOST


@contextmanager
def watched_world(
    world: AbstractContextManager[Topology], output_dir: Path, *, timeout_seconds: float
) -> Iterator[tuple[Topology, RankWatch]]:
    """Join a process group with the flight recorder on and this rank watching the others.

    Args:
        world: joins the process group when it is entered (`topology.initialized`).
        output_dir: of the run; the flight recorder and the run's log write to it.
        timeout_seconds: what a collective may take.

    Raises:
        RankFailure: in place of the error that a collective raised because another rank is gone.
    """
    with ExitStack() as stack:
        if world_size() > 1:
            stack.enter_context(flight_recorder.enabled(output_dir))
        watch = RankWatch(timeout_seconds, output_dir)
        # Entered first, left last: leaving a process group may hang too when a rank is gone.
        stack.callback(watch.stop)
        topology = stack.enter_context(world)
        if topology.world_size > 1:
            watch.start(topology.rank, topology.world_size)
        stack.enter_context(watch)
        yield topology, watch


class RankWatch:
    """Watches the other ranks while this one trains, and ends this one if it hangs because of them.

    A context manager. Leaving it after an error tells the other ranks, and finds out whether they are the cause.
    Leaving it again does nothing. Before `start`, and in a world of one rank, it watches nobody.

    Args:
        timeout_seconds: what a collective may take.
        folder: of the run's log. One rank writes there why the run ends; None: nobody does.
    """

    def __init__(self, timeout_seconds: float, folder: Path | None = None) -> None:
        self.pace = Pace.for_timeout(timeout_seconds)
        self._timeout_seconds = timeout_seconds
        self._heartbeat: Heartbeat | None = None
        self._store: torch.distributed.Store | None = None
        self._folder = folder
        self._rank = number("RANK", 0)
        self._iteration = 0
        self._main_thread = threading.main_thread()
        self._stopped = threading.Event()
        self._leaving = threading.Event()
        self._told = ""

    def start(self, rank: int, world_size: int) -> None:
        """Begin to watch. The default process group must exist. Not collective."""
        self._rank = rank
        self._main_thread = threading.current_thread()
        # Kept until the end: on the rank that hosts the store it contains the server.
        self._store = torch.distributed.distributed_c10d._get_default_store()
        status = RankStatus(host=socket.gethostname(), process=os.getpid())
        self._heartbeat = Heartbeat(self._store, rank, world_size, self.pace, status)
        threading.Thread(target=self._guard, name="rank watch", daemon=True).start()

    def at(self, iteration: int, doing: str) -> None:
        """Note what this rank's main thread is doing, for the messages of all ranks. Costs nothing."""
        self._iteration = iteration
        if self._heartbeat is not None:
            before = self._heartbeat.status
            status = replace(before, iteration=iteration, doing=doing, patient=False)
            if before.patient:
                # Published at once: until the other ranks know, they would be patient with this rank.
                self._heartbeat.publish(status, timeout_seconds=0.0)
            else:
                self._heartbeat.note(status)

    @contextmanager
    def patiently(self, doing: str) -> Iterator[None]:
        """For work that may hold Python's lock for long, so that no thread of this rank can send heartbeats."""
        if self._heartbeat is None:
            yield
            return
        before = self._heartbeat.status
        self._heartbeat.publish(replace(before, doing=doing, patient=True), timeout_seconds=self.pace.interval)
        yield
        after = replace(self._heartbeat.status, doing=before.doing, patient=before.patient)
        self._heartbeat.publish(after, timeout_seconds=0.0)

    def stop(self) -> None:
        """Stop watching. No thread of this watch acts afterwards."""
        self._stopped.set()
        if self._heartbeat is not None:
            self._heartbeat.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._leaving.is_set() or self._stopped.is_set():
            return
        if self._heartbeat is None:
            if error is not None:
                self._leaving.set()
                self._log_own_error(error)
            return
        if error is None:
            self._stopped.set()
            self._say_goodbye()
            return
        self._leaving.set()
        self._told = _first_line(error)
        if not is_broken_collective(error):
            self._log_own_error(error)
            self._say_last_words(State.FAILED, self._told)
            return
        causes = self._search_for_causes()
        where = self._whereabouts(CallSite.of_traceback(trace))
        if not causes:
            self._log_own_error(error)
            error.add_note(f"All other ranks still answer ({self._others_whereabouts()}). {where}")
            self._say_last_words(State.FAILED, self._told)
            return
        text = _join(causes)
        self._told = f"{text}. {where} Its error: {self._told}"
        self._log_causes(causes)
        self._say_last_words(State.ENDED, text)
        raise RankFailure(self._told) from error

    def _guard(self) -> None:
        """The thread that ends this process when its main thread hangs, or hangs while leaving."""
        waited = leaving = 0.0
        last_time = time.monotonic()
        while not self._stopped.wait(self.pace.interval):
            assert self._heartbeat is not None
            elapsed = min(time.monotonic() - last_time, 2 * self.pace.interval)
            last_time = time.monotonic()
            self._heartbeat.tick(elapsed)
            if self._leaving.is_set():
                leaving += elapsed
                if leaving > _LEAVE_WITHIN_SECONDS:
                    self._end_process(f"{self._told}. It hangs while it leaves")
            elif causes := self._silent() or self._lost_store() or self._overdue():
                self._end_process(_join(causes), causes)
            else:
                # Some ranks reported an error: this rank will raise its own soon, unless it hangs.
                causes = self._failed() or self._ended()
                waited = waited + elapsed if causes else 0.0
                if waited > 5 * self.pace.interval:
                    self._end_process(_join(causes), causes)

    def _log_own_error(self, error: BaseException) -> None:
        """The first rank writes its own error to the run's log; it learns of other ranks' from them."""
        if self._folder is None or self._rank != 0 or isinstance(error, GaveUp):
            return
        fault = getattr(error, "fault", Fault.RANK_FAILED)
        kind = type(error).__name__
        hosts = getattr(error, "hosts", None)
        log_fault(self._folder, fault, _first_line(error), iteration=self._iteration, hosts=hosts, error=kind)

    def _log_causes(self, causes: list[Cause]) -> None:
        """The lowest rank that is not at fault writes to the run's log who is."""
        hosts = {cause.rank: cause.host for cause in causes if cause.rank is not None}
        if self._folder is None or self._rank != next(rank for rank in itertools.count() if rank not in hosts):
            return
        log_fault(self._folder, causes[0].fault, _join(causes), iteration=self._iteration, hosts=hosts)

    def _search_for_causes(self) -> list[Cause]:
        """Find who is gone, after a collective failed here. Waits until a rank is gone or every rank has answered."""
        assert self._heartbeat is not None
        self._heartbeat.watch_everyone()
        deadline = time.monotonic() + 6 * self.pace.interval
        suspect = self.pace.suspect_after
        while time.monotonic() < deadline:
            causes = [*self._failed(), *self._silent(suspect)] or self._lost_store(suspect) or self._ended()
            if causes:
                return causes
            time.sleep(self.pace.interval / 4)
        return [_cause(rank, seen, "had finished") for rank, seen in self._in_state(State.LEFT)]

    def _in_state(self, state: State) -> list[tuple[int, Sighting]]:
        assert self._heartbeat is not None
        return [(rank, seen) for rank, seen in self._heartbeat.others().items() if seen.status and seen.state is state]

    def _failed(self) -> list[Cause]:
        """Ranks that reported a failure."""
        failed = self._in_state(State.FAILED)
        return [_cause(rank, seen, f"failed: {seen.because}", Fault.RANK_FAILED) for rank, seen in failed]

    def _ended(self) -> list[Cause]:
        """One rank that reported that it ended because of others."""
        ended = self._in_state(State.ENDED)[:1]
        return [Cause(f"{_name(rank, seen)} ended because {seen.because}") for rank, seen in ended]

    def _silent(self, limit: float | None = None) -> list[Cause]:
        """Ranks that have been silent for `limit` seconds. None: for longer than their own limit."""
        assert self._heartbeat is not None
        return [
            _cause(rank, seen, f"has not answered for {seen.silence:.0f} s")
            for rank, seen in self._heartbeat.others().items()
            if seen.state is State.RUNNING and seen.silence >= (seen.limit(self.pace) if limit is None else limit)
        ]

    def _lost_store(self, limit: float | None = None) -> list[Cause]:
        """The host of the store, if it has not answered for `limit` seconds (None: for as long as a rank may be
        silent).
        """
        heartbeat = self._heartbeat
        assert heartbeat is not None
        # After a failed collective, a store that refuses a connection is gone: no need to wait.
        refused = limit is not None and heartbeat.store_error
        if not refused and heartbeat.store_silence < (limit or self.pace.dead_after):
            return []
        how = heartbeat.store_error or f"no answer for {heartbeat.store_silence:.0f} s"
        if _torchrun_keeps_store():
            address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            return [Cause(f"torchrun of the first node, which keeps the rendezvous store {address}, is gone ({how})")]
        store = heartbeat.others().get(0, Sighting())
        host = "" if store.status is None else store.status.host
        return [Cause(f"{_name(0, store)}, which keeps the rendezvous store, is gone ({how})", 0, host)]

    def _overdue(self) -> list[Cause]:
        """Work of copy engines or a CUDA graph that takes longer than a collective may. Torch ends NCCL's own work."""
        work = copy_engine.unfinished()
        if work is None or time.monotonic() - work.queued_at < self._timeout_seconds:
            return []
        others = f"all other ranks still answer ({self._others_whereabouts()})"
        return [Cause(f"{work.name} by {work.by} has not ended within --distributed-timeout-minutes; {others}")]

    def _whereabouts(self, site: CallSite) -> str:
        """Where this rank is, and where its flight recorder was written."""
        assert self._heartbeat is not None
        status = self._heartbeat.status
        collective = flight_recorder.describe_collective(site)
        path = flight_recorder.write(self._rank)
        recorder = f" Flight recorder: {path}." if path is not None else ""
        return f"Rank {self._rank} was {status.doing}, iteration {status.iteration}, {collective}.{recorder}"

    def _others_whereabouts(self) -> str:
        assert self._heartbeat is not None
        others = self._heartbeat.others().items()
        places = [f"rank {rank} {s.status.doing}, iteration {s.status.iteration}" for rank, s in others if s.status]
        return "; ".join(places[:8]) + ("; …" if len(places) > 8 else "")

    def _say_goodbye(self) -> None:
        """Report that this rank is done. The rank that hosts the store waits until the others have reported it."""
        heartbeat = self._heartbeat
        assert heartbeat is not None
        status = replace(heartbeat.status, state=State.LEFT)
        heartbeat.publish(status, timeout_seconds=self.pace.interval)
        deadline = time.monotonic() + self.pace.dead_after
        while self._keeps_store() and time.monotonic() < deadline:
            if not any(seen.status and seen.state is State.RUNNING for seen in heartbeat.others().values()):
                break
            time.sleep(self.pace.interval / 20)
            heartbeat.publish(status, timeout_seconds=self.pace.interval)
        heartbeat.close()

    def _keeps_store(self) -> bool:
        return self._rank == 0 and not _torchrun_keeps_store()

    def _say_last_words(self, state: State, because: str) -> None:
        heartbeat = self._heartbeat
        assert heartbeat is not None
        heartbeat.publish(replace(heartbeat.status, state=state, because=because), timeout_seconds=self.pace.interval)
        listening = any(
            seen.state is State.RUNNING and seen.silence < self.pace.suspect_after
            for seen in heartbeat.others().values()
        )
        if listening and self._keeps_store():
            # The store ends with this process: the other ranks need time to read it.
            time.sleep(2 * self.pace.interval)

    def _end_process(self, why: str, causes: list[Cause] | None = None) -> None:
        """Report why, and end the process without the main thread, which hangs in native code.

        Args:
            causes: for the run's log; None where it has them already.
        """
        # In case anything below hangs as well: a C thread, which does not need Python's lock.
        faulthandler.dump_traceback_later(self.pace.dead_after, exit=True)
        print(f"error on rank {self._rank}: {why}.", file=sys.stderr, flush=True)
        if causes:
            self._log_causes(causes)
        self._say_last_words(State.ENDED, why)
        frame = sys._current_frames().get(self._main_thread.ident or 0)
        stack = traceback.extract_stack(frame)
        main_thread = "".join(stack.format())
        print(
            f"{self._whereabouts(CallSite.of_stack(stack))} It hangs there:\n{main_thread}",
            file=sys.stderr,
            flush=True,
        )
        sys.stdout.flush()
        os._exit(EXIT_STATUS)


def is_broken_collective(error: BaseException) -> bool:
    """Whether an error may be caused by the end of another rank, not by this rank."""
    if isinstance(error, torch.distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and _BROKEN_COLLECTIVE.search(str(error)) is not None


def _torchrun_keeps_store() -> bool:
    """Whether torchrun hosts the rendezvous store; rank 0 hosts it if ranks were started without torchrun."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {textwrap.shorten(lines[0], 200)}" if lines else type(error).__name__


def _join(causes: list[Cause]) -> str:
    texts = [cause.text for cause in causes[:8]]
    return "; ".join(texts) + (f"; and {len(causes) - 8} more" if len(causes) > 8 else "")


def _cause(rank: int, seen: Sighting, what: str, fault: Fault = Fault.RANK_LOST) -> Cause:
    host = "" if seen.status is None else seen.status.host
    return Cause(f"{_name(rank, seen)} {what}", rank, host, fault)


def _name(rank: int, sighting: Sighting) -> str:
    status = sighting.status
    if status is None:
        return f"rank {rank} (it never spoke)"
    last = f"last heard of {status.doing}, iteration {status.iteration}"
    return f"rank {rank} (host {status.host}, process {status.process}; {last})"
