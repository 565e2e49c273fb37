"""The loss-spike guard: finds a step whose loss leaves the last steps', names the casts that changed before it, and may
roll back to the last checkpoint and skip the data in between (PaLM, arXiv 2204.02311, section 5.1).

A rollback ends the ranks. torchrun starts them again (--max-restarts), and they resume after the data of the spike.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Protocol

from ..checkpoint.ranks import RankPlace, Ranks
from ..checkpoint.run_state import Progress
from ..reporting.cast_statistics import CastStatistics, HealthSample
from ..reporting.run_log import EVENTS_FILE, EventKind, events_of_run, read_events
from ..watch.restarts import Fault

logger = logging.getLogger(__name__)

#: Steps that a loss is compared with, and how many there must be.
_WINDOW, _FEWEST = 64, 16
#: A spread below this share of the median is taken for this share: the first digits of a loss always move.
_LEAST_SPREAD = 0.003
#: Makes the median of absolute deviations a standard deviation of normal values.
_NORMAL = 1.4826
#: A gradient norm this many spreads above the last steps' has the next step sampled (of healthy runs, one of
#: 1,800 healthy steps of small models lies beyond 8, and the steps of a burst of one token at 14 to 16).
_UNUSUAL_NORM = 8.0
#: Samples that a cast is compared with, and casts that a message names.
_SAMPLES, _MOST_NAMED = 8, 3


class LossSpike(RuntimeError):
    """The loss left the last steps', and --rollback-on-loss-spike asks for an earlier checkpoint."""

    fault = Fault.LOSS_SPIKE


@dataclass(frozen=True)
class Spike:
    """A loss of one step, the median of the steps before, and how many robust standard deviations lie between."""

    loss: float
    usual: float
    deviations: float


class ReportSpike(Protocol):
    """Logs a spike and the casts that changed before it, and returns the text."""

    def __call__(self, progress: Progress, spike: Spike, suspects: list[str], *, rolls_back: bool) -> str: ...


class RobustWindow:
    """The last values of a figure. It tells how far a new one lies above them.

    Median and median absolute deviation stand while fewer than half of the values are outliers.
    """

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=_WINDOW)

    @property
    def usual(self) -> float:
        """The median of the window."""
        return median(self._values)

    def deviations(self, value: float) -> float:
        """How many robust standard deviations `value` lies above the median; 0 before there are enough values."""
        if len(self._values) < _FEWEST:
            return 0.0
        centre = median(self._values)
        spread = _NORMAL * median(abs(kept - centre) for kept in self._values)
        return (value - centre) / max(spread, _LEAST_SPREAD * abs(centre), 1e-12)

    def add(self, value: float) -> None:
        """Take a value into the window."""
        self._values.append(value)


class SpikeGuard:
    """Reads the figures of every step. All ranks read the same ones and decide alike.

    Args:
        threshold: robust standard deviations above the median of the last 64 steps that are a spike; 0: none is.
        rolls_back: whether a spike ends the ranks, if there is a checkpoint.
        report: logs a spike with its suspects, and returns it as a text.
    """

    def __init__(self, threshold: float, *, rolls_back: bool = False, report: ReportSpike | None = None) -> None:
        self._threshold, self._rolls_back, self._report = threshold, rolls_back, report
        self._losses, self._log_norms = RobustWindow(), RobustWindow()
        self._samples: deque[HealthSample] = deque(maxlen=_SAMPLES)
        self.wants_sample = False
        """Whether a figure was so unusual, or not finite, that the next step's casts should be sampled."""

    def sampled(self, sample: HealthSample) -> None:
        """Take the casts of a sampled step. Later ones are compared with it if all its values are finite."""
        if sample.first_non_finite() is None:
            self._samples.append(sample)
        self.wants_sample = False

    def examine(self, progress: Progress, loss: float, grad_norm: float, *, has_checkpoint: bool) -> None:
        """Read the figures of the step that `progress` includes, and report a spike.

        Args:
            has_checkpoint: of this run. Without one it would begin from scratch, with the data of the spike.

        Raises:
            LossSpike: it is one, and the run rolls back.
        """
        spike = self.update(loss, grad_norm)
        if spike is None or self._report is None:
            return
        rolls_back = self._rolls_back and has_checkpoint
        text = self._report(progress, spike, self.suspects(), rolls_back=rolls_back)
        if rolls_back:
            raise LossSpike(f"{text}; --rollback-on-loss-spike goes back to the last checkpoint at the next start")

    def update(self, loss: float, grad_norm: float) -> Spike | None:
        """Read one step; a spike if its loss is one.

        A step that is not finite is skipped, and no spike. The next one is sampled: if it is not finite either, its
        casts say where that begins.
        """
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            self.wants_sample = True
            return None
        if self._threshold == 0:
            return None
        log_norm = math.log(max(grad_norm, 1e-30))
        deviations = self._losses.deviations(loss)
        usual = self._losses.usual if deviations else loss
        self.wants_sample |= deviations > self._threshold / 2 or self._log_norms.deviations(log_norm) > _UNUSUAL_NORM
        self._losses.add(loss)
        self._log_norms.add(log_norm)
        return Spike(loss, usual, deviations) if deviations > self._threshold else None

    def suspects(self) -> list[str]:
        """The casts that changed most in the last sample, against the samples before it, in words."""
        if len(self._samples) < 2:
            return []
        *before, last = self._samples
        return changed_casts(before, last)


def changed_casts(before: Sequence[HealthSample], last: HealthSample) -> list[str]:
    """At most three casts of `last` that are worse than in the samples before, the worst first, with what changed."""
    history: dict[str, list[CastStatistics]] = {}
    for sample in before:
        for cast in sample.casts:
            history.setdefault(str(cast.name), []).append(cast)
    scored = [_worst_change(cast, history[str(cast.name)]) for cast in last.casts if str(cast.name) in history]
    worst = sorted((pair for pair in scored if pair[0] >= 1.0), key=lambda pair: -pair[0])
    return [text for _, text in worst[:_MOST_NAMED]]


def _worst_change(cast: CastStatistics, earlier: Sequence[CastStatistics]) -> tuple[float, str]:
    """(how bad, in words) of the quantity of a cast that changed most.

    1 is a change that is worth a word: 3 dB of SNR, a thousandth of the elements saturated or a tenth underflowed, four
    times the kurtosis, four times the amax over the scale, as far as it is above 1.
    """

    def usual(quantity: str) -> float:
        values = [value for value in (getattr(kept, quantity) for kept in earlier) if value is not None]
        return median(values) if values else math.nan

    def octaves(value: float, before: float) -> float:
        return math.log2(value / before) if value > 0 and before > 0 else 0.0

    found = (0.0, "")
    for quantity, words, badness in (
        ("snr_db", "SNR, dB", lambda value, before: (before - value) / 3.0),
        ("saturated", "saturated", lambda value, before: (value - before) / 1e-3),
        ("underflowed", "underflowed", lambda value, before: (value - before) / 0.1),
        ("amax_over_scale", "amax over scale", lambda value, before: octaves(max(value, 1.0), max(before, 1.0)) / 2.0),
        ("kurtosis", "kurtosis", lambda value, before: octaves(value, before) / 2.0),
    ):
        value, before = getattr(cast, quantity), usual(quantity)
        if value is not None and not math.isnan(before) and badness(value, before) > found[0]:
            found = badness(value, before), f"{cast.name} ({words} {before:.3g} → {value:.3g})"
    return found


def resumed_after_spikes(progress: Progress, output_dir: Path, place: RankPlace, run: str) -> Progress:
    """Where a resumed run goes on: after the data of a spike that it was rolled back for. Called by all ranks.

    Args:
        run: its identity (`checkpoint.run_lock`).
    """
    moved = Ranks(place).first_says(lambda: after_rollbacks(progress, output_dir, run))
    if moved != progress and place.rank == 0:
        left_out = moved.consumed_samples - progress.consumed_samples
        logger.warning("%d samples up to a loss spike are left out", left_out)
    return moved


def after_rollbacks(progress: Progress, output_dir: Path, run: str) -> Progress:
    """`progress` after the data of the spikes that events.jsonl has of later steps of this run."""
    for event in events_of_run(read_events(output_dir / EVENTS_FILE), run):
        seen, iteration = event.get("consumed_samples"), event.get("iteration")
        if event["kind"] != EventKind.SPIKE.value or not event.get("rollback"):
            continue
        # A checkpoint after the rollback has left the data behind already.
        if isinstance(seen, int) and isinstance(iteration, int) and iteration > progress.iteration:
            left_out = max(0, seen - progress.consumed_samples)
            progress = replace(
                progress,
                consumed_samples=progress.consumed_samples + left_out,
                left_out_samples=progress.left_out_samples + left_out,
            )
    return progress
