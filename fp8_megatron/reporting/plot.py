"""Loss curves from metrics.jsonl: one run over iterations and tokens, or several runs with their gap to a reference."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from ..errors import UserError
from ..outputs import write_output
from .metrics_file import read_rows, split_in_words

#: Okabe and Ito's colours, which colour-blind readers can tell apart. The reference is grey.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
REFERENCE_COLOR = "#999999"
#: Colours of validation sets, in turn.
_MARKERS = "os^Dv"
#: A loss that falls by more than this factor gets a logarithmic axis.
_LOG_AXIS_RATIO = 5.0
#: A larger loss is drawn as one that is not finite. An axis up to the largest number has no ticks.
_MAX_LOSS = 1e30
_MAX_COUNT = 1 << 62


@dataclass(frozen=True)
class EvalCurve:
    """Losses of one validation set."""

    iterations: np.ndarray
    losses: np.ndarray

    @property
    def is_finite(self) -> bool:
        """Whether any point can be drawn."""
        return bool(np.isfinite(self.losses).any())


@dataclass(frozen=True)
class LossCurves:
    """One run's losses. NaN stands for a loss that was not finite."""

    iterations: np.ndarray
    losses: np.ndarray
    tokens: np.ndarray
    """Tokens consumed up to and including each iteration."""
    evals: Mapping[str, EvalCurve] = field(default_factory=dict)
    """``validation``, or ``validation-<name>`` of each validation set, in the order of the first evaluation."""

    @property
    def smoothed(self) -> np.ndarray:
        """Centred moving mean over about 1/40 of the run, applied twice: no lag, and no box around a spike."""
        reach = len(self.losses) // 80
        # The window is symmetric at the ends too; otherwise it would bias the ends of a falling curve.
        return _moving_mean(_moving_mean(self.losses, reach, symmetric=True), reach, symmetric=True)


def read_losses(metrics_jsonl: Path) -> LossCurves:
    """Training and validation losses of a metrics file.

    Raises:
        ValueError: the file holds no finite training loss, or a row without a number where one belongs.
    """
    rows = read_rows(metrics_jsonl)
    train = [row for row in rows if row["kind"] == "train"]
    losses = _losses(train)
    if not np.isfinite(losses).any():
        raise ValueError(f"{metrics_jsonl} has no finite training loss to plot ({len(train)} training steps in it)")
    return LossCurves(
        iterations=_counts(train, "iteration", metrics_jsonl),
        losses=losses,
        tokens=_counts(train, "consumed_tokens", metrics_jsonl),
        evals=_evals([row for row in rows if row["kind"] == "eval"], metrics_jsonl),
    )


def plot_losses(metrics_jsonl: Path, output_png: Path, *, title: str) -> None:
    """Draw one run: raw and smoothed training loss and validation points, over iterations and tokens."""
    curves = read_losses(metrics_jsonl)
    figure = new_figure(height=5.0)
    axes = figure.add_subplot()
    axes.plot(curves.iterations, curves.losses, color=COLORS[0], alpha=0.3, linewidth=0.7, label="train, every step")
    axes.plot(curves.iterations, curves.smoothed, color=COLORS[0], linewidth=1.8, label="train, smoothed")
    drawn = {name: evals for name, evals in curves.evals.items() if evals.is_finite}
    for i, (name, evals) in enumerate(drawn.items()):
        style: dict[str, Any] = {"markersize": 4.5, "linewidth": 0.9, "zorder": 3}
        style |= {"color": COLORS[1 + i % (len(COLORS) - 1)], "marker": _MARKERS[i % len(_MARKERS)]}
        axes.plot(evals.iterations, evals.losses, label=_plain(name), **style)
    _loss_axis(axes, [curves])
    _mark_non_finite(axes, curves)
    axes.set_xlabel("iteration")
    _token_axis(axes, curves)
    axes.legend(frameon=False, loc="upper right")
    figure.suptitle(_plain(title))
    save_figure(figure, output_png)


def compare_losses(
    runs: Mapping[str, Path],
    output_png: Path,
    *,
    reference: str | None = None,
    title: str = "Training loss",
) -> None:
    """Overlay the smoothed training losses of several runs, with each run's gap to the reference below.

    Args:
        runs: name in the legend → metrics file.
        reference: the run that gaps are measured against. Default: the first one.

    Raises:
        ValueError: fewer than two runs, an unknown reference, or a run that shares no finite step with the reference.
    """
    if len(runs) < 2:
        raise ValueError(f"a comparison needs two runs or more, got {list(runs)}; plot_losses draws one")
    reference = next(iter(runs)) if reference is None else reference
    if reference not in runs:
        raise ValueError(f"reference {reference!r} is not one of the runs {list(runs)}")
    curves = {name: read_losses(path) for name, path in runs.items()}
    others = [name for name in runs if name != reference]
    colors = {reference: REFERENCE_COLOR, **{name: COLORS[i % len(COLORS)] for i, name in enumerate(others)}}

    figure = new_figure(height=7.0)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for name in (reference, *others):
        _draw_run(top, curves[name], name, colors[name], linewidth=3.0 if name == reference else 1.3)
    if any(evals.is_finite for run in curves.values() for evals in run.evals.values()):
        top.plot([], [], color="gray", marker="o", markerfacecolor="white", linestyle="none", label="validation")
    bottom.axhline(0.0, color=REFERENCE_COLOR, linewidth=1.2)
    gaps = []
    for name in others:
        iterations, gap = _loss_gap(curves[name], curves[reference], name, reference)
        gaps.append(_moving_mean(gap, gap.size // 40, symmetric=False))
        end = np.nanmean(gap[-max(1, gap.size // 10) :])
        label = f"{_plain(name)}: {end:+.4f} over the last tenth"
        bottom.plot(iterations, gaps[-1], color=colors[name], linewidth=1.4, label=label)
    _loss_axis(top, list(curves.values()))
    _token_axis(top, curves[reference])
    _frame_gaps(bottom, gaps)
    bottom.set_xlabel("iteration")
    bottom.set_ylabel(f"gap to {_plain(reference)}\n(nats per token)")
    top.legend(frameon=False, loc="upper right")
    bottom.legend(frameon=False, loc="upper right", fontsize="small", ncols=2)
    figure.suptitle(_plain(title))
    figure.align_ylabels()
    save_figure(figure, output_png)


def _draw_run(axes: Axes, curves: LossCurves, name: str, color: str, *, linewidth: float) -> None:
    axes.plot(curves.iterations, curves.smoothed, color=color, linewidth=linewidth, label=_plain(name))
    for i, evals in enumerate(curves.evals.values()):
        if evals.is_finite:
            marker = _MARKERS[i % len(_MARKERS)]
            style: dict[str, Any] = {"color": color, "marker": marker, "markersize": 4.0, "linestyle": "none"}
            axes.plot(evals.iterations, evals.losses, markerfacecolor="white", **style)


def _loss_gap(run: LossCurves, reference: LossCurves, name: str, reference_name: str) -> tuple[np.ndarray, np.ndarray]:
    """Difference at the iterations that both runs have. With equal batches it is far less noisy than either loss."""
    common, in_run, in_reference = np.intersect1d(run.iterations, reference.iterations, return_indices=True)
    gap = run.losses[in_run] - reference.losses[in_reference]
    if not np.isfinite(gap).any():
        raise ValueError(f"runs {name!r} and {reference_name!r} share no iteration with finite losses: no gap to draw")
    return common, gap


def _frame_gaps(axes: Axes, gaps: list[np.ndarray]) -> None:
    """Choose limits without the first tenth of each gap: early in training, runs differ widely."""
    late = np.concatenate([gap[len(gap) // 10 :] for gap in gaps])
    late = late[np.isfinite(late)]
    if late.size:
        low, high = min(0.0, float(late.min())), max(0.0, float(late.max()))
        margin = 0.15 * (high - low) or 0.01
        axes.set_ylim(low - margin, high + 3 * margin)


def _evals(rows: list[dict[str, Any]], path: Path) -> dict[str, EvalCurve]:
    """The curve of each validation set. The test split is left out."""
    splits = dict.fromkeys(row["split"] for row in rows if row["split"] != "test")
    of_split = {split: [row for row in rows if row["split"] == split] for split in splits}
    return {
        split_in_words(split): EvalCurve(_counts(found, "iteration", path), _losses(found))
        for split, found in of_split.items()
    }


def _losses(rows: list[dict[str, Any]]) -> np.ndarray:
    """Losses, NaN where one is null and infinite where it is too large to draw."""
    losses = np.array([np.nan if row["loss"] is None else row["loss"] for row in rows], dtype=np.float64)
    return np.where(np.abs(losses) > _MAX_LOSS, np.inf, losses)


def _counts(rows: list[dict[str, Any]], key: str, path: Path) -> np.ndarray:
    """A count of every row, 1 or more."""
    for row in rows:
        value = row.get(key)
        if type(value) is not int or not 1 <= value <= _MAX_COUNT:
            raise ValueError(
                f"{path}: the row of iteration {row['iteration']} has {key}({value!r}), not a count from 1; "
                f"remove that line, or give another run"
            )
    return np.array([row[key] for row in rows], dtype=np.float64)


def _moving_mean(values: np.ndarray, reach: int, *, symmetric: bool) -> np.ndarray:
    """Mean of the finite values within `reach` on either side; NaN if there are none.

    Args:
        symmetric: near an end, shorten the window on both sides instead of one.
    """
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    position = np.arange(len(values))
    before, after = np.minimum(position, reach), np.minimum(len(values) - 1 - position, reach)
    if symmetric:
        before = after = np.minimum(before, after)
    start, stop = position - before, position + after + 1
    count = counts[stop] - counts[start]
    return np.where(count > 0, sums[stop] - sums[start], np.nan) / np.maximum(count, 1)


def new_figure(*, height: float) -> Figure:
    """An empty figure, 9 inches wide."""
    # Without pyplot there is no global state and no window system, and the user's backend stays untouched.
    figure = Figure(figsize=(9.0, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _loss_axis(axes: Axes, curves: list[LossCurves]) -> None:
    """Set label, grid and limits. Limits ignore spikes: they follow the smoothed curves and validations."""
    validations = [evals.losses for run in curves for evals in run.evals.values()]
    shown = np.concatenate([*(run.smoothed for run in curves), *validations])
    shown = shown[np.isfinite(shown)]
    low, high = float(shown.min()), float(shown.max())
    if low > 0 and high / low > _LOG_AXIS_RATIO:
        axes.set_yscale("log")
        axes.set_ylim(low / 1.1, high * 1.1)
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        margin = 0.06 * (high - low) or 0.1
        axes.set_ylim(low - margin, high + margin)
    axes.set_ylabel("loss (nats per token)")
    axes.margins(x=0.01)
    for each in axes.figure.axes:
        each.grid(alpha=0.25, linewidth=0.6)
        each.spines[["right"]].set_visible(False)


def _token_axis(axes: Axes, curves: LossCurves) -> None:
    """Add a second x axis in tokens. All steps have the same number of tokens."""
    tokens_per_iteration = curves.tokens[-1] / curves.iterations[-1]
    unit, name = next((u, n) for u, n in ((1e9, "billion "), (1e6, "million "), (1.0, "")) if curves.tokens[-1] >= u)
    factor = tokens_per_iteration / unit
    second = axes.secondary_xaxis("top", functions=(lambda x: x * factor, lambda x: x / factor))
    second.set_xlabel(f"{name}tokens")


def _mark_non_finite(axes: Axes, curves: LossCurves) -> None:
    bad = curves.iterations[~np.isfinite(curves.losses)]
    if bad.size:
        style: dict[str, Any] = {
            "color": "#CC0000",
            "marker": "x",
            "linestyle": "none",
            "markersize": 5,
            "clip_on": False,
        }
        label = f"not finite ({bad.size} step{'s' if bad.size > 1 else ''})"
        axes.plot(bad, np.full(bad.size, axes.get_ylim()[0]), label=label, **style)


def image_format(output: Path) -> str:
    """The format that a file's suffix names.

    Raises:
        UserError: figures cannot be drawn in it.
    """
    known = sorted(FigureCanvasAgg.get_supported_filetypes())
    suffix = output.suffix.removeprefix(".").lower()
    if suffix not in known:
        names = ", ".join(f".{name}" for name in known)
        raise UserError(
            f"{output}: figures cannot be drawn as {suffix or 'a file without suffix'}; give one of {names}"
        )
    return suffix


def _plain(text: str) -> str:
    """Text of a figure, without what Matplotlib would take as a formula and what no font can draw."""
    return text.encode(errors="replace").decode().replace("$", r"\$")


def save_figure(figure: Figure, output: Path) -> None:
    """Write a figure in the format that the suffix of `output` names."""
    stream = io.BytesIO()
    figure.savefig(stream, format=image_format(output))
    write_output(output, stream.getvalue())
