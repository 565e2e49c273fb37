"""Runs a function on several ranks: processes that stay alive between calls, because importing torch takes seconds.

A fork server imports the package once and forks the workers, so that a pool starts, and starts again, in a moment. A
call that fails or hangs kills the workers it found; the next call gets new ones.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, TypeVar

import torch

from fp8_megatron.mcore import topology

#: What ranks would import one by one: the last two when a rank makes an optimizer and when it draws.
_PRELOAD = ["tests.harness.tiny_gpt", "tests.harness.ranks", "torch._dynamo", "matplotlib.figure"]
#: How long the other ranks may take to say what they saw after the first one failed.
_GRACE_SECONDS = 2.0
_MOST_KNOWN = 16

_init_process_group = torch.distributed.init_process_group
_destroy_process_group = torch.distributed.destroy_process_group

Result = TypeVar("Result")


class RankError(RuntimeError):
    """A rank raised, died or did not answer; the message holds its rank and its traceback."""


class RankPool:
    """Worker processes for up to `max_ranks` ranks, started when a call first needs them.

    Use as a context manager, or `close` it.

    Args:
        on_gpus: ranks may use GPUs. They are new processes then: CUDA does not work in a fork of a process that has
            used it, and imports may use it.
    """

    def __init__(self, max_ranks: int, *, on_gpus: bool = False) -> None:
        self.max_ranks = max_ranks
        self._context: Any = multiprocessing.get_context("spawn" if on_gpus else "forkserver")
        if not on_gpus:
            self._context.set_forkserver_preload(_PRELOAD)
        self._workers: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []
        self._known: dict[bytes, list[Any]] = {}

    def run_once(self, function: Callable[..., Result], *args: Any, num_ranks: int) -> list[Result]:
        """`run`, or what it returned for the same arguments: the last `_MOST_KNOWN` results are kept.

        For a function that gives the same each time, and no test of that.
        """
        values = [arg.tolist() if isinstance(arg, torch.Tensor) else arg for arg in args]
        key = hashlib.sha256(pickle.dumps((function, values, num_ranks))).digest()
        found = self._known.pop(key, None)
        if found is None:
            found = self.run(function, *args, num_ranks=num_ranks)
        self._known[key] = found
        if len(self._known) > _MOST_KNOWN:
            del self._known[next(iter(self._known))]
        return found

    def run(
        self, function: Callable[..., Result], *args: Any, num_ranks: int, timeout_seconds: float = 120.0
    ) -> list[Result]:
        """Call ``function(*args)`` on each rank of a new world; its results in rank order.

        The ranks find RANK, LOCAL_RANK and WORLD_SIZE in their environment, as under torchrun; the function joins and
        leaves the process group itself (`mcore.topology.initialized`, or `on_default_group`).

        Args:
            function: of a module's top level; `args` and the results must pickle (tensors on the CPU do).

        Raises:
            RankError: the rank that died or raised first, with its traceback, and what the others saw of it; or the
                ranks that had not answered in time.
        """
        assert 1 <= num_ranks <= self.max_ranks, f"num_ranks({num_ranks}) of a pool of {self.max_ranks}"
        self._start(num_ranks)
        connections = [connection for _, connection in self._workers[:num_ranks]]
        with tempfile.TemporaryDirectory() as folder:
            try:
                for rank, connection in enumerate(connections):
                    place = _Place(rank, num_ranks, os.path.join(folder, "rendezvous"))
                    connection.send_bytes(pickle.dumps((place, function, args)))
                return _collect(connections, timeout_seconds)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Kill the workers."""
        for process, connection in self._workers:
            connection.close()
            process.kill()
        for process, _ in self._workers:
            process.join()
        self._workers.clear()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, num_ranks: int) -> None:
        if any(not process.is_alive() for process, _ in self._workers):
            self.close()
        while len(self._workers) < num_ranks:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))


def on_default_group(function: Callable[..., Result], *args: Any, backend: str = "gloo") -> Result:
    """Call ``function(group, *args)`` inside a default process group; for `RankPool.run`."""
    torch.distributed.init_process_group(backend)
    try:
        assert torch.distributed.group.WORLD is not None
        result = function(torch.distributed.group.WORLD, *args)
        torch.distributed.barrier()  # a rank that leaves early breaks the connections that others still make
        return result
    finally:
        torch.distributed.destroy_process_group()


@dataclass(frozen=True)
class _Place:
    """A rank's place in the world of one call."""

    rank: int
    num_ranks: int
    rendezvous_file: str

    def take(self) -> _TimeOfFailure:
        """Make this process the rank. What is returned will know when the rank began to fail, if it does."""
        os.environ.update(RANK=str(self.rank), LOCAL_RANK=str(self.rank), WORLD_SIZE=str(self.num_ranks))
        # Ranks meet in a file: TCP rendezvous looks up host names, for seconds where the name service is slow.
        store = torch.distributed.FileStore(self.rendezvous_file, self.num_ranks)
        torch.distributed.init_process_group = functools.partial(
            _join, store=store, rank=self.rank, world_size=self.num_ranks
        )
        topology.process_group_arguments = lambda timeout: {}  # type: ignore[assignment]
        torch.distributed.destroy_process_group = functools.partial(_leave, time_of_failure := _TimeOfFailure())
        return time_of_failure


@dataclass
class _TimeOfFailure:
    """When a rank's error began to reach the others: seconds of the machine's monotonic clock."""

    seconds: float | None = None

    def note(self) -> float:
        """The time noted first; now, if none was."""
        if self.seconds is None:
            self.seconds = time.monotonic()
        return self.seconds


def _join(*args: Any, store: torch.distributed.Store, rank: int, world_size: int, **kwargs: Any) -> None:
    """Join the process group and wait for the others: who leaves at once breaks connections still being made."""
    _init_process_group(*args, store=store, rank=rank, world_size=world_size, **kwargs)
    num_joined = store.add("num_joined", 1)
    this_group = (num_joined - 1) // world_size
    if num_joined == (this_group + 1) * world_size:
        store.set(f"all_joined_{this_group}", "")
    store.wait([f"all_joined_{this_group}"])


def _leave(time_of_failure: _TimeOfFailure, *args: Any) -> None:
    """Destroy a process group. On a rank that is failing this is what makes the other ranks fail."""
    if sys.exc_info()[0] is not None:
        time_of_failure.note()
    _destroy_process_group(*args)


def _share_gloo_device() -> None:
    """Let all gloo groups of this process have one device: each device has a thread that wakes up every 10 ms."""
    plain = torch.distributed.ProcessGroupGloo
    device = plain.create_default_device()

    class OnOneDevice(plain):  # type: ignore[misc, valid-type]
        def __init__(self, store: torch.distributed.Store, rank: int, size: int, timeout: timedelta) -> None:
            options = plain._Options()
            options._devices, options._timeout = [device], timeout
            super().__init__(store, rank, size, options)

    torch.distributed.distributed_c10d.ProcessGroupGloo = OnOneDevice  # type: ignore[misc, assignment]


def _serve(connection: Connection) -> None:
    """Answer calls until the pool goes away. An answer is a result or a `_Failure`."""
    torch.set_num_threads(1)
    _share_gloo_device()
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        time_of_failure, environment = _TimeOfFailure(), dict(os.environ)
        try:
            # Unpickling imports the function's module, which may raise too.
            place, function, args = pickle.loads(request)
            time_of_failure = place.take()
            torch.manual_seed(0)
            gc.freeze()  # what stays is not looked through again
            answer = pickle.dumps(function(*args))
        except BaseException:
            answer = pickle.dumps(_Failure(time_of_failure.note(), traceback.format_exc()))
        os.environ.clear()  # the next call is another test's
        os.environ.update(environment)
        connection.send_bytes(answer)
        # A model is a cycle that holds its groups, and each group has a thread that wakes a hundred times a second.
        gc.collect()


@dataclass(frozen=True)
class _Failure:
    """A rank's traceback, and when it began to fail; a death, which comes unannounced, counts as the earliest."""

    seconds: float
    text: str


def _collect(connections: list[Connection], timeout_seconds: float) -> list[Any]:
    """Every rank's result, in rank order; raises for the first that fails."""
    deadline = time.monotonic() + timeout_seconds
    results: dict[int, Any] = {}
    failures: dict[int, _Failure] = {}
    while len(results) + len(failures) < len(connections):
        pending = [connection for rank, connection in enumerate(connections) if rank not in results | failures]
        ready = wait(pending, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = connections.index(connection)
            try:
                answer = pickle.loads(connection.recv_bytes())
            except EOFError:
                answer = _Failure(0.0, "the process died")
            if isinstance(answer, _Failure):
                failures[rank] = answer
            else:
                results[rank] = answer
        if failures:
            deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    if failures:
        raise RankError(_describe(failures, len(connections)))
    if len(results) < len(connections):
        silent = sorted(set(range(len(connections))) - set(results))
        raise RankError(f"ranks {silent} of {len(connections)} did not answer within {timeout_seconds} s")
    return [results[rank] for rank in range(len(connections))]


def _describe(failures: dict[int, _Failure], num_ranks: int) -> str:
    """The first failure in full, and the last line of those it caused."""
    (rank, first), *others = sorted(failures.items(), key=lambda item: item[1].seconds)
    lines = [f"rank {rank} of {num_ranks}: {first.text.rstrip()}"]
    lines += [f"then rank {other}: {failure.text.rstrip().splitlines()[-1]}" for other, failure in others]
    return "\n".join(lines)
