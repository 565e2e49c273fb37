"""The memory of a rank of every kind of pipeline stage, counted by building it (`training.rank_build`)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ..config.checks import check_config
from ..config.schema import Config
from ..planning.activations import PeakBytes, predict_peak
from ..planning.vocabulary import padded_vocab_size

if TYPE_CHECKING:
    from ..training.rank_build import RankMemory

_KINDS = ("weights", "gradients", "master_weights", "exp_avg", "exp_avg_sq", "scales")


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
            print(_table(level, config, world_size, built), flush=True)
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


def _table(level: str, config: Config, world_size: int, built: Sequence[tuple[RankMemory, PeakBytes]]) -> str:
    from rich.table import Table

    from ..reporting.tables import table_lines

    parallel = config.parallel
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    context = f"CP {parallel.context_parallel_size} × " if parallel.context_parallel_size > 1 else ""
    table = Table(
        title=f"GB (10^9 bytes) of a rank as built, {level}: TP {tp} × {context}PP {pp} × DP "
        f"{config.data_parallel_size(world_size)}, micro-batch {config.training.micro_batch_size}"
    )
    names = [kind.replace("_", "\n") for kind in _KINDS]
    for heading in ("stage", *names, "buffers", "in a step", "peak", "predicted\npeak", "differs"):
        table.add_column(heading, justify="right", no_wrap=True)
    for memory, predicted in built:
        table.add_row(*_cells(memory, predicted))
    return "\n".join(table_lines(table))


def _cells(memory: RankMemory, predicted: PeakBytes) -> Iterator[str]:
    yield str(memory.stage)
    for kind in _KINDS:
        yield f"{getattr(memory.state, kind) / 1e9:.2f}"
    yield f"{memory.wire_buffers / 1e9:.2f}"
    yield f"{(memory.peak - memory.state.total - memory.wire_buffers) / 1e9:.2f}"
    yield f"{memory.peak / 1e9:.2f}"
    yield f"{predicted.total / 1e9:.2f}"
    yield f"{memory.peak / predicted.total - 1:+.1%}"
