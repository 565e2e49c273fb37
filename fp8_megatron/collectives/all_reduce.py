"""The FP8 all-reduce of gradients: the FP8 reduce-scatter, then an all-gather of the mean, quantised once more."""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import StorageDtype
from .all_gather import all_gather_into
from .reduce_scatter import reduce_scatter_mean
from .wire import WireTensor, shard_size


def all_reduce_mean_fp8(value: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
    """Mean of `value` over `group` with E4M3 on the wire: 2 · (d−1)/d bytes an element and 3% for scales.

    Called by every rank of `group` with a tensor of one size. A NaN or inf in any rank's block of 128 makes that block
    of the result NaN on every rank.

    Args:
        value: flat, any float dtype, [n].

    Returns:
        FP32 [n]; bitwise equal on every rank.
    """
    world = group.size()
    if world == 1:
        return value.float()
    numel = value.numel()
    shard = shard_size(numel, world)
    padded = torch.zeros(world * shard, dtype=torch.float32, device=value.device)
    padded[:numel] = value
    sent = WireTensor.empty(world * shard, StorageDtype.FP8, value.device)
    received = WireTensor.empty(world * shard, StorageDtype.FP8, value.device)
    sent.store_(padded)
    own = sent.slice(0, shard)
    own.store_(reduce_scatter_mean(sent, received, group).wait())
    gathers = [
        all_gather_into(full, part, group) for full, part in zip(received.byte_views(), own.byte_views(), strict=True)
    ]
    for gather in gathers:
        gather.wait()
    return received.load()[:numel]
