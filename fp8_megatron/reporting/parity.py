"""Whether levels of precision train as well as a reference: gaps over seeds, their significance, time to one loss.

Runs of one seed see the same data from the same weights, so their losses are compared in pairs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .metrics_file import METRICS_FILE, read_records

#: A run of a comparison: its level and its seed.
RunKey = tuple[str, int]

#: Steps left out of the speed: compilation, library start-up, the recording of steps.
WARM_UP_STEPS = 10
#: Points of a stored training curve; each is the mean of the steps since the one before.
MAX_POINTS = 200
#: The last part of training whose mean loss is compared.
_TAIL = 0.1


@dataclass(frozen=True)
class RunResult:
    """One finished run.

    Attributes:
        final_loss: validation loss after the last step, nats a token.
        tail_loss: mean training loss of the last tenth of its own steps.
        step_seconds, tokens_per_second: medians after the first steps; tokens of one GPU.
        wall_seconds: from its start to its end with imports and validations; None for a run that was interrupted.
        validation, training: (iteration, loss) points. A point of training is a mean over the steps since the last one.
        steps_before: those of the run whose checkpoint it continued; `num_steps` counts them.
    """

    level: str
    seed: int
    num_steps: int
    final_loss: float
    tail_loss: float
    step_seconds: float
    tokens_per_second: float
    peak_memory_gib: float
    skipped_steps: int
    wall_seconds: float | None
    validation: list[tuple[int, float]]
    training: list[tuple[int, float]]
    steps_before: int = 0

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RunResult:
        """The inverse of `to_json`.

        Raises:
            TypeError, ValueError, KeyError: `values` are not those of a run.
        """
        curves = {name: [(int(i), float(loss)) for i, loss in values[name]] for name in ("validation", "training")}
        return cls(**{**values, **curves})


@dataclass(frozen=True)
class Comparison:
    """A level against the reference. Gaps are relative: level / reference - 1.

    Attributes:
        seeds: the seeds that both have finished.
        gap, gaps: mean over seeds, and of each seed, of the final validation loss.
        tail_gap: the same of `RunResult.tail_loss`.
        seed_spread: standard deviation of the reference's final losses over seeds, relative to their mean.
        p_value: two-sided, of Student's paired t test that the mean gap is 0.
        half_width: of the 95% confidence interval of the gap.
        seconds_to_loss: training time until the mean validation loss reaches `Parity.common_loss`.
        speed_up: the reference's `seconds_to_loss` over this level's.

    What needs two seeds is None with one; times are None where a curve does not reach the loss.
    """

    level: str
    seeds: list[int]
    final_loss: float
    gap: float
    gaps: list[float]
    tail_gap: float
    seed_spread: float | None
    p_value: float | None
    half_width: float | None
    tokens_per_second: float
    peak_memory_gib: float
    skipped_steps: int
    seconds_to_loss: float | None
    speed_up: float | None


@dataclass(frozen=True)
class Parity:
    """All levels against one reference.

    Attributes:
        common_loss: the largest final validation loss of the levels, which every level reaches.
    """

    reference: str
    common_loss: float
    levels: list[Comparison]


def read_run(
    folder: Path, level: str, seed: int, *, num_steps: int, wall_seconds: float | None, steps_before: int = 0
) -> RunResult | None:
    """A run's result from its folder; None if it has not ended.

    Args:
        steps_before: as in `RunResult`.

    Raises:
        ValueError: a loss at the end is not finite.
    """
    path = folder / METRICS_FILE
    records = read_records(path) if path.exists() else []
    steps = [record for record in records if record["kind"] == "train" and record["iteration"] > steps_before]
    validations = [record for record in records if record["kind"] == "eval" and record["split"] == "valid"]
    # The last step may be one of --iterations-to-skip, which have no record.
    if not steps or not validations or validations[-1]["iteration"] < num_steps:
        return None
    tail = [record["loss"] for record in steps[-max(1, round(_TAIL * (num_steps - steps_before))) :]]
    if validations[-1]["loss"] is None or None in tail:
        raise ValueError(f"{path}: a loss at the end of training is not finite")
    timed = steps[WARM_UP_STEPS:] or steps
    return RunResult(
        level=level,
        seed=seed,
        num_steps=num_steps,
        final_loss=validations[-1]["loss"],
        tail_loss=statistics.fmean(tail),
        step_seconds=statistics.median(record["step_seconds"] for record in timed),
        tokens_per_second=statistics.median(record["tokens_per_second_per_gpu"] for record in timed),
        peak_memory_gib=max(record["peak_memory_gib"] for record in steps),
        skipped_steps=steps[-1]["skipped_steps"],
        wall_seconds=wall_seconds,
        validation=[(record["iteration"], record["loss"]) for record in validations if record["loss"] is not None],
        training=_thinned([(record["iteration"], record["loss"]) for record in steps]),
        steps_before=steps_before,
    )


def compare_runs(runs: Sequence[RunResult], reference: str) -> Parity | None:
    """Compare every level with `reference` over the seeds that both have; None without a pair.

    The reference itself is compared too, with gaps of 0.
    """
    by_level: dict[str, dict[int, RunResult]] = {}
    for run in runs:
        by_level.setdefault(run.level, {})[run.seed] = run
    base = by_level.get(reference, {})
    seeds = {level: sorted(own.keys() & base.keys()) for level, own in by_level.items()}
    if not any(seeds.values()):
        return None
    levels = [level for level in by_level if seeds[level]]
    # One set of seeds for all curves: seeds differ by more than levels do.
    shared = sorted(set.intersection(*(set(seeds[level]) for level in levels)))
    curves = {level: _mean_curve([by_level[level][seed] for seed in shared]) for level in levels if shared}
    common_loss = max(curve[-1][1] for curve in curves.values()) if curves else math.nan
    times = {
        level: _seconds_to(curve, common_loss, [by_level[level][seed] for seed in shared])
        for level, curve in curves.items()
    }
    compared = [
        _compare(level, [by_level[level][seed] for seed in seeds[level]], [base[seed] for seed in seeds[level]], times)
        for level in levels
    ]
    return Parity(reference, common_loss, [_with_speed_up(one, times.get(reference)) for one in compared])


def _compare(level: str, own: list[RunResult], base: list[RunResult], times: Mapping[str, float | None]) -> Comparison:
    gaps = [run.final_loss / other.final_loss - 1 for run, other in zip(own, base, strict=True)]
    tail_gaps = [run.tail_loss / other.tail_loss - 1 for run, other in zip(own, base, strict=True)]
    finals = [other.final_loss for other in base]
    several = len(gaps) > 1
    p_value, half_width = paired_t_test(gaps) if several else (None, None)
    return Comparison(
        level=level,
        seeds=[run.seed for run in own],
        final_loss=statistics.fmean(run.final_loss for run in own),
        gap=statistics.fmean(gaps),
        gaps=gaps,
        tail_gap=statistics.fmean(tail_gaps),
        seed_spread=statistics.stdev(finals) / statistics.fmean(finals) if several else None,
        p_value=p_value,
        half_width=half_width,
        tokens_per_second=statistics.median(run.tokens_per_second for run in own),
        peak_memory_gib=max(run.peak_memory_gib for run in own),
        skipped_steps=sum(run.skipped_steps for run in own),
        seconds_to_loss=times.get(level),
        speed_up=None,
    )


def _with_speed_up(one: Comparison, reference_seconds: float | None) -> Comparison:
    if reference_seconds is None or one.seconds_to_loss is None:
        return one
    return Comparison(**{**asdict(one), "speed_up": reference_seconds / one.seconds_to_loss})


def _mean_curve(runs: list[RunResult]) -> list[tuple[int, float]]:
    """Mean validation loss at the iterations that all runs have."""
    points = [dict(run.validation) for run in runs]
    iterations = sorted(set.intersection(*(set(own) for own in points)))
    return [(iteration, statistics.fmean(own[iteration] for own in points)) for iteration in iterations]


def _seconds_to(curve: list[tuple[int, float]], loss: float, runs: list[RunResult]) -> float | None:
    """Training time at which a curve of validation losses first reaches `loss`, by linear interpolation."""
    step_seconds = statistics.fmean(run.step_seconds for run in runs)
    start = statistics.fmean(run.steps_before for run in runs)
    for index, (iteration, value) in enumerate(curve):
        if value <= loss:
            if index == 0:
                return (iteration - start) * step_seconds
            before, higher = curve[index - 1]
            share = (higher - loss) / (higher - value) if higher > value else 1.0
            return (before + share * (iteration - before) - start) * step_seconds
    return None


def paired_t_test(gaps: Sequence[float]) -> tuple[float, float]:
    """Two-sided p value that the mean of `gaps` (two or more) is 0, and half the width of its 95% interval.

    Source: Abramowitz and Stegun, 26.7.3 and 26.7.4 (Student's distribution for whole degrees of freedom).
    """
    degrees = len(gaps) - 1
    error = statistics.stdev(gaps) / math.sqrt(len(gaps))
    mean = abs(statistics.fmean(gaps))
    low, high = 0.0, 1e3
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _two_sided(middle, degrees) > 0.05 else (low, middle)
    if error == 0.0:
        return (1.0 if mean == 0.0 else 0.0), 0.0
    return _two_sided(mean / error, degrees), high * error


def _two_sided(t: float, degrees: int) -> float:
    """P(|T| > t) of Student's distribution."""
    angle = math.atan(t / math.sqrt(degrees))
    cosine = math.cos(angle)
    is_odd = degrees % 2 == 1
    term, total = (cosine, 0.0) if is_odd else (1.0, 0.0)
    for k in range(1 + is_odd, degrees, 2):
        total += term
        term *= cosine**2 * k / (k + 1)
    inside = math.sin(angle) * total
    return 1 - (2 / math.pi * (angle + inside) if is_odd else inside)


def _thinned(points: list[tuple[int, float | None]]) -> list[tuple[int, float]]:
    """Means of equal runs of `points`, each at its last iteration, without losses that are not finite (None).

    Those count for where a run of points ends: runs of one seed have the same iterations, which are compared.
    """
    every = max(1, -(-len(points) // MAX_POINTS))
    groups = [points[start : start + every] for start in range(0, len(points), every)]
    finite = [(group[-1][0], [loss for _, loss in group if loss is not None]) for group in groups]
    return [(iteration, statistics.fmean(losses)) for iteration, losses in finite if losses]
