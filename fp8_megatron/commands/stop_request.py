"""SIGTERM, or SIGHUP of a terminal that closes, to a launcher: its ranks save and end, however long that takes.

torchrun by itself passes the signal on and kills ranks that still run 30 s later. A large model takes longer to save.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

import psutil

#: The signals that torchrun handles itself, in the form of its --signals-to-handle.
TORCHRUN_SIGNALS = "SIGINT,SIGQUIT"
_POLL_SECONDS = 0.5


@contextmanager
def passing_on_stops() -> Iterator[Sequence[signal.Signals]]:
    """After SIGTERM or SIGHUP, send SIGTERM to each child of this process, once. For the main thread.

    Ranks that train save after their step and end. A rank that has not begun ends at once. So does a rank that torchrun
    starts in its place. A second signal ends torchrun: it kills ranks that still run 30 s later. A SIGHUP that this
    process was told to ignore, as nohup does, stays ignored.

    Yields:
        The signal that has come, if any.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    received: list[signal.Signals] = []
    ended = threading.Event()
    told: set[psutil.Process] = set()

    def handle(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number)
        if received:
            raise SignalException(f"{name.name} after {received[0].name} ended the launcher", name)
        received.append(name)

    def pass_on() -> None:
        while not ended.wait(_POLL_SECONDS):
            if received and not told:
                with suppress(OSError):  # the terminal is gone
                    print(f"{received[0].name} received: the ranks save and end", file=sys.stderr, flush=True)
            for child in psutil.Process().children() if received else ():
                if child not in told:
                    told.add(child)
                    with suppress(psutil.NoSuchProcess):
                        child.terminate()

    previous = {
        number: signal.signal(number, handle)
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    thread = threading.Thread(target=pass_on, name="passes signals on", daemon=True)
    thread.start()
    try:
        yield received
    finally:
        ended.set()
        thread.join()
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
