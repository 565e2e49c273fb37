"""SIGTERM to a launcher: its ranks save and end, however long that takes.

torchrun by itself passes SIGTERM on and kills ranks that still run 30 s later. A large model takes longer to save.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import psutil

#: The signals that torchrun handles itself, in the form of its --signals-to-handle.
TORCHRUN_SIGNALS = "SIGINT,SIGHUP,SIGQUIT"
_POLL_SECONDS = 0.5


@contextmanager
def passing_on_sigterm() -> Iterator[threading.Event]:
    """Pass SIGTERM on to each child of this process, once. For the main thread.

    Ranks that train save after their step and end. A rank that has not begun ends at once. So does a rank that torchrun
    starts in its place. A second SIGTERM ends torchrun: it kills ranks that still run 30 s later.

    Yields:
        An event that is set when SIGTERM has come.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    received, ended = threading.Event(), threading.Event()
    told: set[psutil.Process] = set()

    def handle(number: int, frame: FrameType | None) -> None:
        if received.is_set():
            raise SignalException("a second SIGTERM ended the launcher", signal.Signals(number))
        received.set()

    def pass_on() -> None:
        while not ended.wait(_POLL_SECONDS):
            for child in psutil.Process().children() if received.is_set() else ():
                if child not in told:
                    told.add(child)
                    with suppress(psutil.NoSuchProcess):
                        child.terminate()

    previous = signal.signal(signal.SIGTERM, handle)
    thread = threading.Thread(target=pass_on, name="passes SIGTERM on", daemon=True)
    thread.start()
    try:
        yield received
    finally:
        ended.set()
        thread.join()
        signal.signal(signal.SIGTERM, signal.SIG_DFL if previous is None else previous)
