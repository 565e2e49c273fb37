"""Draw the README's chart from committed results: speed and peak memory of one comparison's runs.

python benchmarks/plot_results.py

`--result` names another file of benchmarks/results (what compare.py writes), `--runs` its runs as NAME=LABEL. The image
carries the SHA-256 of its figures, so that a test finds a chart that is older than its results.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path

# Run as a script from a clone, installed or not.
sys.path.insert(0, str(Path(__file__).parents[1]))
from fp8_megatron.commands.arguments import Parser, output_file, path
from fp8_megatron.commands.program import exit_status

_RESULTS = Path(__file__).parent / "results"
_RUNS = {
    "O3-fast": "fp8_megatron",
    "megatron-te-delayed": "Megatron + Transformer Engine",
    "megatron-bf16": "Megatron, BF16",
}
#: Key of the digest among the PNG's texts.
DIGEST_KEY = "Results-SHA256"


@dataclass(frozen=True)
class Bar:
    """One run: its label, tokens/s/GPU and peak memory in 10^9 bytes."""

    label: str
    tokens_per_second_per_gpu: float
    peak_gb: float


def read_bars(result: Path, runs: dict[str, str]) -> list[Bar]:
    """The named runs of a comparison, in the order of `runs`.

    Raises:
        ValueError: the file lacks one of them.
    """
    by_name = {row["name"]: row for row in json.loads(result.read_text())["results"]}
    if missing := [name for name in runs if name not in by_name]:
        raise ValueError(f"{result} has no run {', '.join(missing)}: its runs are {', '.join(by_name)}")
    return [
        Bar(label, by_name[name]["tokens_per_second_per_gpu"], by_name[name]["peak_gb"]) for name, label in runs.items()
    ]


def digest(bars: list[Bar]) -> str:
    """SHA-256 of the figures in the chart."""
    shown = [(bar.label, f"{bar.tokens_per_second_per_gpu:,.0f}", f"{bar.peak_gb:.1f}") for bar in bars]
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()


def plot(bars: list[Bar], title: str, output: Path) -> None:
    """Two panels of horizontal bars that share their labels."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    labels = [bar.label for bar in bars]
    colours = ["#2a6f97", *["#b8b8b8"] * (len(bars) - 1)]
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 0.45 * len(bars) + 1.3), sharey=True)
    for axes, values, heading, number in (
        (panels[0], [bar.tokens_per_second_per_gpu for bar in bars], "tokens/s/GPU (more is better)", "{:,.0f}"),
        (panels[1], [bar.peak_gb for bar in bars], "peak memory, GB (less is better)", "{:.1f}"),
    ):
        axes.bar_label(axes.barh(labels, values, color=colours), fmt=number, padding=3)
        axes.set_title(heading, fontsize=10)
        axes.set_xticks([])
        axes.margins(x=0.18)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    panels[0].invert_yaxis()
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=130, metadata={DIGEST_KEY: digest(bars), "Software": None})
    pyplot.close(figure)


def main() -> None:
    """Draw the chart that the flags name."""
    parser = Parser(description="Draw the README's chart from committed results.")
    parser.add_argument("--result", type=path, default=_RESULTS / "gpt7b_4h200_micro4x4.json")
    parser.add_argument("--runs", nargs="+", metavar="NAME=LABEL", help="runs of the file, ours first")
    parser.add_argument("--title", default="GPT-7B on 4 H200, data-parallel, 4 micro-batches of 4 × 2,048 tokens")
    parser.add_argument("--output", type=output_file, default=_RESULTS / "headline.png")
    args = parser.parse_args()
    runs = dict(run.split("=", 1) for run in args.runs) if args.runs else _RUNS
    try:
        bars = read_bars(args.result, runs)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    plot(bars, args.title, args.output)
    print(f"{args.output}: {len(bars)} runs of {args.result}")


if __name__ == "__main__":
    sys.exit(exit_status(main))
