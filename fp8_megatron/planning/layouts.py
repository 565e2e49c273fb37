"""Layouts of a model on a cluster: which of them fit into the GPUs' memory, and how fast a step is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType
from typing import Any, Literal

from ..config.checks import ConfigError, check_config
from ..config.ignored import without_unread
from ..config.pipeline_layout import pipeline_layout
from ..config.schema import Config, ModelConfig, ParallelConfig
from ..models.registry import architecture_of
from .activations import PeakBytes, predict_peak
from .memory import padded_vocab_size
from .speed import H200, GpuRates, StepSeconds, predict_step, why_no_time

#: The largest share of a GPU's memory that a predicted peak may take. Prediction and peak differ by up to 2.5%, and the
#: CUDA context, NCCL and fragmentation take memory that the prediction does not count.
ROOM = 0.9

_NONE: Mapping[str, Any] = MappingProxyType(
    {
        "recompute_granularity": None,
        "recompute_method": None,
        "recompute_num_layers": None,
        "recompute_modules": (),
    }
)


def recomputations(model: ModelConfig) -> tuple[Mapping[str, Any], ...]:
    """Settings of what is recomputed: nothing, MLPs, whole layers.

    Raises:
        ValueError: see `Architecture.mlp_modules`.
    """
    mlps = tuple(architecture_of(model).mlp_modules(model))
    return (
        _NONE,
        {"recompute_granularity": "selective", "recompute_modules": mlps},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    )


@dataclass(frozen=True)
class Cluster:
    """The GPUs of a job.

    Attributes:
        gpus: of all nodes.
        gpus_per_node: tensor-parallel ranks share a node.
        memory_bytes: of one GPU.
        network_bytes: bytes/s that a GPU sends to GPUs of other nodes.
        rates: of one GPU.
    """

    gpus: int
    gpus_per_node: int
    memory_bytes: float
    network_bytes: float
    rates: GpuRates = H200

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a last node with fewer GPUs than the others."""
        if self.gpus > self.gpus_per_node and self.gpus % self.gpus_per_node:
            raise ConfigError(
                f"--gpus {self.gpus} is not a multiple of --gpus-per-node {self.gpus_per_node}; give whole nodes"
            )


@dataclass(frozen=True)
class Layout:
    """One way to run a model on a cluster.

    Attributes:
        config: the configuration of the run.
        stage: the pipeline stage with the largest peak, which `peak` is of.
        records: steps are recorded as a CUDA graph.
        step: None if it is not predicted (`speed.why_no_time`).
    """

    config: Config
    stage: int
    peak: PeakBytes
    records: bool
    step: StepSeconds | None


def best_layouts(config: Config, cluster: Cluster, records: Callable[[Config], bool]) -> list[Layout]:
    """The layouts that fit, the fastest first; behind them those without a predicted step, the smallest peak first.

    The configuration's own layout is one. Tensor- and pipeline-parallel sizes, those of `Architecture.layout_sizes`,
    the micro-batch and recomputation (of nothing, MLPs, or whole layers) vary. All else is the configuration's, the
    global batch and the context-parallel size too.

    Args:
        records: whether a configuration's steps are recorded as a CUDA graph, if there is memory for it.

    Raises:
        ConfigError: the configuration works in no layout; the text says why not in the one that it asks for.
    """
    found, is_valid = [], False
    for candidate in dict.fromkeys(map(_with_what_is_read, [config, *_candidates(config, cluster)])):
        try:
            check_config(candidate, cluster.gpus, on_this_machine=False)
        except ConfigError:
            continue
        is_valid = True
        layout = _fitted(candidate, cluster, records(candidate))
        if layout is not None:
            found.append(layout)
    if not is_valid:
        check_config(_with_what_is_read(config), cluster.gpus, on_this_machine=False)
    return sorted(found, key=lambda layout: (layout.step.total if layout.step else math.inf, layout.peak.total))


def _with_what_is_read(config: Config) -> Config:
    """`config` without settings of ranks that a run in its layout leaves out."""
    return replace(config, parallel=without_unread(config)[0].parallel)


def better_accumulation(layout: Layout, cluster: Cluster) -> Layout | None:
    """The same layout with the other --grad-accumulation, if that is faster by a hundredth or more and fits; else None.

    On several replicas, sharded sends every micro-batch and local adds micro-batches up on each rank first.
    """
    config, precision = layout.config, layout.config.precision
    counts = config.num_micro_batches(cluster.gpus), config.num_replicas(cluster.gpus)
    if layout.step is None or not precision.is_fp8 or min(counts) == 1:
        return None
    other: Literal["sharded", "local"] = "sharded" if precision.grad_accumulation == "local" else "local"
    changed = replace(config, precision=replace(precision, grad_accumulation=other))
    found = _fitted(changed, cluster, layout.records)
    return found if found and found.step and found.step.total < 0.99 * layout.step.total else None


def largest_peak(
    config: Config, world_size: int, *, records: bool = False, room: float = math.inf
) -> tuple[int, PeakBytes]:
    """The pipeline stage with the largest peak, and that peak.

    Args:
        room: bytes. Stages behind the first one that needs more are left out.
    """
    vocab, peaks = padded_vocab_size(config), []
    for stage in range(config.parallel.pipeline_model_parallel_size):
        peaks.append(predict_peak(config, vocab, world_size=world_size, stage=stage, records=records))
        if peaks[-1].total > room:
            break
    stage = max(range(len(peaks)), key=lambda index: peaks[index].total)
    return stage, peaks[stage]


def _candidates(config: Config, cluster: Cluster) -> Iterator[Config]:
    """Other layouts, of which some do not work. None if there is no batch to share: `check_config` says why."""
    try:
        batch, cp = config.global_batch_size(cluster.gpus), config.parallel.context_parallel_size
        recomputed = recomputations(config.model)
    except ValueError:
        return
    for tp in _powers_of_two(cluster.gpus_per_node):
        for pp in (size for size in range(1, cluster.gpus // tp + 1) if _divides_layers(config, size)):
            if cluster.gpus % (tp * cp * pp):
                continue
            sizes = list(_further_sizes(config, cluster.gpus // (tp * pp)))
            for micro_batch in _powers_of_two(batch * tp * cp * pp // cluster.gpus):
                for further, recomputation in product(sizes, recomputed):
                    laid_out = _laid_out(config, tp, pp, micro_batch, batch, recomputation)
                    yield replace(laid_out, parallel=replace(laid_out.parallel, **further))


def _further_sizes(config: Config, num_ranks: int) -> Iterator[Mapping[str, Any]]:
    """Settings of `Architecture.layout_sizes`, for `num_ranks` ranks that have other tokens."""
    varied = architecture_of(config.model).layout_sizes(config.model)
    sizes = [
        [size for size in _powers_of_two(num_ranks) if num_ranks % size == one.shared % size == 0] for one in varied
    ]
    for chosen in product(*sizes):
        yield {one.setting: size for one, size in zip(varied, chosen, strict=True)}


def _with_stages(config: Config, size: int) -> ParallelConfig:
    """The run's parallel settings with another number of stages.

    What divides the layers for the run's own number goes; layers per virtual stage and what is accounted for stay.
    """
    parallel = config.parallel
    if size == parallel.pipeline_model_parallel_size:
        return parallel
    kept = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    changed = {name: getattr(parallel, name) for name in kept}
    if size > 1:
        changed["num_layers_per_virtual_pipeline_stage"] = parallel.num_layers_per_virtual_pipeline_stage
    return replace(parallel.with_stages(size), **changed)


def _divides_layers(config: Config, size: int) -> bool:
    """Whether the layers can be divided over `size` stages."""
    try:
        pipeline_layout(_with_stages(config, size), config.model.num_layers)
    except ValueError:
        return False
    return True


def _laid_out(
    config: Config, tp: int, pp: int, micro_batch: int, batch: int, recomputation: Mapping[str, Any]
) -> Config:
    parallel = replace(_with_stages(config, pp), tensor_model_parallel_size=tp, sequence_parallel=tp > 1)
    training = replace(
        config.training,
        micro_batch_size=micro_batch,
        global_batch_size=batch,
        **{**_NONE, **recomputation},
    )
    layout = pipeline_layout(parallel, config.model.num_layers)
    most = max(len(layout.layers_of(stage)) for stage in range(pp))
    kept = min(config.precision.keep_fp8_transpose_cache, most)
    largest = max(len(chunk) for stage in layout.chunks for chunk in stage)
    training = replace(training, cpu_offloading_num_layers=min(training.cpu_offloading_num_layers, largest))
    sends_fp8 = config.precision.fp8_pipeline_communication and pp > 1
    precision = replace(config.precision, keep_fp8_transpose_cache=kept, fp8_pipeline_communication=sends_fp8)
    return replace(config, parallel=parallel, training=training, precision=precision)


def _fitted(config: Config, cluster: Cluster, records: bool) -> Layout | None:
    """The layout with its predictions, or None if it does not fit. A recording that does not fit is not made."""
    room = ROOM * cluster.memory_bytes
    for with_recording in (True, False) if records else (False,):
        stage, peak = largest_peak(config, cluster.gpus, records=with_recording, room=room)
        if peak.total <= room:
            step = None
            if why_no_time(config) is None:
                step = predict_step(
                    config,
                    padded_vocab_size(config),
                    world_size=cluster.gpus,
                    gpus_per_node=cluster.gpus_per_node,
                    network_bytes=cluster.network_bytes,
                    rates=cluster.rates,
                )
            return Layout(config, stage, peak, with_recording, step)
    return None


def _powers_of_two(most: int) -> Iterator[int]:
    size = 1
    while size <= most:
        yield size
        size *= 2
