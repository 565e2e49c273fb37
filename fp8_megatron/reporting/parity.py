"""Whether levels of precision train as well as a reference: gaps over seeds, their significance, time to one loss.

Runs of one seed see the same data from the same weights, so their losses are compared in pairs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .metrics_file import METRICS_FILE, read_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
        final_loss: validation loss after the last step, nats a token; None if it is not finite, or if training ended
            early for losses that are not.
        tail_loss: mean training loss of the last tenth of its own steps, nats a token; None if one is not finite.
        step_seconds, tokens_per_second: medians after the first steps; tokens of one GPU.
        validation, training: (iteration, loss) points, without losses that are not finite. A point of training is a
            mean over the steps since the last one.
        steps_before: those of the run whose checkpoint it continued; `num_steps` counts them.
    """

    level: str
    seed: int
    num_steps: int
    final_loss: float | None
    tail_loss: float | None
    step_seconds: float
    tokens_per_second: float
    peak_memory_gib: float
    skipped_steps: int
    validation: list[tuple[int, float]]
    training: list[tuple[int, float]]
    steps_before: int = 0

    @property
    def diverged(self) -> bool:
        """Whether a loss at its end is not finite. Such a run is compared with no other."""
        return self.final_loss is None or self.tail_loss is None

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RunResult:
        """The inverse of `dataclasses.asdict`.

        Raises:
            TypeError, ValueError, KeyError: `values` are not those of a run.
        """
        curves = {name: [(int(i), float(loss)) for i, loss in values[name]] for name in ("validation", "training")}
        return cls(**{**values, **curves})


@dataclass(frozen=True)
class LevelComparison:
    """A level against the reference. Gaps are relative: level / reference - 1.

    Attributes:
        seeds: the seeds that both have finished without divergence; all losses and gaps are of these.
        diverged: seeds of this level's runs that diverged (`RunResult.diverged`).
        gap, gaps: mean over seeds, and of each seed, of the final validation loss.
        tail_gap: the same of `RunResult.tail_loss`.
        seed_spread: standard deviation of the reference's final losses over seeds, relative to their mean.
        p_value: two-sided, of Student's paired t test that the mean gap is 0.
        half_width: of the 95% confidence interval of the gap.
        seconds_to_loss: training time until the mean validation loss reaches `Parity.common_loss`.
        speed_up: the reference's `seconds_to_loss` over this level's.

    What needs two seeds is None with one, and losses and gaps without any; times are None where a curve does not reach
    the loss. Speed, memory and skipped steps are of all runs of seeds that both have finished.
    """

    level: str
    seeds: list[int]
    diverged: list[int]
    final_loss: float | None
    gap: float | None
    gaps: list[float]
    tail_gap: float | None
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
        common_loss: the largest final validation loss of the levels, over the seeds that all have, which every level
            reaches; None if they have no seed in common. Levels of which every run diverged are left out.
    """

    reference: str
    common_loss: float | None
    levels: list[LevelComparison]


def read_run(
    folder: Path, level: str, seed: int, *, num_steps: int, steps_before: int = 0, ended_early: bool = False
) -> RunResult | None:
    """A run's result from its folder; None if it has not ended.

    Args:
        steps_before: as in `RunResult`.
        ended_early: training has ended for losses that are not finite, wherever that was.
    """
    path = folder / METRICS_FILE
    rows = read_rows(path) if path.exists() else []
    steps = [row for row in rows if row["kind"] == "train" and row["iteration"] > steps_before]
    validations = [row for row in rows if row["kind"] == "eval" and row["split"] == "valid"]
    # The last step may be one of --iterations-to-skip, which have no row.
    has_last = bool(validations) and validations[-1]["iteration"] >= num_steps
    if not steps or not (has_last or ended_early):
        return None
    tail = [row["loss"] for row in steps[-max(1, round(_TAIL * (num_steps - steps_before))) :]]
    timed = steps[WARM_UP_STEPS:] or steps
    return RunResult(
        level=level,
        seed=seed,
        num_steps=num_steps,
        final_loss=validations[-1]["loss"] if has_last else None,
        tail_loss=None if None in tail else statistics.fmean(tail),
        step_seconds=statistics.median(row["step_seconds"] for row in timed),
        tokens_per_second=statistics.median(row["tokens_per_second_per_gpu"] for row in timed),
        peak_memory_gib=max(row["peak_memory_gib"] for row in steps),
        skipped_steps=steps[-1]["skipped_steps"],
        validation=[(row["iteration"], row["loss"]) for row in validations if row["loss"] is not None],
        training=_thinned([(row["iteration"], row["loss"]) for row in steps]),
        steps_before=steps_before,
    )


def _thinned(points: list[tuple[int, float | None]]) -> list[tuple[int, float]]:
    """Means of equal runs of `points`, each at its last iteration, without losses that are not finite (None).

    Those count for where a run of points ends: runs of one seed have the same iterations, which are compared.
    """
    every = max(1, -(-len(points) // MAX_POINTS))
    groups = [points[start : start + every] for start in range(0, len(points), every)]
    finite = [(group[-1][0], [loss for _, loss in group if loss is not None]) for group in groups]
    return [(iteration, statistics.fmean(losses)) for iteration, losses in finite if losses]


def compare_runs(runs: Sequence[RunResult], reference: str) -> Parity | None:
    """Compare every level with `reference` over the seeds that both have; None without a pair.

    The reference itself is compared too, with gaps of 0. Pairs with a run that diverged have no gap.
    """
    by_level: dict[str, dict[int, RunResult]] = {}
    for run in runs:
        by_level.setdefault(run.level, {})[run.seed] = run
    base = by_level.get(reference, {})
    paired = {level: own for level, own in by_level.items() if own.keys() & base.keys()}
    if not paired:
        return None
    seeds = {
        level: [seed for seed in sorted(own.keys() & base.keys()) if not (own[seed].diverged or base[seed].diverged)]
        for level, own in paired.items()
    }
    # One set of seeds for all curves: seeds differ by more than levels do.
    shared = set.intersection(*(set(own) for own in seeds.values() if own)) if any(seeds.values()) else set()
    chosen = {level: [paired[level][seed] for seed in sorted(shared)] for level in paired if seeds[level] and shared}
    curves = {level: _mean_curve([dict(run.validation) for run in own]) for level, own in chosen.items()}
    common_loss = max((curve[-1][1] for curve in curves.values() if curve), default=math.inf)
    times = {level: _seconds_to(curve, common_loss, chosen[level]) for level, curve in curves.items()}
    compared = [_compare(level, own, base, seeds[level], times, reference) for level, own in paired.items()]
    return Parity(reference, common_loss if math.isfinite(common_loss) else None, compared)


def _compare(
    level: str,
    runs: Mapping[int, RunResult],
    base: Mapping[int, RunResult],
    seeds: list[int],
    times: Mapping[str, float | None],
    reference: str,
) -> LevelComparison:
    """Args: seeds: of the pairs without divergence. times: `LevelComparison.seconds_to_loss` of each level."""
    pairs = [(runs[seed], base[seed]) for seed in seeds]
    finals = _losses((own.final_loss, other.final_loss) for own, other in pairs)
    tails = _losses((own.tail_loss, other.tail_loss) for own, other in pairs)
    gaps, tail_gaps = ([own / other - 1 for own, other in losses] for losses in (finals, tails))
    several = len(gaps) > 1
    p_value, half_width = paired_t_test(gaps) if several else (None, None)
    base_finals = [other for _, other in finals]
    every = [run for seed, run in runs.items() if seed in base]
    seconds, base_seconds = times.get(level), times.get(reference)
    return LevelComparison(
        level=level,
        seeds=seeds,
        diverged=sorted(seed for seed, run in runs.items() if run.diverged),
        final_loss=statistics.fmean(own for own, _ in finals) if finals else None,
        gap=statistics.fmean(gaps) if gaps else None,
        gaps=gaps,
        tail_gap=statistics.fmean(tail_gaps) if tail_gaps else None,
        seed_spread=statistics.stdev(base_finals) / statistics.fmean(base_finals) if several else None,
        p_value=p_value,
        half_width=half_width,
        tokens_per_second=statistics.median(run.tokens_per_second for run in every),
        peak_memory_gib=max(run.peak_memory_gib for run in every),
        skipped_steps=sum(run.skipped_steps for run in every),
        seconds_to_loss=seconds,
        speed_up=None if seconds is None or base_seconds is None else base_seconds / seconds,
    )


def _losses(pairs: Iterable[tuple[float | None, float | None]]) -> list[tuple[float, float]]:
    return [(own, other) for own, other in pairs if own is not None and other is not None]


def _mean_curve(curves: Sequence[Mapping[int, float]]) -> list[tuple[int, float]]:
    """(iteration, mean loss) at the iterations that all curves have."""
    iterations = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
    return [(iteration, statistics.fmean(curve[iteration] for curve in curves)) for iteration in iterations]


def _seconds_to(curve: list[tuple[int, float]], loss: float, runs: list[RunResult]) -> float | None:
    """Training time at which a curve of validation losses first reaches `loss`, by linear interpolation."""
    index = next((index for index, (_, value) in enumerate(curve) if value <= loss), None)
    if index is None:
        return None
    iteration, value = curve[index]
    before, higher = curve[max(0, index - 1)]
    share = (higher - loss) / (higher - value) if higher > value else 1.0
    steps = before + share * (iteration - before) - statistics.fmean(run.steps_before for run in runs)
    return steps * statistics.fmean(run.step_seconds for run in runs)


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


def _row(one: LevelComparison, base: LevelComparison) -> dict[str, str]:
    def shown(value: float | None, form: str) -> str:
        return "" if value is None or one.level == base.level else form.format(value)

    diverged = f" (diverged: {', '.join(map(str, one.diverged))})" if one.diverged else ""
    spread = one.seed_spread
    in_spreads = f"σ = {spread:.3%}" if spread and one.level == base.level else ""
    return {
        "level": one.level,
        "seeds": f"{len(one.seeds)}{diverged}",
        "validation loss": "" if one.final_loss is None else f"{one.final_loss:.4f}",
        "gap": shown(one.gap, "{:+.3%}"),
        "95% interval": shown(one.half_width, "±{:.3%}"),
        "in σ of seeds": in_spreads or shown(one.gap / spread if spread and one.gap is not None else None, "{:+.2f}"),
        "p": shown(one.p_value, "{:.3f}"),
        "gap of training loss": shown(one.tail_gap, "{:+.3%}"),
        "tokens/s/GPU": f"{one.tokens_per_second:,.0f} ({one.tokens_per_second / base.tokens_per_second:.2f} ×)",
        "speed at the same loss": "" if one.speed_up is None else f"{one.speed_up:.2f} ×",
        "peak GiB": f"{one.peak_memory_gib:.2f}",
        "skipped": str(one.skipped_steps),
    }


def markdown_table(parity: Parity) -> str:
    """The comparison as Markdown, with its notes."""
    base = next(one for one in parity.levels if one.level == parity.reference)
    rows = [_row(one, base) for one in parity.levels]
    widths = {heading: max(len(heading), *(len(row[heading]) for row in rows)) for heading in rows[0]}
    lines = [{heading: heading for heading in widths}, {heading: "-" * width for heading, width in widths.items()}]
    table = [" | ".join(row[heading].ljust(width) for heading, width in widths.items()) for row in [*lines, *rows]]
    return "\n".join(f"| {line} |" for line in table) + (
        f"\n\nGaps are relative to {parity.reference}, in pairs of one seed. σ is the standard deviation of "
        f"{parity.reference}'s validation losses over seeds. p is of a paired t test. Speed at the same loss is the "
        f"training time of {parity.reference} to the largest final one of the levels' mean validation losses, over the "
        "level's. A run diverged if a loss at its end is not finite; it is in no loss and no gap.\n"
    )


def draw_parity(runs: Sequence[RunResult], parity: Parity, output: Path) -> None:
    """Draw the mean curves of each level, and below them each seed's gap of training loss to the reference.

    Runs that diverged are in no mean. Each has a dotted curve of its own, as far as its losses are finite.
    """
    from .plot import COLORS, REFERENCE_COLOR, new_figure, save_figure  # matplotlib

    figure = new_figure(height=7.5)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    base = {run.seed: run for run in runs if run.level == parity.reference}
    levels = sorted((one.level for one in parity.levels), key=lambda level: level != parity.reference)
    for level, color in zip(levels, (REFERENCE_COLOR, *COLORS * len(levels)), strict=False):
        every = [run for run in runs if run.level == level]
        own = [run for run in every if not run.diverged]
        width, label = 3.0 if level == parity.reference else 1.2, level if own else f"{level} (diverged)"
        _line(top, [dict(run.training) for run in own], "-", color=color, linewidth=width, label=label)
        points = {"color": color, "markersize": 3.5, "markerfacecolor": "white"}
        _line(top, [dict(run.validation) for run in own], "o", **points)
        gaps = [(run, _gap(run, base[run.seed])) for run in every if run.seed in base]
        for _, gap in gaps:
            _line(bottom, [gap], "-", color=color, linewidth=0.5, alpha=0.35)
        for run in (run for run in every if run.diverged):
            _line(top, [dict(run.training)], ":", color=color, linewidth=1.2)
        whole = [gap for run, gap in gaps if not (run.diverged or base[run.seed].diverged)]
        _line(bottom, whole, "-", color=color, linewidth=1.5)
    # The losses of runs on their way out would hide the others.
    _frame(top, bottom, [run for run in runs if not run.diverged] or runs, base)
    top.set_ylabel("loss (nats per token)\nlines: training, points: validation")
    bottom.set_ylabel(f"training loss against {parity.reference}, %")
    bottom.set_xlabel("iteration")
    top.legend(frameon=False, loc="upper right", ncols=2)
    save_figure(figure, output)


def _line(axes: Axes, curves: Sequence[Mapping[int, float]], form: str, **style: Any) -> None:
    """Draw the mean of curves."""
    points = _mean_curve(curves)
    axes.plot([iteration for iteration, _ in points], [loss for _, loss in points], form, **style)


def _gap(run: RunResult, base: RunResult) -> dict[int, float]:
    """Iteration → relative gap of the training loss to the reference's run of the same seed, in %."""
    losses = dict(base.training)
    return {iteration: 100 * (loss / losses[iteration] - 1) for iteration, loss in run.training if iteration in losses}


def _frame(top: Axes, bottom: Axes, runs: Sequence[RunResult], base: Mapping[int, RunResult]) -> None:
    """Limits without the beginning of the runs, where losses fall fast and differ widely."""
    losses = [loss for run in runs for iteration, loss in run.training if iteration > run.num_steps / 20]
    if losses:
        margin = 0.06 * (max(losses) - min(losses)) or 0.1
        top.set_ylim(min(losses) - margin, max(losses) + margin)
    gaps = [(run, _gap(run, base[run.seed])) for run in runs if run.seed in base]
    late = [abs(gap) for run, own in gaps for iteration, gap in own.items() if iteration > run.num_steps / 10]
    reach = 1.2 * max(late, default=0.0) or 0.1
    bottom.set_ylim(-reach, reach)
    for axes in (top, bottom):
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["right", "top"]].set_visible(False)
