"""What a run writes for its readers, beside checkpoints. Nothing of it ends a run."""

from __future__ import annotations

import errno
import logging
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..outputs import reason_of, replace_output

#: The removal of a folder takes up to this long.
_REMOVAL_SECONDS = 10.0

logger = logging.getLogger(__name__)


class Output:
    """One output of a run: a file, or a service.

    Args:
        name: what it is called in the log; a path if it is a file.

    Attributes:
        num_failures: writes that did not succeed.
    """

    def __init__(self, name: Path | str) -> None:
        self.name = name
        self.num_failures = 0

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Errors of the block are counted, and end nothing. The first one is a line of the log."""
        try:
            yield
        except Exception as error:  # libraries raise any type
            self.num_failures += 1
            if self.num_failures == 1:
                path = self.name if isinstance(self.name, Path) else None
                logger.warning("%s is not written (%s); the run goes on", self.name, reason_of(error, path))

    def end(self) -> None:
        """Say how much is missing, if the line of the first failure does not tell. Further calls say nothing."""
        if self.num_failures > 1:
            logger.warning("%s is not complete: %d writes failed", self.name, self.num_failures)
        self.num_failures = 0


def write_report(path: Path, content: bytes) -> None:
    """Replace a file in one step, as `outputs.write_output`. What cannot be written is a line of the log."""
    with Output(path).writing():
        replace_output(path, content)


class AppendedFile(Output):
    """A file that grows, by whole pieces. It may have other writers.

    A piece that cannot be written leaves nothing behind, and the next one is tried. A file that somebody replaces goes
    on in the new one. One that somebody removes is made again some seconds later: at once, it would be in the way of
    who removes its folder.

    Args:
        path: its folder is made.
        header: what begins a new file. A file without a header is text: a last line that a kill cut is ended.
    """

    def __init__(self, path: Path, header: bytes = b"") -> None:
        super().__init__(path)
        self.path = path
        self._header = header
        self._descriptor = -1
        self._removed_at = -math.inf

    def append(self, content: bytes, *, synced: bool = False) -> None:
        """Write a piece.

        Args:
            synced: wait until it is on the disk.
        """
        with self.writing():
            try:
                self._open()
                self._write(content)
                if synced:
                    os.fsync(self._descriptor)
            except OSError:
                self.release()  # a new descriptor may be sound where this one is not
                raise

    def release(self) -> None:
        """Close the file. The next piece opens it again."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with suppress(OSError):
                os.close(descriptor)

    def close(self) -> None:
        """Close the file, and say what is missing in it."""
        self.release()
        self.end()

    def _open(self) -> None:
        if self._descriptor >= 0:
            if self._is_in_place():
                return
            self.release()
            self._removed_at = time.monotonic()
        if time.monotonic() - self._removed_at < _REMOVAL_SECONDS and not self.path.exists():
            raise FileNotFoundError(errno.ENOENT, "somebody removed it during the run", str(self.path))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._descriptor))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # the path cannot be looked up; what is open may still take more
            return True

    def _write(self, content: bytes) -> None:
        size = os.fstat(self._descriptor).st_size
        if size == 0:
            content = self._header + content
        elif not self._header and os.pread(self._descriptor, 1, size - 1) != b"\n":
            content = b"\n" + content
        rest = memoryview(content)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            with suppress(OSError):
                if os.fstat(self._descriptor).st_size == size + len(content) - len(rest):  # nobody has added to it
                    os.ftruncate(self._descriptor, size)
            raise
