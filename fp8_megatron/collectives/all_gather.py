"""All-gather of FP8 payloads: bytes on the wire, on NCCL and on gloo (which refuses float8)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class AllGatherWork:
    """Handle of `all_gather_fp8`; `wait` returns the gathered payload."""

    output: Tensor
    work: torch.distributed.Work | None

    def wait(self) -> Tensor:
        """Wait for the bytes; on CUDA the current stream waits, not the host."""
        if self.work is not None:
            self.work.wait()
        return self.output


def all_gather_fp8(payload: Tensor, group: torch.distributed.ProcessGroup) -> AllGatherWork:
    """Start an all-gather of FP8 payloads along the first dimension.

    Called by every rank of `group` with a payload of one shape and one (shared) scale.

    Args:
        payload: FP8 [n, ...], contiguous.

    Returns:
        A handle whose `wait` gives [n · world, ...], in rank order.
    """
    output = payload.new_empty((payload.shape[0] * group.size(), *payload.shape[1:]))
    work = torch.distributed.all_gather_into_tensor(
        output.view(torch.uint8), payload.view(torch.uint8), group=group, async_op=True
    )
    return AllGatherWork(output, work)
