"""Bytes that a rank sends to its replicas in one step, from the configuration, before anything is built."""

from __future__ import annotations

from dataclasses import dataclass

from ..config.schema import Config
from ..formats import GRAD_BLOCK, StorageDtype
from .memory import parameters_by_class
from .storage import model_storage


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
    replicas = config.num_replicas(world_size)
    num_micro_batches = config.num_micro_batches(world_size)
    stored = model_storage(config.precision, num_micro_batches)
    gradients = weights = 0.0
    for storage, count in parameters_by_class(config, padded_vocab_size, stage=stage).items():
        grads = stored.of_grads(storage, replicas)
        per_element = grads.wire.itemsize + (4 / GRAD_BLOCK if grads.wire is StorageDtype.FP8 else 0)
        reductions = 1 if grads.adds_locally else num_micro_batches
        gradients += reductions * count * per_element
        weights += count * stored.of_state(storage).weight.itemsize
    share = (replicas - 1) / replicas
    return WireBytes(round(gradients * share), round(weights * share))
