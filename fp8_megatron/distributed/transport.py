"""How bytes travel between data-parallel ranks: through NCCL (gloo on a CPU), or by the copy engines inside a node.

The choice is one of memory: what `SendMemory` allocates, the collectives move (`collectives.copy_engine`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from ..collectives import copy_engine
from ..config import ParallelConfig

Group = torch.distributed.ProcessGroup

_PROBE_BYTES = 1024


class TransportError(ValueError):
    """The transport that was asked for does not work between these ranks."""


@dataclass(frozen=True)
class SendMemory:
    """Allocates what a rank sends to a group.

    Attributes:
        group: ranks of one node that copy from each other's memory; None: plain memory.
    """

    device: torch.device
    group: Group | None = None

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """[numel], kept for good where ranks share it; then called by every rank of the group in the same order."""
        if self.group is None:
            return torch.zeros(numel, dtype=dtype, device=self.device)
        return copy_engine.allocate(numel * dtype.itemsize, self.group, self.device).view(dtype)


def send_memory(parallel: ParallelConfig, group: Group, device: torch.device) -> SendMemory:
    """What --dp-transport gives for `group`; called by every rank of it.

    Under `auto` copy engines carry what ranks of one node send each other, if a trial works on all of them. Tensor
    parallelism keeps to NCCL: it asks for one launch queue, in which a barrier would hold up the kernels behind it.

    Raises:
        TransportError: copy_engine was asked for and does not work here, with the reason.
    """
    plain = SendMemory(device)
    wanted = parallel.dp_transport
    if wanted == "nccl" or group.size() == 1 or (wanted == "auto" and parallel.tensor_model_parallel_size > 1):
        return plain
    obstacle = _obstacle(group, device)
    if obstacle is None:
        return SendMemory(device, group)
    if wanted == "copy_engine":
        raise TransportError(f"dp_transport(copy_engine) does not work here: {obstacle}; give --dp-transport nccl")
    return plain


def _obstacle(group: Group, device: torch.device) -> str | None:
    """Why ranks of `group` cannot read each other's memory; the same on all of them."""
    if device.type != "cuda":
        return "it needs GPUs"
    node_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    ranks = torch.distributed.get_process_group_ranks(group)
    if len({rank // node_size for rank in ranks}) > 1:
        return f"data-parallel ranks {ranks} are on several nodes"
    reason = None
    try:
        copy_engine.allocate(_PROBE_BYTES, group, device)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
    reasons: list[str | None] = [None] * group.size()
    torch.distributed.all_gather_object(reasons, reason, group=group)
    return next((reason for reason in reasons if reason is not None), None)
