"""Why a run stops before its last iteration: a signal, a limit of time, or too many skipped steps in a row."""

from __future__ import annotations

import logging
import signal
from enum import Enum
from types import FrameType
from typing import Self

from ..outputs import drop_closed_streams
from ..watch.restarts import Fault

logger = logging.getLogger(__name__)


class StopReason(Enum):
    """Why training ends without an error."""

    DONE = "all steps are done"
    INTERVAL = "--exit-interval is reached"
    DURATION = "--exit-duration-in-mins has passed"
    SIGNAL = "a signal asked for it"
    LOST_FOLDER = "another run took the folder of --save"


#: What a rank may ask to stop for. If ranks ask for several, the last of these counts.
_REQUESTS = (None, StopReason.DURATION, StopReason.SIGNAL, StopReason.LOST_FOLDER)


def request_number(reason: StopReason | None) -> float:
    """A request to stop as a number, for a collective that takes the largest; 0: none."""
    return float(_REQUESTS.index(reason))


def request_of(number: float) -> StopReason | None:
    """The inverse of `request_number`."""
    return _REQUESTS[round(number)]


class TrainingDiverged(RuntimeError):
    """Too many consecutive steps had a non-finite loss or gradient."""

    fault = Fault.DIVERGED


class SignalHandler:
    """Turns SIGTERM, SIGHUP and the first SIGINT into a flag. The loop reads it between steps, then saves and stops.

    A context manager for the main thread; its exit restores the previous handlers. A second SIGINT raises
    KeyboardInterrupt. A SIGHUP that this process was told to ignore (nohup) stays ignored. torchrun passes a signal to
    every worker and kills workers that still run 30 s later.
    """

    def __init__(self) -> None:
        self._signal: signal.Signals | None = None
        self._interrupted = False
        self._told = False
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, previous in self._previous.items():
            # None: the previous handler was not installed from Python, so it cannot be restored.
            signal.signal(number, signal.SIG_DFL if previous is None else previous)  # type: ignore[arg-type]
        self._previous.clear()

    def received(self) -> bool:
        """Whether this rank got a signal; the ranks agree on it in the next step."""
        if self._signal is not None and not self._told:
            self._told = True
            drop_closed_streams()
            logger.warning("%s received: stopping", self._signal.name)
        return self._signal is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # No logging here: the signal may have interrupted a write to the same stream.
        if number == signal.SIGINT:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
        self._signal = signal.Signals(number)


class NonFiniteGuard:
    """Counts skipped steps and ends a run that skips too many in a row."""

    def __init__(self, max_skipped_steps: int, *, num_skipped: int = 0) -> None:
        """Args: max_skipped_steps: consecutive skips that end the run; num_skipped: skips before a resume."""
        self.max_skipped_steps = max_skipped_steps
        self.num_skipped = num_skipped
        self.num_consecutive = 0

    def update(self, skipped: bool, *, iteration: int) -> None:
        """Count one step.

        Args:
            skipped: whether the optimizer skipped this step for a non-finite loss or gradient; equal on all ranks.

        Raises:
            TrainingDiverged: this is the ``max_skipped_steps``-th skipped step in a row.
        """
        if not skipped:
            self.num_consecutive = 0
            return
        self.num_skipped += 1
        self.num_consecutive += 1
        if self.num_consecutive >= self.max_skipped_steps:
            raise TrainingDiverged(self._diagnosis(iteration))

    def _diagnosis(self, iteration: int) -> str:
        first = iteration - self.num_consecutive + 1
        return (
            f"loss or gradient was not finite at each of the last {self.num_consecutive} steps (iterations {first} to "
            f"{iteration}; {self.num_skipped} skipped steps in all, limit --max-skipped-steps "
            f"{self.max_skipped_steps}). Look at loss, grad_norm and grad_saturation_fraction before iteration {first} "
            "in metrics.jsonl. If the loss was rising, resume from a checkpoint before it with a lower --lr, a longer "
            "--lr-warmup-iters or a lower --clip-grad. If it broke at once, run the same with --precision bf16: if "
            "that diverges too, it is the data or the schedule; if it does not, try --fp8-recipe tensorwise, then "
            "--first-last-layers-bf16, then --opt-level O1."
        )
