"""The largest GPT that a cluster can hold, as in FP8-LM's Figure 1 (arXiv 2310.18313)."""

from __future__ import annotations

from dataclasses import replace

from ..config.schema import Config
from .activations import predict_peak
from .layouts import ROOM, Cluster
from .memory import padded_vocab_size, parameters_by_class

#: Widths are multiples of this, so that each of 8 tensor-parallel ranks has whole heads of width 128.
_WIDTH_STEP = 1024
_HEAD_WIDTH = 128
#: Widths in a row that do not fit before the search ends. Layers are rounded to stages, so one miss proves nothing.
_MISSES = 8


def largest_model(config: Config, cluster: Cluster) -> Config | None:
    """The largest GPT of about GPT-175B's shape that fits, in its layout; None if none does.

    Width h, h / 128 heads, and about h / 128 layers, a multiple of the stages. All else is the configuration's.
    Micro-batches have one sequence, as many as stages.
    """
    best, width, misses = None, 0, 0
    while misses < _MISSES:
        width += _WIDTH_STEP
        candidates = [_laid_out(config, cluster, width, tp, pp) for tp, pp in _sizes(config, width, cluster)]
        fitting = [one for one in candidates if _peak(one, cluster) <= ROOM * cluster.memory_bytes]
        misses = 0 if fitting else misses + 1
        best = max([*fitting, *([best] if best else [])], key=num_parameters, default=None)
    return best


def num_parameters(config: Config) -> int:
    """Parameters of the whole model."""
    return sum(parameters_by_class(config, padded_vocab_size(config)).values())


def _sizes(config: Config, width: int, cluster: Cluster) -> list[tuple[int, int]]:
    """Tensor- and pipeline-parallel sizes that divide the cluster beside the context-parallel one, with a layer or more
    for each stage.
    """
    cp = config.parallel.context_parallel_size
    return [
        (tp, pp)
        for tp in (1, 2, 4, 8)
        if tp <= cluster.gpus_per_node
        for pp in range(1, min(cluster.gpus // (tp * cp), width // _HEAD_WIDTH) + 1)
        if cluster.gpus % (tp * cp * pp) == 0
    ]


def _laid_out(config: Config, cluster: Cluster, width: int, tp: int, pp: int) -> Config:
    heads = width // _HEAD_WIDTH
    num_layers = max(1, round(heads / pp)) * pp
    model = replace(config.model, num_layers=num_layers, hidden_size=width, num_attention_heads=heads)
    parallel = replace(
        config.parallel, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, sequence_parallel=tp > 1
    )
    # As many micro-batches as stages: the fewest that fill the pipeline.
    batch_size = cluster.gpus // (tp * parallel.context_parallel_size)
    training = replace(config.training, micro_batch_size=1, global_batch_size=batch_size)
    return replace(config, model=model, parallel=parallel, training=training)


def _peak(config: Config, cluster: Cluster) -> int:
    """The larger peak of the first stage, with the most micro-batches in flight, and of the last, with the logits."""
    vocab, last = padded_vocab_size(config), config.parallel.pipeline_model_parallel_size - 1
    return max(predict_peak(config, vocab, world_size=cluster.gpus, stage=stage).total for stage in {0, last})
