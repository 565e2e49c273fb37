"""What a rank reports and does when another one dies, stops, fails, or is only slow.

The ranks are processes on gloo at fifteen times the pace of a run; a rank "dies" here by falling silent and closing its
connections. `test_failures_end_to_end.py` kills and stops ranks of the real program.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fp8_megatron.config.schema import ParallelConfig
from fp8_megatron.mcore.runtime import runtime
from fp8_megatron.mcore.topology import initialized
from fp8_megatron.reporting.run_log import EVENTS_FILE, read_events
from fp8_megatron.watch import failures
from fp8_megatron.watch.failures import EXIT_STATUS, RankFailure, RankWatch, is_broken_collective, watched_world
from fp8_megatron.watch.flight_recorder import CallSite
from tests.harness.ranks import RankPool

#: Slow, because they measure silence: beside other tests on the same cores a rank may be silent for want of a core.
pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
#: Minutes: a beat every 0.2 s, death after 2 s.
TIMEOUT = 1 / 15
DEAD_AFTER = 2.0
Body = Callable[[RankWatch, int], object]


def _on_a_rank(body: Body, folder: Path, timeout: float = TIMEOUT) -> tuple[str, str, float]:
    """Run `body` in a watched world: the error's type and its text with its notes, empty if none; seconds it took."""
    started = time.monotonic()
    world = initialized(ParallelConfig(distributed_timeout_minutes=timeout), 2, CPU)
    try:
        with runtime(CPU), watched_world(world, folder, timeout_seconds=60.0 * timeout) as (topology, watch):
            watch.at(7, "training")
            started = time.monotonic()
            body(watch, topology.rank)
    except Exception as error:
        text = "\n".join([str(error), *getattr(error, "__notes__", [])])
        return type(error).__name__, text, time.monotonic() - started
    return "", "", time.monotonic() - started


def _all_reduce() -> None:
    torch.distributed.all_reduce(torch.ones(5))


def _dies(watch: RankWatch, rank: int) -> None:
    _all_reduce()
    if rank == 1:
        watch.stop()  # says nothing more; leaving the process group closes the connections
        return
    _all_reduce()


def test_death_is_named_with_the_collective(ranks: RankPool, tmp_path: Path) -> None:
    (kind, text, seconds), _ = ranks.run(_on_a_rank, _dies, tmp_path, num_ranks=2)
    assert kind == RankFailure.__name__
    assert text.startswith("rank 1 (host ") and "last heard of training, iteration 7) has not answered for" in text
    assert "Rank 0 was training, iteration 7, in all_reduce of default_pg (ranks 0, 1), number " in text
    assert " on gloo, Float[5]" in text
    assert "Its error: RuntimeError: [" in text
    recorded = tmp_path / "flight_recorder_rank_0"
    assert f"Flight recorder: {recorded}." in text
    entries = pickle.loads(recorded.read_bytes())["entries"]
    assert [entry["profiling_name"] for entry in entries[-2:]] == ["gloo:all_reduce"] * 2
    assert seconds < 15.0
    (fault,) = read_events(tmp_path / EVENTS_FILE)
    assert (fault["kind"], fault["fault"], fault["ranks"], fault["iteration"]) == ("fault", "rank_lost", [1], 7)
    assert fault["hosts"] and fault["text"].startswith("rank 1 (host ")


def _fails(watch: RankWatch, rank: int) -> None:
    if rank == 1:
        raise ValueError("token 70000 is outside the vocabulary")
    _all_reduce()


def test_the_error_of_another_rank_is_named_instead_of_the_broken_connection(ranks: RankPool, tmp_path: Path) -> None:
    (kind, text, _), (own_kind, own_text, _) = ranks.run(_on_a_rank, _fails, tmp_path, num_ranks=2)
    assert kind == RankFailure.__name__
    assert text.startswith("rank 1 (") and "failed: ValueError: token 70000 is outside the vocabulary" in text
    assert (own_kind, own_text) == ("ValueError", "token 70000 is outside the vocabulary")
    faults = [(found["fault"], found["ranks"]) for found in read_events(tmp_path / EVENTS_FILE)]
    assert faults == [("rank_failed", [1])]


def _late(watch: RankWatch, rank: int) -> None:
    if rank == 1:
        watch.at(6, "reading data")
        watch._stopped.set()  # it would end itself when it hears of rank 0's error
        time.sleep(6.0)
    _all_reduce()


def test_a_late_rank_is_not_called_dead(ranks: RankPool, tmp_path: Path) -> None:
    """Later than the collective's own timeout, 3 s, and four times what counts as death: but it speaks."""
    (kind, text, _), _ = ranks.run(_on_a_rank, _late, tmp_path, 0.05, num_ranks=2)
    assert kind == "RuntimeError"
    assert "Timed out waiting" in text
    assert "All other ranks still answer (rank 1 reading data, iteration 6)" in text
    assert "in all_reduce of default_pg" in text


def _hold_pythons_lock(seconds: float) -> None:
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def _holds_lock_for_a_third(watch: RankWatch, rank: int) -> None:
    if rank == 1:
        _hold_pythons_lock(DEAD_AFTER / 3)
    _all_reduce()


def _holds_lock_for_long_and_says_so(watch: RankWatch, rank: int) -> None:
    if rank == 1:
        with watch.patiently("saving a checkpoint"):
            _hold_pythons_lock(DEAD_AFTER * 1.3)
    _all_reduce()


def _finishes_early(watch: RankWatch, rank: int) -> None:
    _all_reduce()
    if rank == 1:
        watch.__exit__(None, None, None)
        return
    time.sleep(DEAD_AFTER * 1.3)


@pytest.mark.parametrize("body", [_holds_lock_for_a_third, _holds_lock_for_long_and_says_so, _finishes_early])
def test_no_false_alarm(ranks: RankPool, tmp_path: Path, body: Body) -> None:
    assert [kind for kind, _, _ in ranks.run(_on_a_rank, body, tmp_path, num_ranks=2)] == ["", ""]
    assert list(tmp_path.iterdir()) == []


class _Ended(BaseException):
    """Stands for the end of the process."""


def _hangs(watch: RankWatch, rank: int) -> None:
    """Rank 1 stops, and goes on once rank 0 has ended as far as it does here."""
    stopping = torch.tensor(os.getpid() if rank == 1 else 0)
    torch.distributed.all_reduce(stopping)
    if rank == 1:
        time.sleep(2 * watch.pace.interval)  # until rank 0 knows that it is at work
        watch._stopped.set()  # it would end itself when it hears of rank 0's end
        os.kill(os.getpid(), signal.SIGSTOP)
        _all_reduce()
        return
    said: list[str] = []
    ended = threading.Event()

    def end(status: int) -> None:
        said.append(f"[{status}]")
        watch._stopped.set()
        ended.set()
        os.kill(int(stopping), signal.SIGCONT)
        raise _Ended

    def say(text: str, *, file: object, flush: bool) -> None:
        assert file is sys.stderr and flush
        said.append(text)

    def dump_traceback_later(seconds: float, *, exit: bool) -> None:
        """Its clock would race with a slow machine: what it was told is enough."""
        said.append(f"after {seconds:g} s {exit}:")

    failures.os = _With(os, _exit=end)  # type: ignore[assignment]
    failures.faulthandler = _With(faulthandler, dump_traceback_later=dump_traceback_later)  # type: ignore[assignment]
    failures.print = say  # type: ignore[attr-defined]
    try:
        _all_reduce()
        assert ended.is_set(), "rank 1 went on by itself"
    finally:
        failures.os, failures.faulthandler = os, faulthandler
        del failures.print  # type: ignore[attr-defined]
    raise AssertionError(" ".join(said))


class _With:
    """A module with some of its attributes replaced."""

    def __init__(self, module: object, **attributes: object) -> None:
        self._module = module
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> object:
        return getattr(self._module, name)


def test_a_hanging_rank_is_ended(ranks: RankPool, tmp_path: Path) -> None:
    (kind, text, _), _ = ranks.run(_on_a_rank, _hangs, tmp_path, num_ranks=2)
    assert kind == "AssertionError"
    assert text.startswith(f"after {DEAD_AFTER:g} s True: error on rank 0: rank 1 (host ")
    assert "last heard of training, iteration 7) has not answered for 2 s" in text
    assert "Rank 0 was training, iteration 7, in all_reduce of default_pg (ranks 0, 1), number " in text
    assert "in _all_reduce" in text.partition("It hangs there:")[2]
    assert text.endswith(f"[{EXIT_STATUS}]")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:1234"), True),
        (RuntimeError("Timed out waiting 1800000ms for recv operation to complete"), True),
        (RuntimeError("NCCL communicator was aborted on rank 0."), True),
        (torch.distributed.DistBackendError("NCCL error: remote process exited or there was a network error"), True),
        (torch.distributed.DistStoreError("wait timeout after 600000ms"), True),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), False),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (OSError("[Errno 28] No space left on device"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_which_errors_may_come_from_others(error: BaseException, expected: bool) -> None:
    assert is_broken_collective(error) is expected


def test_call_site_is_the_public_function_and_our_caller() -> None:
    torch_folder = "/home/me/fp8_megatron/.venv/lib/python3.11/site-packages/torch/distributed"
    frames = [
        ("all_gather_single", f"{torch_folder}/distributed_c10d.py", 4394),
        ("wrapper", f"{torch_folder}/c10d_logger.py", 83),
        ("__torch_function__", "/home/me/fp8_megatron/fp8_megatron/mcore/runtime.py", 101),
        ("all_gather_into_tensor", f"{torch_folder}/distributed_c10d.py", 4413),
        ("start", "/home/me/fp8_megatron/fp8_megatron/sharding/weight_gather.py", 52),
        ("train_step", "/home/me/fp8_megatron/fp8_megatron/training/train_step.py", 31),
    ]
    site = CallSite.of_frames(frames)
    assert site == CallSite("all_gather_into_tensor", "start (fp8_megatron/sharding/weight_gather.py:52)")
    in_mcore = [("_communicate", "/lib/site-packages/megatron/core/pipeline_parallel/p2p_communication.py", 5)]
    assert CallSite.of_frames(in_mcore) == CallSite(
        "", "_communicate (megatron/core/pipeline_parallel/p2p_communication.py:5)"
    )
