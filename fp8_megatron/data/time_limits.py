"""Limits of time for what may never end: data that does not come, chat templates, tokenizers. Imports no torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

#: Seconds for one conversation or one text.
SECONDS = 60.0
#: A text may be a book: characters for which it gets a second more. Tokenizers are a hundred times as fast.
_CHARACTERS_A_SECOND = 10_000

#: Reads "seconds line" again and again, and ends its parent after that time without another.
_WATCHER = """
import os, select, signal, sys
seconds, line, parent = None, "", int(sys.argv[1])
while select.select([0], [], [], seconds)[0]:
    text = os.read(0, 1 << 16).decode(errors="replace")
    if not text:
        sys.exit()
    number, _, line = text.splitlines()[-1].partition(" ")
    seconds = float(number)
if os.getppid() == parent:
    sys.stderr.write(f"error: {line}\\n")
    sys.stderr.flush()
    os.kill(parent, signal.SIGKILL)
"""


def seconds_for(num_characters: int) -> float:
    """What a text of this length may take."""
    return SECONDS + num_characters / _CHARACTERS_A_SECOND


@contextmanager
def alarm(seconds: float, ring: Callable[[], float]) -> Iterator[None]:
    """Call `ring` in this thread after `seconds`, unless the block has ended. What it raises, the block raises.

    It interrupts Python and waits in the system, not native code. Only the main thread can have it; others wait on.

    Args:
        ring: returns after how many seconds to call it again; 0: not again.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(number: int, frame: FrameType | None) -> None:
        signal.setitimer(signal.ITIMER_REAL, ring())

    started = time.monotonic()
    handler = signal.signal(signal.SIGALRM, on_signal)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - started), 1e-3), interval)


@contextmanager
def watched() -> Iterator[Callable[[float, str], None]]:
    """Have another process end this one if it takes too long: native code may hold Python's lock for ever.

    Yields:
        A function that gives this process so many seconds from now on, and what to print if they are not enough.
    """
    command = [sys.executable, "-I", "-S", "-c", _WATCHER, str(os.getpid())]
    # In a session of its own, so that a terminal's interrupt is not for it.
    with subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True) as watcher:

        def give(seconds: float, line: str) -> None:
            assert watcher.stdin is not None
            with suppress(BrokenPipeError):  # somebody has ended it
                watcher.stdin.write(f"{seconds} {' '.join(line.split())}\n".encode(errors="replace"))

        try:
            yield give
        finally:
            watcher.kill()
