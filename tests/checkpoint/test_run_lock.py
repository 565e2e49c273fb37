"""The lock of a folder: who gets it, who waits, and what a holder learns that lost it."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fp8_megatron.checkpoint import run_lock
from fp8_megatron.checkpoint.files import RunLockError
from fp8_megatron.checkpoint.run_lock import LOCK, Holder, RunIdentity, RunLock
from fp8_megatron.device.processes import process_start


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything ten times as fast."""
    monkeypatch.setattr(run_lock, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(run_lock, "DEAD_AFTER_SECONDS", 1.0)
    monkeypatch.setattr(run_lock, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(run_lock, "_SETTLE_SECONDS", 0.02)


def lock_of(root: Path, run: str = "a" * 16) -> RunLock:
    return RunLock(root, RunIdentity.drawn(run))


def rewrite(root: Path, **changes: object) -> None:
    """Change who a lock says it is held by."""
    holder = json.loads((root / LOCK).read_text())
    (root / LOCK).write_text(json.dumps({**holder, **changes}))


def acquired_within(lock: RunLock, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while (holder := lock.attempt()) is not None and time.monotonic() < deadline:
        time.sleep(0.05)
    return holder is None


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    first, second = lock_of(tmp_path, "1" * 16), lock_of(tmp_path, "2" * 16)
    assert first.attempt() is None and first.attempt() is None
    holder = second.attempt()
    assert holder is not None and holder.process == os.getpid() and holder.run == "1" * 16
    assert f"process {os.getpid()} on " in str(holder) and "run 1111111111111111, since 20" in str(holder)
    first.check()
    with pytest.raises(RunLockError, match=r"taken over by process .* run 1111111111111111"):
        second.check()
    first.release()
    first.release()
    assert second.attempt() is None
    second.check()
    second.release()
    assert list(tmp_path.iterdir()) == []


def test_a_live_holder_is_not_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It beats, so even one on another machine keeps its lock for longer than a silent one would."""
    with monkeypatch.context() as patch:
        patch.setattr(run_lock, "machine_id", lambda: "another")
        first = lock_of(tmp_path)
    second = lock_of(tmp_path)
    assert first.attempt() is None
    assert not acquired_within(second, 2.5)
    first.release()


@contextmanager
def process_with_lock(root: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock and waits."""
    code = (
        "import sys, time; from pathlib import Path; from fp8_megatron.checkpoint import run_lock;"
        "from fp8_megatron.checkpoint.run_lock import RunIdentity;"
        "run_lock.BEAT_SECONDS = 0.1;"
        "lock = run_lock.RunLock(Path(sys.argv[1]), RunIdentity.drawn());"
        "print(lock.attempt(), flush=True);"
        "time.sleep(1.5); lock.check(); print('still held', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(root)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "None\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_killed_holder_is_taken_over_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also as a zombie, which it is until its parent asks for its status."""
    caplog.set_level("INFO")
    with process_with_lock(tmp_path) as process:
        lock = lock_of(tmp_path)
        assert lock.attempt() is not None
        process.send_signal(signal.SIGKILL)
        while process_start(process.pid) is not None:
            time.sleep(0.01)
        assert lock.attempt() is None
        assert f"taking over {tmp_path / LOCK}: process {process.pid} on" in caplog.text
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_frozen_holder_is_taken_over_and_learns_it(tmp_path: Path) -> None:
    """SIGSTOP on this machine is as a machine that stands still: its beat does not change."""
    with process_with_lock(tmp_path) as process:
        process.send_signal(signal.SIGSTOP)
        lock = lock_of(tmp_path, "5" * 16)
        started = time.monotonic()
        assert acquired_within(lock, 10.0) and time.monotonic() - started >= 0.9
        process.send_signal(signal.SIGCONT)
        assert process.stdout is not None and process.stdout.read() == ""  # its `check` raised
        lock.check()
        lock.release()


def test_a_reused_process_number_is_another_process(tmp_path: Path) -> None:
    first, second = lock_of(tmp_path), lock_of(tmp_path)
    assert first.attempt() is None
    rewrite(tmp_path, process_start=1)
    assert second.attempt() is None
    with pytest.raises(RunLockError, match="taken over by process"):
        first.check()
    second.release()


def test_a_late_holder_disturbs_nobody(tmp_path: Path) -> None:
    """It neither rewrites nor releases the lock of who took over, and its beat goes away."""
    first, second = lock_of(tmp_path), lock_of(tmp_path, "2" * 16)
    assert first.attempt() is None
    rewrite(tmp_path, process_start=1)
    assert second.attempt() is None
    time.sleep(0.5)
    assert first.lost
    first.release()
    second.check()
    assert len(list(tmp_path.glob("*.beat"))) == 1
    second.release()


def test_a_lock_that_is_gone(tmp_path: Path) -> None:
    """It is not taken again: in between another run may have saved."""
    lock = lock_of(tmp_path)
    assert lock.attempt() is None
    (tmp_path / LOCK).unlink()
    with (
        pytest.raises(RunLockError, match=r"run.lock of this run is gone: .*; start again with --load"),
        lock.publishing(),
    ):
        raise AssertionError("nothing may be published")
    lock.release()
    with pytest.raises(RunLockError, match="released"):
        lock.check()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"token": 1}', b"\xff"])
def test_a_damaged_lock_blocks_for_as_long_as_a_silent_one(tmp_path: Path, content: bytes) -> None:
    """A kill in the middle of writing it, where the file system has no links."""
    (tmp_path / LOCK).write_bytes(content)
    lock = lock_of(tmp_path)
    assert lock.attempt() == Holder()
    assert acquired_within(lock, 10.0)
    lock.release()


@pytest.mark.parametrize("error", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "link", refuse)
    first, second = lock_of(tmp_path), lock_of(tmp_path)
    assert first.attempt() is None and second.attempt() is not None
    rewrite(tmp_path, process_start=1)
    assert second.attempt() is None
    second.release()
    assert first.attempt() is None
    first.release()


def test_a_call_that_failed_although_it_succeeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On NFS, when the server's answer is lost and the client asks again."""
    link = os.link

    def twice(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", twice)
    lock = lock_of(tmp_path)
    assert lock.attempt() is None
    lock.release()


def test_anothers_lock_that_was_renamed_is_put_back(tmp_path: Path) -> None:
    """A process judged a dead holder, and another one was faster."""
    judged = b"the dead holder's"
    first, second = lock_of(tmp_path), lock_of(tmp_path)
    assert first.attempt() is None
    assert not second._remove(judged)
    first.check()
    first.release()
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_kills_are_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"{LOCK}.{'0' * 16}.{kind}" for kind in ("beat", "draft", "taken")]
    for name in names:
        (tmp_path / name).write_text("")
    lock = lock_of(tmp_path)
    assert lock.attempt() is None
    assert [name for name in names if (tmp_path / name).exists()] == names[1:]  # they may be of a process at work
    lock.release()
    monkeypatch.setattr(run_lock, "_STALE_SECONDS", -1.0)
    assert lock_of(tmp_path).attempt() is None
    assert not any((tmp_path / name).exists() for name in names)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        lock_of(tmp_path / "missing").attempt()


def _compete(root: str, start: float, seconds: float) -> bool:
    run_lock._SETTLE_SECONDS = 0.5  # many processes share a core here
    lock = lock_of(Path(root))
    time.sleep(max(0.0, start - time.time()))
    won = acquired_within(lock, seconds)
    time.sleep(max(0.0, start + 2 * seconds - time.time()))  # nobody leaves before all have tried
    if won:
        lock.check()
    return won


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_of_many_at_once_exactly_one_takes_a_dead_holders_lock(tmp_path: Path, seed: int) -> None:
    dead = lock_of(tmp_path)
    assert dead.attempt() is None
    dead._stopped.set()
    rewrite(tmp_path, process_start=seed)
    with multiprocessing.get_context("fork").Pool(8) as pool:
        start = time.time() + 0.5
        won = pool.starmap(_compete, [(str(tmp_path), start, 3.0)] * 8, chunksize=1)
    assert sum(won) == 1


@pytest.mark.parametrize("kind", ["folder", "dangling link", "link", "pipe"])
def test_what_is_no_lock_is_an_error_at_once(tmp_path: Path, kind: str) -> None:
    (tmp_path / "other").write_text("{}")
    {
        "folder": (tmp_path / LOCK).mkdir,
        "dangling link": lambda: (tmp_path / LOCK).symlink_to(tmp_path / "nothing"),
        "link": lambda: (tmp_path / LOCK).symlink_to(tmp_path / "other"),
        "pipe": lambda: os.mkfifo(tmp_path / LOCK),
    }[kind]()
    lock = lock_of(tmp_path)
    with pytest.raises(RunLockError, match=r"run.lock is a folder, a link or a pipe, not a run's lock; remove it"):
        lock.attempt()
    lock.release()


@pytest.mark.parametrize(
    "forged",
    [{"token": "../../x"}, {"host": "a\x1b[31m\nerror: lost"}, {"process": "1"}, {"machine": 5}, {"process_start": []}],
)
def test_a_forged_lock_names_an_unknown_holder(tmp_path: Path, forged: dict[str, object]) -> None:
    """Its text is not shown, and its token leads to no other file."""
    first = lock_of(tmp_path, "1" * 16)
    assert first.attempt() is None
    rewrite(tmp_path, **forged)
    second = lock_of(tmp_path, "2" * 16)
    holder = second.attempt()
    assert holder == Holder() and str(holder).isprintable()
    assert acquired_within(second, 10.0)
    second.release()
