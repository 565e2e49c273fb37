"""Process groups: their name in annotations, and a scale that ranks share."""

from __future__ import annotations

import torch
from torch import Tensor

#: Ranks that call collectives together.
Group = torch.distributed.ProcessGroup


def max_over_group_(amax: Tensor, group: Group | None) -> None:
    """Raise `amax` (FP32, any shape) to its maximum over `group`, in place. A NaN on any rank may or may not spread;
    that rank's part is quantised to NaN in both cases.
    """
    if group is not None and group.size() > 1:
        torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX, group=group)
