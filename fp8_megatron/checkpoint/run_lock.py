"""A lock on the folder that a run saves into, and the identity of its holder: run, launch and process.

The lock needs nothing of the file system but atomic names.

``<save>/run.lock`` names its holder and is never rewritten. It appears by `os.link`, which is atomic on NFS, and is
taken away by a rename. A second file, ``run.lock.<token>.beat``, changes every few seconds while its holder lives. Each
holder has its own, so a holder that lost the lock does not disturb the next one.

On one machine a holder is dead if its process has ended, and lives while its process runs. Any other holder, and a
stopped process, is dead if its beat has not changed for 30 s on the clock of the reader; clocks of machines are not
compared. A process that was taken for dead may wake up. Hence a holder looks at the lock again before each change that
others see (`RunLock.check`).
"""

from __future__ import annotations

import errno
import getpass
import json
import logging
import os
import re
import secrets
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from ..config.fields import field_types, value_problem
from ..device.processes import is_stopped, launch_id, machine_id, process_start
from ..device.variables import number
from .files import META, RunLockError, candidates, iteration_folder, read_file

#: Keys in `META`.
RUN, LAUNCH = "run", "launch"
LOCK = "run.lock"

#: Seconds between changes of a holder's beat.
BEAT_SECONDS = 3.0
#: Seconds without a change after which a holder is dead.
DEAD_AFTER_SECONDS = 30.0
#: Seconds between two looks at a lock that another run holds.
POLL_SECONDS = 1.0
#: Seconds after which a new lock is looked at again. Another process may have renamed it in the belief that it renames
#: the dead holder's, and put it back.
_SETTLE_SECONDS = 0.2
#: Seconds after which a leftover of a killed process is cleared.
_STALE_SECONDS = 60.0
#: Part of names of files beside the lock; empty in an unknown one.
_TOKEN = re.compile(r"[0-9a-f]{0,64}")
#: What file systems without hard links answer.
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunIdentity:
    """Names of one session of a run.

    Attributes:
        run: 16 hexadecimal digits, drawn by a fresh run and kept by every run that resumes it.
        launch: of the job that started the ranks; equal after torchrun has restarted them. None without torchrun.
        token: 16 hexadecimal digits of this session alone, in its lock and its temporary folders.
    """

    run: str
    launch: str | None
    token: str

    @classmethod
    def drawn(cls, run: str | None = None) -> RunIdentity:
        """An identity with a new token, and a new run unless one is given. Ranks share rank 0's."""
        return cls(run or secrets.token_hex(8), launch_id(), secrets.token_hex(8))


def saved_by(folder: Path) -> tuple[str | None, str | None]:
    """(run, launch) of a checkpoint; None for each that it does not name: it is damaged, or of an earlier version."""
    try:
        about = json.loads(read_file(folder / META))
        values = [about.get(RUN), about.get(LAUNCH)]
    except (OSError, ValueError, AttributeError, RecursionError):
        return None, None
    run, launch = (value if isinstance(value, str) else None for value in values)
    return run, launch


def own_restart(root: Path) -> bool:
    """Whether an earlier start of this process's launch saved under `root`, and torchrun may have restarted it.

    torchrun's count of restarts alone does not tell: with several nodes each torchrun counts its own, and that of rank
    0's node stays 0 where another node failed.

    Raises:
        CheckpointError: the tracker under `root` is damaged.
    """
    launch = launch_id()
    counts = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
    if launch is None or not any(number(name, 0) for name in counts):
        return False
    saved = (saved_by(iteration_folder(root, iteration)) for iteration in candidates(root))
    # The newest one may be damaged.
    return next((by for run, by in saved if run is not None), None) == launch


@dataclass(frozen=True)
class Holder:
    """The content of a lock.

    Attributes:
        token, run, launch: see `RunIdentity`.
        host: for people; `machine` is what is compared.
        process, process_start: see `device.processes.process_start`.
        since: UTC, for people.
    """

    token: str = ""
    run: str = "unknown"
    launch: str | None = None
    host: str = "unknown"
    machine: str | None = None
    process: int = 0
    process_start: int | None = None
    user: str = "unknown"
    since: str = "unknown"

    @classmethod
    def this_process(cls, identity: RunIdentity) -> Holder:
        """This process as a holder."""
        return cls(
            **asdict(identity),
            host=socket.gethostname(),
            machine=machine_id(),
            process=os.getpid(),
            process_start=process_start(os.getpid()),
            user=_user(),
            since=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        )

    @classmethod
    def parse(cls, content: bytes | None) -> Holder:
        """The holder that a lock names; an unknown one if it cannot be read, or holds what this class does not."""
        kinds = field_types(cls)  # type: ignore[arg-type]
        try:
            values = json.loads(content or b"")
            found = {name: values[name] for name in kinds}
        except (ValueError, KeyError, TypeError, RecursionError):
            return cls()
        is_wrong = any(value_problem(kind, found[name]) for name, kind in kinds.items())
        return cls() if is_wrong or not _TOKEN.fullmatch(found["token"]) else cls(**found)

    def __str__(self) -> str:
        return f"process {self.process} on {self.host} (user {self.user}, run {self.run}, since {self.since})"

    @property
    def lives(self) -> bool | None:
        """Whether its process runs; None if that cannot be told: another machine's, or a stopped one."""
        if self.machine is None or self.machine != machine_id():
            return None
        if process_start(self.process) != self.process_start:
            return False
        return None if is_stopped(self.process) else True


class RunLock:
    """One process's view of the lock of a folder. Only rank 0 has one.

    Args:
        root: an existing folder.
        identity: of this run, as others will read it.
    """

    def __init__(self, root: Path, identity: RunIdentity) -> None:
        self.root = root
        self._path = root / LOCK
        self._token = identity.token
        self._content = json.dumps(asdict(Holder.this_process(identity)), indent=1).encode()
        self._seen: tuple[bytes, bytes | None] | None = None
        self._looked = self._unchanged_seconds = 0.0
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        # Held while something is published, so that a lock is not released in the middle.
        self._publishing = threading.RLock()
        self.lost = False

    def attempt(self) -> Holder | None:
        """Take the lock if it is free or its holder is dead. Returns None if this process holds it, else its holder.

        Call it every `POLL_SECONDS`: a holder on another machine is judged by what changes between the calls.

        Raises:
            OSError: the folder cannot be written.
        """
        content = self._read()
        if content is None or (content != self._content and self._is_dead(content) and self._remove(content)):
            self._place()
            time.sleep(_SETTLE_SECONDS)
            content = self._read()
        if content != self._content:
            return Holder.parse(content)
        self._write_beat(0)
        self._clear_leftovers()
        self._thread = threading.Thread(target=self._keep_beating, name="run lock", daemon=True)
        self._thread.start()
        return None

    def check(self) -> None:
        """Raises:
        RunLockError: this process does not hold the lock; names who does.
        """
        if self._stopped.is_set():
            raise RunLockError(f"{self._path} has been released by this run")
        content = self._content_or_none_twice()
        if content == self._content:
            return
        self.lost = True
        if content is None:
            raise RunLockError(
                f"{self._path} of this run is gone: another run took it and has ended, or it was removed by hand; "
                "start again with --load"
            )
        raise RunLockError(
            f"{self.root} was taken over by {Holder.parse(content)}: this run had not been heard of for "
            f"{DEAD_AFTER_SECONDS:.0f} s; stop one of the two"
        )

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """For a change that others see. It begins only if the lock is held, and `release` waits for its end.

        Raises:
            RunLockError: as `check`.
        """
        with self._publishing:
            self.check()
            yield

    def release(self) -> None:
        """Let the lock go, if this process still holds it. Never raises; calling it again does nothing."""
        # A writer that hangs must not keep the process from ending: a dead holder's lock is taken over anyway.
        got = self._publishing.acquire(timeout=DEAD_AFTER_SECONDS)
        try:
            self._stopped.set()
            if self._thread is not None:
                self._thread.join(timeout=BEAT_SECONDS)
            with suppress(OSError, RunLockError):
                if self._read() == self._content:
                    self._remove(self._content)
                self._beside("beat").unlink(missing_ok=True)
        finally:
            if got:
                self._publishing.release()

    def _beside(self, kind: str) -> Path:
        return self._path.with_name(f"{LOCK}.{self._token}.{kind}")

    def _read(self) -> bytes | None:
        try:
            if not stat.S_ISREG(os.lstat(self._path).st_mode):  # a link may lead to nothing, a pipe waits for ever
                raise RunLockError(f"{self._path} is a folder, a link or a pipe, not a run's lock; remove it")
            return read_file(self._path)
        except FileNotFoundError:
            return None

    def _content_or_none_twice(self) -> bytes | None:
        """The lock's content; None only if it stays away for a second (see `_SETTLE_SECONDS`)."""
        deadline = time.monotonic() + 1.0
        while (content := self._read()) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return content

    def _place(self) -> None:
        """Put this process's lock there, unless one is there."""
        draft = self._beside("draft")
        _write(draft, self._content, os.O_TRUNC)
        try:
            self._link(draft, self._path)
        except FileNotFoundError:  # the draft was cleared as a leftover; the next attempt writes it again
            return
        finally:
            draft.unlink(missing_ok=True)

    def _link(self, source: Path, target: Path) -> None:
        """Give a file a second name, unless that name is taken. The caller reads whose file has it: on NFS a call may
        fail although it succeeded.
        """
        try:
            os.link(source, target)
        except FileExistsError:
            return
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            with suppress(FileExistsError):
                _write(target, source.read_bytes(), os.O_EXCL)

    def _remove(self, judged: bytes) -> bool:
        """Take a lock away if it still is the one that was judged. Returns whether the place is free."""
        taken = self._beside("taken")
        try:
            os.rename(self._path, taken)
        except FileNotFoundError:
            return True
        try:
            if read_file(taken) == judged:
                return True
            self._link(taken, self._path)
        finally:
            taken.unlink(missing_ok=True)
        return False

    def _is_dead(self, content: bytes) -> bool:
        holder = Holder.parse(content)
        lives = holder.lives
        if lives:  # its threads may be kept from beating, by work that holds Python's lock
            self._seen = None
            return False
        if lives is False:
            logger.info("taking over %s: %s has ended", self._path, holder)
            return True
        seen, now = (content, _read_or_none(self._path.with_name(f"{LOCK}.{holder.token}.beat"))), time.monotonic()
        if seen == self._seen:
            # A reader that was asleep has missed beats: it counts at most two looks.
            self._unchanged_seconds += min(now - self._looked, 2 * POLL_SECONDS)
        else:
            self._seen, self._unchanged_seconds = seen, 0.0
        self._looked = now
        if self._unchanged_seconds < DEAD_AFTER_SECONDS:
            return False
        logger.info("taking over %s: no beat of %s for %.0f s", self._path, holder, self._unchanged_seconds)
        return True

    def _keep_beating(self) -> None:
        count = 0
        while not self._stopped.wait(BEAT_SECONDS):
            count += 1
            with suppress(
                OSError, RunLockError
            ):  # a full disk, or a server that does not answer: the next beat tries again
                self._write_beat(count)
                if self._content_or_none_twice() != self._content and not self._stopped.is_set():
                    self.lost = True
                    self._beside("beat").unlink(missing_ok=True)
                    return

    def _write_beat(self, count: int) -> None:
        """Written in place: on NFS, opening it anew then shows the change at once. Closing it sends it there.

        Not synced: that would wait for a checkpoint that is written at the time.
        """
        _write(self._beside("beat"), f"{count:012d}".encode(), 0, syncs=False)

    def _clear_leftovers(self) -> None:
        """Clear beats of dead holders, and what a kill left in the middle of taking the lock."""
        with suppress(OSError):
            now = self._beside("beat").stat().st_mtime  # by the file server's clock
            for path in list(self.root.glob(f"{LOCK}.*")):
                if path.name.startswith(f"{LOCK}.{self._token}."):
                    continue
                with suppress(OSError):
                    if path.suffix == ".beat" or now - path.stat().st_ctime > _STALE_SECONDS:
                        path.unlink()


def _write(path: Path, content: bytes, flags: int, *, syncs: bool = True) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | flags, 0o644)
    try:
        os.write(descriptor, content)
        if syncs:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_or_none(path: Path) -> bytes | None:
    try:
        return read_file(path)
    except OSError:
        return None


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's number without a name
        return str(os.getuid())
