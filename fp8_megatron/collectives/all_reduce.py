"""The FP8 all-reduce of gradients: the FP8 reduce-scatter, then an all-gather of the mean, quantised once more."""

from __future__ import annotations

import torch
from torch import Tensor

from .reduce_scatter import reduce_scatter_mean_fp8
from .wire import pack, unpack


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
    mean = reduce_scatter_mean_fp8(value, group).wait()
    sent = pack(mean.view(1, -1))
    received = sent.new_empty((world, sent.shape[1]))
    torch.distributed.all_gather_into_tensor(received, sent, group=group)
    return unpack(received, mean.numel()).view(-1)[: value.numel()]
