"""Checks of pipeline stages; `checks` calls them."""

from __future__ import annotations

from collections.abc import Iterator

from .batch_schedule import BatchSchedule
from .schema import Config


def layout_problem(config: Config) -> str | None:
    """Why the layers cannot be divided over the stages as asked for; None if they can."""
    try:
        layout = config.pipeline_layout
    except ValueError as error:
        return str(error)
    inner = range(1, layout.num_stages - 1)
    empty = next((stage for stage in inner if not layout.layers_of(stage)), None)
    if empty is None:
        return None
    return f"{layout.text} leaves nothing for stage {empty} (counted from 0); give it a layer, or choose fewer stages"


def interleaving_problems(
    batches: BatchSchedule, config: Config, world_size: int, consumed_samples: int = 0
) -> Iterator[str]:
    """One line for each reason why the interleaved schedule cannot take the batches of the steps after
    `consumed_samples`, which ranks share evenly."""
    samples = config.training.micro_batch_size * config.data_parallel_size(world_size)
    numbers = (batch // samples for batch in batches.batches_from(consumed_samples))
    yield from filter(None, dict.fromkeys(_interleaving_problem(config, number) for number in numbers))


def _interleaving_problem(config: Config, num_micro_batches: int) -> str | None:
    """Why the interleaved schedule cannot take this number of micro-batches; None if it can, or is not used."""
    parallel, layout = config.parallel, config.pipeline_layout
    pp, group = layout.num_stages, parallel.microbatch_group_size_per_virtual_pipeline_stage
    name = f"microbatch_group_size_per_virtual_pipeline_stage({group})"
    if not layout.is_interleaved:
        return None
    if group is None and num_micro_batches % pp:
        return (
            f"the interleaved schedule ({_virtual_setting(config)}) takes micro-batches in groups of "
            f"pipeline_model_parallel_size({pp}), but there are {num_micro_batches} per step; choose a "
            f"global_batch_size that gives a multiple of {pp}"
        )
    if group is None:
        return None
    if not pp <= group <= num_micro_batches:
        return (
            f"{name} is not between pipeline_model_parallel_size({pp}) and the {num_micro_batches} micro-batches of a "
            f"step; choose one that is"
        )
    if 0 < num_micro_batches % group < pp:
        return (
            f"{name} leaves {num_micro_batches % group} of {num_micro_batches} micro-batches to the last group, fewer "
            f"than pipeline_model_parallel_size({pp}); choose a size that leaves none or at least {pp}"
        )
    return None


def recompute_problem(config: Config) -> str | None:
    """Why --recompute-num-layers does not fit the model chunks; None if it does, or is not given."""
    method, count = config.training.recompute_method, config.training.recompute_num_layers
    try:
        layout = config.pipeline_layout
    except ValueError:
        return None  # `layout_problem` reports it
    sizes = sorted({len(chunk) for stage in layout.chunks for chunk in stage} - {0})
    stage = "virtual pipeline stage" if layout.is_interleaved else "pipeline stage"
    if count is None:
        return None
    if count == 0:
        return f"recompute_method({method}) with recompute_num_layers(0) recomputes nothing; give at least 1"
    if method != "uniform":
        most = sizes[-1]
        return (
            f"recompute_num_layers({count}) > {most} layers of a {stage}; choose at most {most}"
            if count > most
            else None
        )
    uncut = next((size for size in sizes if size % count), None)
    if uncut is None:
        return None
    return (
        f"recompute_method(uniform) with recompute_num_layers({count}) does not divide the {uncut} layers of a {stage} "
        f"into equal parts; choose a divisor of {uncut}, or recompute_method block"
    )


def _virtual_setting(config: Config) -> str:
    """The setting that makes virtual stages, with its value."""
    parallel = config.parallel
    if parallel.num_layers_per_virtual_pipeline_stage is not None:
        return f"num_layers_per_virtual_pipeline_stage({parallel.num_layers_per_virtual_pipeline_stage})"
    if parallel.num_virtual_stages_per_pipeline_rank is not None:
        return f"num_virtual_stages_per_pipeline_rank({parallel.num_virtual_stages_per_pipeline_rank})"
    return "pipeline_model_parallel_layout"
