"""What happens to gradients between backward and the optimizer: the function megatron-core's schedules call."""

from __future__ import annotations

from typing import Any

import torch

from .data_parallel import FP8DataParallel
from .partition import Slot
from .topology import Topology


def finalize_model_grads(model: list[FP8DataParallel], topology: Topology) -> None:
    """Average over replicas, then sum what tensor-parallel ranks or pipeline stages hold parts of.

    Args:
        model: this rank's model chunks, after the last backward of a step.
    """
    for chunk in model:
        chunk.finish_grad_sync()
        _sum_slots(chunk, topology.tp, lambda param: getattr(param, "sequence_parallel", False))
    embedding_group = topology.groups.embd
    if embedding_group is not None and embedding_group.size() > 1:
        ranks = torch.distributed.get_process_group_ranks(embedding_group)
        if topology.rank in ranks:
            chunk = model[0] if topology.is_first_stage else model[-1]
            _sum_slots(chunk, embedding_group, lambda param: getattr(param, "shared_embedding", False))


def _sum_slots(chunk: FP8DataParallel, group: torch.distributed.ProcessGroup, belongs: Any) -> None:
    if group.size() == 1:
        return
    for buffer in chunk.grad_buffers:
        slots: list[Slot] = [slot for slot in buffer.space.slots if belongs(slot.param)]
        if slots:
            buffer.all_reduce_sum_slots(slots, group)
