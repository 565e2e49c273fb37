"""How bytes travel between ranks: through NCCL (gloo on a CPU), or by the copy engines inside a node.

Between replicas the choice is one of memory: what `SendMemory` allocates, the collectives move
(`collectives.copy_engine`). Between tensor-parallel ranks it is one of their group (`collectives.row_exchange`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..collectives import row_exchange
from ..collectives.transport import copy_engine
from ..config.schema import ParallelConfig, Precision
from ..device.device import node_size

Group = torch.distributed.ProcessGroup

_PROBE_BYTES = 1024
#: Tensor-parallel ranks whose rows copy engines carry under `auto`, by whether steps are recorded.
_MOST_RANKS_BY_AUTO = {False: 2, True: 4}


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

    Raises:
        TransportError: copy_engine was asked for and does not work here, with the reason.
    """
    copies = _copies("dp_transport", parallel, group, device)
    return SendMemory(device, group if copies else None)


def share_rows(parallel: ParallelConfig, group: Group, device: torch.device, *, records_graphs: bool = False) -> None:
    """Let copy engines carry activations between the ranks of a tensor-parallel `group`, where --tp-transport says so.

    Args:
        records_graphs: whether steps are meant to become CUDA graphs.

    Raises:
        TransportError: as `send_memory`.
    """
    if _may_copy_rows(parallel, records_graphs) and _copies("tp_transport", parallel, group, device):
        row_exchange.share_memory(group, device)


def _may_copy_rows(parallel: ParallelConfig, records_graphs: bool) -> bool:
    """Whether rows are exchanged and --tp-transport allows copy engines.

    `auto` does not for more than two ranks: a layer then has so many parts that the host comes last
    (docs/performance.md). Where steps are recorded the host has no part, and four ranks are faster by copy engines
    (GPT-7B: 450 ms a step, 502 over NCCL); more have not been measured.
    """
    few_ranks = parallel.tensor_model_parallel_size <= _MOST_RANKS_BY_AUTO[records_graphs]
    allows = parallel.tp_transport == "copy_engine" or (parallel.tp_transport == "auto" and few_ranks)
    return parallel.sequence_parallel and allows


def needs_launch_order(parallel: ParallelConfig, precision: Precision, *, records_graphs: bool = False) -> bool:
    """Whether collectives must start in the order of their launch: under tensor parallelism over NCCL.

    Args:
        records_graphs: as for `share_rows`.
    """
    size = parallel.tensor_model_parallel_size
    copies_rows = precision == "fp8" and _may_copy_rows(parallel, records_graphs)
    return size > 1 and not (copies_rows and node_size() % size == 0)


def _copies(
    option: Literal["dp_transport", "tp_transport"], parallel: ParallelConfig, group: Group, device: torch.device
) -> bool:
    """Whether copy engines carry what ranks of `group` send each other; the same on all of them.

    Under `auto` they do, if a trial works on every rank, unless tensor parallelism has one launch queue: in that, a
    meeting of ranks would hold up the kernels behind it.
    """
    wanted = getattr(parallel, option)
    has_one_queue = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
    in_order = has_one_queue and parallel.tensor_model_parallel_size > 1
    if wanted == "nccl" or group.size() == 1 or (wanted == "auto" and in_order):
        return False
    obstacle = _obstacle(group, device)
    if obstacle is not None and wanted == "copy_engine":
        flag = option.replace("_", "-")
        raise TransportError(f"{option}(copy_engine) does not work here: {obstacle}; give --{flag} nccl")
    return obstacle is None


def _obstacle(group: Group, device: torch.device) -> str | None:
    """Why ranks of `group` cannot read each other's memory; the same on all of them."""
    if device.type != "cuda":
        return "it needs GPUs"
    ranks = torch.distributed.get_process_group_ranks(group)
    if len({rank // node_size() for rank in ranks}) > 1:
        return f"ranks {ranks} are on several nodes"
    reason = None
    try:
        copy_engine.allocate(_PROBE_BYTES, group, device)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
    reasons: list[str | None] = [None] * group.size()
    torch.distributed.all_gather_object(reasons, reason, group=group)
    obstacle = next((reason for reason in reasons if reason is not None), None)
    if obstacle is not None:
        copy_engine.forget_barrier(group)
    return obstacle
