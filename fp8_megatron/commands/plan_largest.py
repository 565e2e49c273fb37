"""The largest GPT that fits on clusters of several sizes, by precision level: a table and a chart."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..config.checks import ConfigError
from ..config.io import parse_config
from ..config.schema import PIPELINE_SETTINGS, Config
from ..config.words import flag_with
from ..outputs import write_output
from ..planning.largest import largest_model, num_parameters
from ..planning.layouts import ROOM, Cluster

#: A model whose width, layers and heads are varied. Flags of the command line stand behind these, so they win.
_BASE = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 8 --seq-length 2048 --max-position-embeddings 2048 "
    "--vocab-size 50304 --micro-batch-size 1 --attention-dropout 0 --hidden-dropout 0 --mock-data"
)

#: Settings of the layers of a stage, beside the number of stages.
_DIVISION = tuple(name for name in PIPELINE_SETTINGS if name != "pipeline_model_parallel_size")
#: Settings of a batch that grows.
_GROWTH = ("rampup_batch_size", "step_batch_size_schedule")


def report_largest(
    levels: Mapping[str, Sequence[str]],
    flags: Sequence[str],
    clusters: Sequence[Cluster],
    output: Path | None,
    prog: str,
) -> int:
    """Print the table, and draw it to `output`; returns the exit status.

    Args:
        levels: the flags of each level by its name.
        flags: flags of the model, for all levels.
    """
    if output is not None:
        from ..reporting.plot import image_format

        image_format(output)
    sizes: dict[str, list[Config | None]] = {}
    recomputed = "nothing"
    for level, own in levels.items():
        config = parse_config([*_BASE.split(), *flags, *own], prog=prog)
        _check_is_followed(config)
        recomputed = " ".join(config.training.recomputed_modules) or config.training.recompute_granularity or "nothing"
        sizes[level] = [largest_model(config, cluster) for cluster in clusters]
    print(_table(sizes, clusters, recomputed), flush=True)
    if output is not None:
        _draw(sizes, clusters, output)
        print(output)
    return 0


def _check_is_followed(config: Config) -> None:
    """Raise `ConfigError` for a division of the layers, and for a batch that grows: stages and batches are varied."""
    for section, names in ((config.parallel, _DIVISION), (config.training, _GROWTH)):
        for name in names:
            value = getattr(section, name)
            if value != getattr(type(section)(), name):
                raise ConfigError(f"{flag_with(name, value)}: --largest varies pipeline stages and batches; drop it")


def _table(sizes: Mapping[str, Sequence[Config | None]], clusters: Sequence[Cluster], recomputed: str) -> str:
    from rich.table import Table

    from ..reporting.tables import table_lines

    table = Table(title="Largest GPT, 10^9 parameters (TP × PP × DP)")
    for heading in ("GPUs", *sizes):
        table.add_column(heading, justify="right", no_wrap=True)
    for row, cluster in enumerate(clusters):
        table.add_row(str(cluster.gpus), *(_cell(models[row], cluster) for models in sizes.values()))
    limit = (
        f"peak within {ROOM:.0%} of {clusters[0].memory_bytes / 1e9:g} GB; width, heads, layers, batch and layout are "
        f"varied, whatever the flags say; micro-batch 1, {recomputed} recomputed"
    )
    return "\n".join([*table_lines(table), limit])


def _cell(config: Config | None, cluster: Cluster) -> str:
    if config is None:
        return "none"
    tp, pp = config.parallel.tensor_model_parallel_size, config.parallel.pipeline_model_parallel_size
    return f"{num_parameters(config) / 1e9:,.1f} ({tp} × {pp} × {config.data_parallel_size(cluster.gpus)})"


def _draw(sizes: Mapping[str, Sequence[Config | None]], clusters: Sequence[Cluster], output: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from ..reporting.plot import COLORS, image_format

    figure = Figure(figsize=(9.0, 4.5), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    width = 0.8 / len(sizes)
    for index, (level, models) in enumerate(sizes.items()):
        places = [row + (index - (len(sizes) - 1) / 2) * width for row in range(len(clusters))]
        heights = [0.0 if model is None else num_parameters(model) / 1e9 for model in models]
        axes.bar(places, heights, width, label=level, color=COLORS[index % len(COLORS)])
    axes.set_xticks(range(len(clusters)), [str(cluster.gpus) for cluster in clusters])
    axes.set_xlabel(f"GPUs of {clusters[0].memory_bytes / 1e9:g} GB")
    axes.set_ylabel("parameters of the largest GPT, 10⁹")
    axes.legend(frameon=False)
    stream = io.BytesIO()
    figure.savefig(stream, format=image_format(output))
    write_output(output, stream.getvalue())
