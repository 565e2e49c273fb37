"""How bytes travel between ranks: through NCCL (gloo on a CPU), or by the copy engines inside a node.

Between replicas the memory decides: the collectives move buffers of `SendMemory` accordingly
(`collectives.transport.copy_engine`). Between tensor-parallel ranks the group decides (`collectives.row_exchange`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..collectives import row_exchange
from ..collectives.transport import copy_engine
from ..device.device import node_size
from ..device.group import Group
from ..errors import UserError

_PROBE_BYTES = 1024


class TransportError(UserError):
    """The requested transport does not work between these ranks."""


@dataclass(frozen=True)
class TransportChoice:
    """Which transports may carry bytes between the ranks of a group.

    Attributes:
        wanted: nccl; copy_engine; or auto: copy engines if a trial works on every rank.
        setting: the name under which the user chose it, for errors.
        launches_in_order: kernels of all streams run in the order of their launch. Then auto means nccl: ranks that
            wait for each other would delay every kernel launched later.
    """

    wanted: Literal["auto", "nccl", "copy_engine"] = "auto"
    setting: str = "transport"
    launches_in_order: bool = False


@dataclass(frozen=True)
class SendMemory:
    """Allocates the memory from which a rank sends to a group.

    Attributes:
        group: ranks of one node that copy from each other's memory; None: plain memory.
    """

    device: torch.device
    group: Group | None = None

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeros [numel]. Shared memory is never freed, and every rank of the group allocates it in the same order."""
        if self.group is None:
            return torch.zeros(numel, dtype=dtype, device=self.device)
        return copy_engine.allocate(numel * dtype.itemsize, self.group, self.device).view(dtype)


def send_memory(choice: TransportChoice, group: Group, device: torch.device) -> SendMemory:
    """Memory to send from to `group`; called by every rank of it.

    Raises:
        TransportError: copy_engine was asked for and does not work here, with the reason.
    """
    return SendMemory(device, group if _copies(choice, group, device) else None)


def share_rows(choice: TransportChoice, group: Group, device: torch.device) -> None:
    """Let copy engines carry activations between the ranks of a tensor-parallel `group`, where `choice` says so.

    Raises:
        TransportError: as `send_memory`.
    """
    if _copies(choice, group, device):
        row_exchange.share_memory(group, device)


def _copies(choice: TransportChoice, group: Group, device: torch.device) -> bool:
    """Whether copy engines carry what ranks of `group` send each other; the same on all of them."""
    wanted = choice.wanted
    if wanted == "nccl" or group.size() == 1 or (wanted == "auto" and choice.launches_in_order):
        return False
    obstacle = _obstacle(group, device)
    if obstacle is not None and wanted == "copy_engine":
        flag = choice.setting.replace("_", "-")
        raise TransportError(f"{choice.setting}(copy_engine) does not work here: {obstacle}; give --{flag} nccl")
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
