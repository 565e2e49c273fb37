"""What `any_model.py` measures, and its tables beside the fastest of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.table import Table

_HEADINGS = ("model", "run", "compiled", "recorded", "step ms", "kernels", "waits", "speed", "peak GB", "of rival")
_HEADINGS = (*_HEADINGS, "resting GB", "last loss")
#: Columns of the documentation's table: (run, compiled).
_COLUMNS = {
    "BF16": ("bf16-amp", False),
    "BF16 compiled": ("bf16-amp", True),
    "torchao compiled": ("torchao-tensorwise", True),
    "Transformer Engine": ("te-delayed", False),
    "`O2`": ("O2", False),
    "`O2` compiled": ("O2", True),
}


@dataclass
class Result:
    """One run. Memory in 10^9 bytes; milliseconds of the median step. What needs a GPU is None on a CPU.

    Attributes:
        kernel_ms: a step's kernels, without the gaps between them.
        is_host_bound: whether the GPU waits for the host: kernels fill less than 95% of a step.
        recorded: forward and backward are a CUDA graph. The memory that it keeps is in both figures.
    """

    model: str
    run: str
    compiled: bool
    recorded: bool = False
    step_ms: float = 0.0
    samples_per_second: float = 0.0
    peak_gb: float | None = None
    resting_gb: float | None = None
    kernel_ms: float | None = None
    is_host_bound: bool | None = None
    losses: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def name(self) -> str:
        """What the documentation calls it."""
        return " ".join([self.model, self.run, *["compiled"] * self.compiled, *["recorded"] * self.recorded])

    @property
    def is_ours(self) -> bool:
        """Whether this project's layers ran, at a level O1 to O3."""
        return self.run.startswith("O")


def fastest(results: Sequence[Result], model: str, *, ours: bool) -> Result | None:
    """The fastest run of a model, ours or of the others, launched in any way.

    None for the others if BF16 was not compiled too: without it the strongest may be missing, and nothing is quoted.
    """
    ran = [one for one in results if one.model == model and one.is_ours == ours and one.error is None]
    if not ours and not any(one.run == "bf16-amp" and one.compiled for one in ran):
        return None
    return min(ran, key=lambda one: one.step_ms, default=None)


def table(results: Sequence[Result]) -> Table:
    """Every result; speed and memory are beside the fastest of the others for its model."""
    shown = Table(title="Memory and speed, beside each model's fastest run of the others (*)")
    for heading in _HEADINGS:
        shown.add_column(heading, justify="left" if heading in ("model", "run") else "right")
    for result in results:
        compiled, recorded = ("yes" if is_so else "" for is_so in (result.compiled, result.recorded))
        if result.error is not None:
            shown.add_row(result.model, result.run, compiled, recorded, result.error[:60])
            continue
        rival = fastest(results, result.model, ours=False)
        speed = "" if rival is None else "*" if result is rival else f"{rival.step_ms / result.step_ms:.2f} ×"
        share = f"{result.peak_gb / rival.peak_gb:.2f}" if rival and result.peak_gb and rival.peak_gb else ""
        peak, resting = (("-" if value is None else f"{value:.2f}") for value in (result.peak_gb, result.resting_gb))
        kernel = "-" if result.kernel_ms is None else f"{result.kernel_ms:.1f}"
        waits = "host" if result.is_host_bound else ""
        row = (result.model, result.run, compiled, recorded, f"{result.step_ms:.1f}", kernel, waits, speed, peak, share)
        shown.add_row(*row, resting, f"{result.losses[-1]:.4f}")
    return shown


def markdown(results: Sequence[Result]) -> str:
    """The table of docs/evidence.md: milliseconds of a step and peak GB; our fastest run beside that of the others."""
    lines = [["model", *_COLUMNS, "speed", "memory"]]
    lines.append(["---"] * len(lines[0]))
    for model in dict.fromkeys(result.model for result in results):
        cells = []
        for run, compiled in _COLUMNS.values():
            keys = (model, run, compiled, False)
            found = [r for r in results if (r.model, r.run, r.compiled, r.recorded) == keys and r.error is None]
            cells.append(_cell(found[0]) if found else "")
        ours, rival = fastest(results, model, ours=True), fastest(results, model, ours=False)
        speed = f"{rival.step_ms / ours.step_ms:.2f} ×" if ours and rival else ""
        has_memory = ours and rival and ours.peak_gb and rival.peak_gb
        lines.append([model, *cells, speed, f"{ours.peak_gb / rival.peak_gb:.2f} ×" if has_memory else ""])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(result: Result) -> str:
    return f"{result.step_ms:.1f}" + ("" if result.peak_gb is None else f", {result.peak_gb:.2f}")
