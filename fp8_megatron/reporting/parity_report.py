"""A comparison of levels as a Markdown table and as a figure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from .parity import Comparison, Parity, RunResult
from .plot import COLORS, REFERENCE_COLOR, new_figure, save_figure

_HEADINGS = (
    "level",
    "seeds",
    "validation loss",
    "gap",
    "95% interval",
    "in σ of seeds",
    "p",
    "gap of training loss",
    "tokens/s/GPU",
    "speed at the same loss",
    "peak GiB",
    "skipped",
)


def table_rows(parity: Parity) -> list[list[str]]:
    """The headings, then one row a level."""
    base = next(one for one in parity.levels if one.level == parity.reference)
    return [list(_HEADINGS), *(_row(one, base) for one in parity.levels)]


def markdown_table(parity: Parity) -> str:
    """The comparison as Markdown, with its notes."""
    headings, *rows = table_rows(parity)
    lines = [headings, ["---"] * len(headings), *rows]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    notes = (
        f"Gaps are relative to {parity.reference}, in pairs of one seed. σ is the standard deviation of "
        f"{parity.reference}'s validation losses over seeds. p is of a paired t test."
    )
    if parity.common_loss is not None:
        notes += (
            f" Speed at the same loss is the training time of {parity.reference} to a mean validation loss of "
            f"{parity.common_loss:.4f}, the largest final one, over the level's."
        )
    if any(one.diverged for one in parity.levels):
        notes += " A run diverged if a loss at its end is not finite; it is in no loss and no gap."
    return f"{table}\n\n{notes}\n"


def _row(one: Comparison, base: Comparison) -> list[str]:
    is_base = one.level == base.level
    spread = one.seed_spread
    in_spreads = "" if not spread or one.gap is None else f"{one.gap / spread:+.2f}"
    diverged = f" (diverged: {', '.join(map(str, one.diverged))})" if one.diverged else ""
    return [
        one.level,
        f"{len(one.seeds)}{diverged}",
        "" if one.final_loss is None else f"{one.final_loss:.4f}",
        "" if is_base or one.gap is None else f"{one.gap:+.3%}",
        "" if is_base or one.half_width is None else f"±{one.half_width:.3%}",
        f"σ = {spread:.3%}" if is_base and spread else in_spreads,
        "" if is_base or one.p_value is None else f"{one.p_value:.3f}",
        "" if is_base or one.tail_gap is None else f"{one.tail_gap:+.3%}",
        f"{one.tokens_per_second:,.0f} ({one.tokens_per_second / base.tokens_per_second:.2f} ×)",
        "" if one.speed_up is None else f"{one.speed_up:.2f} ×",
        f"{one.peak_memory_gib:.2f}",
        str(one.skipped_steps),
    ]


def draw_parity(runs: Sequence[RunResult], parity: Parity, output: Path, *, title: str) -> None:
    """Draw the mean curves of each level, and below them each seed's gap of training loss to the reference.

    Runs that diverged are in no mean. Each has a dotted curve of its own, as far as its losses are finite.
    """
    figure = new_figure(height=7.5)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    others = [one.level for one in parity.levels if one.level != parity.reference]
    colors = {parity.reference: REFERENCE_COLOR}
    colors |= {level: COLORS[index % len(COLORS)] for index, level in enumerate(others)}
    for level in (parity.reference, *others):
        own = [run for run in runs if run.level == level and not run.diverged]
        iterations, losses = _mean([dict(run.training) for run in own])
        width = 3.0 if level == parity.reference else 1.2
        top.plot(
            iterations, losses, color=colors[level], linewidth=width, label=level if own else f"{level} (diverged)"
        )
        iterations, losses = _mean([dict(run.validation) for run in own])
        top.plot(iterations, losses, "o", color=colors[level], markersize=3.5, markerfacecolor="white")
        for run in runs:
            if run.level == level and run.diverged:
                top.plot(*_mean([dict(run.training)]), ":", color=colors[level], linewidth=1.2)
    base = {run.seed: dict(run.training) for run in runs if run.level == parity.reference}
    lost = {run.seed for run in runs if run.level == parity.reference and run.diverged}
    bottom.axhline(0.0, color=REFERENCE_COLOR, linewidth=1.2)
    for level in others:
        own = [run for run in runs if run.level == level and run.seed in base]
        gaps = [
            {i: 100 * (loss / base[run.seed][i] - 1) for i, loss in run.training if i in base[run.seed]} for run in own
        ]
        for gap in gaps:
            bottom.plot(list(gap), list(gap.values()), color=colors[level], linewidth=0.5, alpha=0.35)
        whole = [gap for run, gap in zip(own, gaps, strict=True) if not (run.diverged or run.seed in lost)]
        bottom.plot(*_mean(whole), color=colors[level], linewidth=1.5, label=level)
    # The losses of runs on their way out would hide the others.
    _frame(top, bottom, [run for run in runs if not run.diverged] or runs, base)
    top.set_ylabel("loss (nats per token)\nlines: training, points: validation")
    bottom.set_ylabel(f"training loss against {parity.reference}, %")
    bottom.set_xlabel("iteration")
    top.legend(frameon=False, loc="upper right", ncols=2)
    figure.suptitle(title)
    save_figure(figure, output)


def _mean(curves: Sequence[dict[int, float]]) -> tuple[list[int], list[float]]:
    iterations = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
    return iterations, [statistics.fmean(curve[iteration] for curve in curves) for iteration in iterations]


def _frame(top: Axes, bottom: Axes, runs: Sequence[RunResult], base: dict[int, dict[int, float]]) -> None:
    """Limits without the first tenth of the runs, where losses fall fast and differ widely."""
    losses = [loss for run in runs for iteration, loss in run.training if iteration > run.num_steps / 20]
    if losses:
        margin = 0.06 * (max(losses) - min(losses)) or 0.1
        top.set_ylim(min(losses) - margin, max(losses) + margin)
    late = [
        100 * abs(loss / base[run.seed][iteration] - 1)
        for run in runs
        for iteration, loss in run.training
        if run.seed in base and iteration in base[run.seed] and iteration > run.num_steps / 10
    ]
    reach = 1.2 * max(late, default=0.0) or 0.1
    bottom.set_ylim(-reach, reach)
    for axes in (top, bottom):
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["right", "top"]].set_visible(False)
