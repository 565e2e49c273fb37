"""Answers of `plan`: the largest GPT on clusters, the longest sequence on a GPU, and the memory of ranks as built."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..config.checks import ConfigError, check_config
from ..config.io import parse_config
from ..config.parallel import PIPELINE_SETTINGS
from ..config.schema import Config
from ..config.words import flag_with
from ..outputs import write_output
from ..planning.activations import PeakBytes, predict_peak
from ..planning.largest import largest_model, num_parameters
from ..planning.layouts import ROOM, Cluster
from ..planning.longest import CHUNK, longest_sequences
from ..planning.memory import padded_vocab_size
from ..reporting.tables import table_text

if TYPE_CHECKING:
    from ..training.rank_build import RankMemory

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
    rows = [
        [str(cluster.gpus), *(_cell(models[row], cluster) for models in sizes.values())]
        for row, cluster in enumerate(clusters)
    ]
    table = table_text(["GPUs", *sizes], rows, title="Largest GPT, 10^9 parameters (TP × PP × DP)")
    limit = (
        f"peak within {ROOM:.0%} of {clusters[0].memory_bytes / 1e9:g} GB; width, heads, layers, batch and layout are "
        f"varied, whatever the flags say; micro-batch 1, {recomputed} recomputed"
    )
    return f"{table}\n{limit}"


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


def report_longest(config: Config, cluster: Cluster) -> int:
    """Print the table; returns the exit status: 1 if no form fits.

    Args:
        config: a configuration that passed its checks for the cluster's GPUs.
    """
    context = config.parallel.context_parallel_size
    shares = "" if context == 1 else f" of {context} that share it"
    headings = (
        *("recomputed", "loss in\nchunks", "MLPs in\nchunks", "activations\non the host"),
        *("longest", "peak GB", "host GB"),
    )
    found = list(longest_sequences(config, cluster))
    rows = [
        [
            one.recomputed,
            *("yes" if does else "no" for does in (one.cuts_loss, one.cuts_mlps, one.offloads)),
            "none" if one.config is None else f"{one.config.model.seq_length:,}",
            *("-" if one.config is None else f"{num / 1e9:.1f}" for num in (one.peak_bytes, one.host_bytes)),
        ]
        for one in found
    ]
    table = table_text(headings, rows, title=f"Longest sequence, {config.precision.level}, on a GPU{shares}")
    limit = (
        f"peak within {ROOM:.0%} of {cluster.memory_bytes / 1e9:g} GB; micro-batch 1; --loss-chunk-size {CHUNK}; "
        f"--mlp-chunks-for-training: {CHUNK} positions each; --cpu-offloading-num-layers: all of a stage but one"
    )
    print(f"{table}\n{limit}", flush=True)
    return 0 if any(one.config is not None for one in found) else 1


def report_build(configs: Mapping[str, Config], world_size: int) -> None:
    """Build, and print a table for each level.

    Args:
        configs: the run by the name of its level.
        world_size: ranks of the job.

    Raises:
        ConfigError: a configuration would not train, or cannot be built without a GPU.
    """
    for config in configs.values():
        check_config(config, world_size, on_this_machine=False)
    # PyTorch and megatron-core warn of libraries that are not there.
    with warnings.catch_warnings(action="ignore"):
        from ..training.rank_build import build_rank, check_buildable

        for config in configs.values():
            check_buildable(config)
        for level, config in configs.items():
            rows = padded_vocab_size(config)
            built = [
                (
                    build_rank(config, world_size=world_size, stage=stage),
                    predict_peak(config, rows, world_size=world_size, stage=stage),
                )
                for stage in stages_to_build(config)
            ]
            print(_build_table(level, config, world_size, built), flush=True)
            held = max(memory.validation for memory, _ in built)
            print(f"{level}: beside the state, a step of validation holds up to {held / 1e9:.2f} GB", flush=True)
    print(
        "built on a CPU from tensors without values, two steps of megatron-core's schedule; not counted: memory inside "
        "kernels, the CUDA context, NCCL, fragments"
    )


def stages_to_build(config: Config) -> list[int]:
    """The first stage of each kind: with the embedding, with the head, with different numbers of layers.

    Of stages of one kind the first holds the most micro-batches in flight.
    """
    layout = config.pipeline_layout
    kinds: dict[tuple[bool, bool, tuple[int, ...]], int] = {}
    for stage, chunks in enumerate(layout.chunks):
        kind = stage == 0, stage == layout.num_stages - 1, tuple(map(len, chunks))
        kinds.setdefault(kind, stage)
    return list(kinds.values())


def _build_table(level: str, config: Config, world_size: int, built: Sequence[tuple[RankMemory, PeakBytes]]) -> str:
    parallel = config.parallel
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    context = f"CP {parallel.context_parallel_size} × " if parallel.context_parallel_size > 1 else ""
    title = (
        f"GB (10^9 bytes) of a rank as built, {level}: TP {tp} × {context}PP {pp} × DP "
        f"{config.data_parallel_size(world_size)}, micro-batch {config.training.micro_batch_size}"
    )
    names = [kind.replace("_", "\n") for kind in built[0][0].state.by_kind]
    headings = ("stage", *names, "buffers", "in a step", "peak", "predicted\npeak", "differs")
    return table_text(headings, [list(_cells(memory, predicted)) for memory, predicted in built], title=title)


def _cells(memory: RankMemory, predicted: PeakBytes) -> Iterator[str]:
    yield str(memory.stage)
    yield from (f"{held / 1e9:.2f}" for held in memory.state.by_kind.values())
    yield f"{memory.wire_buffers / 1e9:.2f}"
    yield f"{(memory.peak - memory.state.total - memory.wire_buffers) / 1e9:.2f}"
    yield f"{memory.peak / 1e9:.2f}"
    yield f"{predicted.total / 1e9:.2f}"
    yield f"{memory.peak / predicted.total - 1:+.1%}"
