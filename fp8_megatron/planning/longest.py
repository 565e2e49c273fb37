"""The longest sequence that fits into a GPU's memory, by what leaves that memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..config.schema import Config
from ..models.registry import architecture_of
from .activations import predict_host_bytes
from .layouts import ROOM, Cluster, largest_peak, recomputations

#: Positions of each sequence whose logits, or whose MLPs' tensors, exist at a time, in the forms that cut them.
CHUNK = 8192
#: Of each of the two chunks that a rank has of a sequence (`data.document_bounds`), over its tensor-parallel ranks.
_STEP = 1024
#: The longest that is tried.
_MOST = 2**24


@dataclass(frozen=True)
class Longest:
    """The longest sequence of one form.

    Attributes:
        recomputed: what is recomputed: nothing, the modules, or full.
        cuts_loss: the loss is computed over `CHUNK` positions at a time.
        cuts_mlps: so are the MLPs.
        offloads: all layers of a (virtual) stage but the last keep their activations on the host.
        config: of the run; None if not even the shortest fits.
        peak_bytes: of a rank, predicted.
        host_bytes: of a rank, on the host.
    """

    recomputed: str
    cuts_loss: bool
    cuts_mlps: bool
    offloads: bool
    config: Config | None
    peak_bytes: int = 0
    host_bytes: int = 0


def longest_sequences(config: Config, cluster: Cluster) -> Iterator[Longest]:
    """The longest sequence that fits for each form: what is recomputed, whether loss and MLPs are cut, what leaves.

    Micro-batches have one sequence. The layout and the global batch are the configuration's, and peaks fill `ROOM` of a
    GPU's memory.
    """
    cuts_mlps = architecture_of(config.model).cuts_mlps
    for recomputation in recomputations(config.model):
        granularity = recomputation["recompute_granularity"]
        name = "nothing" if granularity is None else " ".join(recomputation.get("recompute_modules", ("full",)))
        forms = [(False, False, False), (True, False, False), (True, False, True)]
        if granularity is not None and cuts_mlps:  # MLPs in chunks are computed again
            forms += [(True, True, False), (True, True, True)]
        for cuts_loss, cuts, offloads in forms:
            count = _offloaded_layers(config) if offloads else 0
            training = replace(config.training, micro_batch_size=1, cpu_offloading_num_layers=count, **recomputation)
            form = replace(config, training=training)
            yield _longest(form, cluster, Longest(name, cuts_loss, cuts, offloads, None))


def _offloaded_layers(config: Config) -> int:
    """All layers of the largest model chunk but the last."""
    return max(len(chunk) for stage in config.pipeline_layout.chunks for chunk in stage) - 1


def _longest(config: Config, cluster: Cluster, form: Longest) -> Longest:
    parallel = config.parallel
    step = _STEP * 2 * parallel.context_parallel_size * parallel.tensor_model_parallel_size
    fits, too_long, room = 0, _MOST // step + 1, ROOM * cluster.memory_bytes
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        _, peak = largest_peak(_of_length(config, middle * step, form), cluster.gpus, room=room)
        if peak.total <= room:
            fits = middle
        else:
            too_long = middle
    if fits == 0:
        return form
    found = _of_length(config, fits * step, form)
    stage, peak = largest_peak(found, cluster.gpus)
    host = predict_host_bytes(found, world_size=cluster.gpus, stage=stage)
    return replace(form, config=found, peak_bytes=peak.total, host_bytes=host)


def _of_length(config: Config, length: int, form: Longest) -> Config:
    chunks = -(-length // config.parallel.context_parallel_size // CHUNK)
    loss_chunk = CHUNK if form.cuts_loss and chunks > 1 else None
    training = replace(
        config.training, loss_chunk_size=loss_chunk, mlp_chunks_for_training=chunks if form.cuts_mlps else 1
    )
    model = replace(config.model, seq_length=length, max_position_embeddings=None)
    return replace(config, model=model, training=training)
