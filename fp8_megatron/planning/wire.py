"""Bytes that a rank sends to its replicas and to neighbouring stages in one step, from the configuration alone."""

from __future__ import annotations

from dataclasses import dataclass

from ..collectives.packed import packed_bytes
from ..config.schema import Config
from ..dtypes import GRAD_BLOCK, StorageDtype
from .memory import model_storage, parameters_by_class, replicas_by_kind


@dataclass(frozen=True)
class WireBytes:
    """Bytes that one rank sends in one step.

    Attributes:
        gradients: of all reductions of the step, with their scales.
        weights: of the gather of updated weights.
    """

    gradients: int
    weights: int

    @property
    def total(self) -> int:
        """Both together."""
        return self.gradients + self.weights


def predict_wire_bytes(config: Config, padded_vocab_size: int, *, world_size: int, stage: int = 0) -> WireBytes:
    """Predicted bytes of a rank of pipeline stage `stage`, without padding of buckets and scales of weights.

    A reduction of B bytes over d replicas sends B·(d−1)/d, as the gather of B bytes of weights does. Micro-batches that
    are not added up on each rank are each reduced.
    """
    num_micro_batches = config.num_micro_batches(world_size)
    stored = model_storage(config.precision, num_micro_batches)
    gradients = weights = 0.0
    for has_matrices, replicas in replicas_by_kind(config, world_size).items():
        share = (replicas - 1) / replicas
        by_class = parameters_by_class(config, padded_vocab_size, stage=stage, has_matrices=has_matrices)
        for storage, count in by_class.items():
            grads = stored.of_grads(storage)
            per_element = grads.wire.itemsize + (4 / GRAD_BLOCK if grads.wire is StorageDtype.FP8 else 0)
            reductions = 1 if grads.adds_locally else num_micro_batches
            gradients += reductions * count * per_element * share
            weights += count * stored.of_state(storage).weight.itemsize * share
    return WireBytes(round(gradients), round(weights))


def stage_message_bytes(config: Config) -> int:
    """Bytes of one micro-batch's activations that a rank sends to the next stage; their gradients have as many."""
    parallel = config.parallel
    shards = parallel.sequence_shares
    values = config.tokens_per_micro_batch // shards * config.model.hidden_size
    return packed_bytes(values) if config.precision.fp8_pipeline_communication else 2 * values


def predict_stage_bytes(config: Config, *, world_size: int, stage: int = 0) -> int:
    """Bytes that a rank of a pipeline stage sends to other stages in one step, in both directions."""
    layout = config.pipeline_layout
    num_chunks = len(layout.chunks[stage])
    borders = 2 * num_chunks - (stage == 0) - (stage == layout.num_stages - 1)
    return borders * config.num_micro_batches(world_size) * stage_message_bytes(config)


def message_buffer_bytes(config: Config, *, stage: int = 0) -> int:
    """Bytes of the buffers for messages between stages (`mcore.pipeline`): to and from each neighbour of a stage."""
    layout = config.pipeline_layout
    if layout.num_stages == 1:
        return 0
    neighbours = 2 if layout.is_interleaved else 2 - (stage == 0) - (stage == layout.num_stages - 1)
    return 2 * neighbours * stage_message_bytes(config)
