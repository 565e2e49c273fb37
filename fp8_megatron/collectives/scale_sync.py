"""Scales shared by a group: ranks that hold parts of one tensor agree on its amax."""

from __future__ import annotations

import torch
from torch import Tensor

from ..device.group import Group
from .traffic import TrafficKind, count_all_reduce


def max_over_group_(amax: Tensor, group: Group | None) -> None:
    """Raise `amax` (FP32, any shape) to its maximum over `group`, in place. A NaN on any rank may or may not spread;
    that rank's part is quantised to NaN in both cases.
    """
    if group is not None and group.size() > 1:
        count_all_reduce(TrafficKind.SCALE_SYNC, amax.nbytes, group.size())
        torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX, group=group)
