"""What happens to gradients between backward and the optimizer: the function megatron-core's schedules call."""

from __future__ import annotations

import torch

from .data_parallel import FP8DataParallel
from .topology import Topology


def finalize_model_grads(model: list[FP8DataParallel], topology: Topology) -> None:
    """Finish the means over replicas, then sum what tensor-parallel ranks or pipeline stages hold parts of.

    Parameters that are summed over a group form spaces of their own, laid out alike on all its ranks: a rank sums its
    shard, whatever is in it.

    Args:
        model: this rank's model chunks, after the last backward of a step.
    """
    for chunk in model:
        chunk.finish_grad_sync()
    for chunk in model:
        for buffer in chunk.grad_buffers:
            if buffer.space.sequence_parallel and topology.tp.size() > 1:
                torch.distributed.all_reduce(buffer.payload, group=topology.tp)
            if buffer.space.shared_embedding and topology.embedding is not None:
                torch.distributed.all_reduce(buffer.payload, group=topology.embedding)
