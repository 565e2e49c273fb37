"""The language-model loss over a vocabulary that tensor-parallel ranks share.

Ranks exchange three numbers a token. Backward turns the logits into their gradient in place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..device.group import Group
from ..kernels import ops


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, group: Group | None) -> Tensor:
    """−log softmax(logits)[label] of every token. Backward overwrites the logits.

    Args:
        logits: BF16 [..., V / tp], this rank's columns. labels: int64 [...], over the whole vocabulary.
        group: tensor-parallel ranks in the order of their columns; None for a single rank.

    Returns:
        FP32 [...], equal on all ranks of the group.
    """
    return _VocabParallelCrossEntropy.apply(logits, labels, group)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: Group | None) -> Tensor:
        flat = logits.view(-1, logits.shape[-1])
        local = local_labels(labels, flat.shape[1], group)
        log_sum_exp, target = agree_on_statistics(*ops.cross_entropy_statistics(flat, local), group)
        ctx.save_for_backward(flat, local, log_sum_exp)
        ctx.shape = logits.shape
        return (log_sum_exp - target).view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, local, log_sum_exp = ctx.saved_tensors
        ops.cross_entropy_backward_(logits, local, log_sum_exp, grad.reshape(-1).contiguous())
        return logits.view(ctx.shape), None, None


def local_labels(labels: Tensor, num_columns: int, group: Group | None) -> Tensor:
    """int64 [tokens], counted from this rank's first column."""
    flat = labels.reshape(-1)
    return flat if group is None or group.size() == 1 else flat - group.rank() * num_columns


def agree_on_statistics(largest: Tensor, total: Tensor, target: Tensor, group: Group | None) -> tuple[Tensor, Tensor]:
    """log Σ exp and the label's logit over the whole vocabulary, FP32 [tokens] each.

    Args:
        largest, total, target: `ops.cross_entropy_statistics` of this rank's columns.
        group: the ranks that share the vocabulary; all of them call this. One all-reduce is a MAX, one a SUM.
    """
    if group is not None and group.size() > 1:
        highest = largest.clone()
        torch.distributed.all_reduce(highest, op=torch.distributed.ReduceOp.MAX, group=group)
        sums = torch.stack([total * torch.exp(largest - highest), target])
        torch.distributed.all_reduce(sums, group=group)
        largest, (total, target) = highest, sums
    return largest + torch.log(total), target
