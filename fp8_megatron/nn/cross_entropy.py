"""The language-model loss over 16-bit logits, whose vocabulary tensor-parallel ranks may share.

Nothing of the logits' size is made but their gradient, which takes their place where nobody else has them. Ranks
exchange three numbers a token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..device.group import Group
from ..kernels import ops
from .first_order import once_differentiable


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, group: Group | None, vocab_size: int | None = None, *, keeps_logits: bool = False
) -> Tensor:
    """−log softmax(logits)[label] of every token.

    Args:
        logits: BF16 [..., V / tp], this rank's columns. labels: int64 [...], over the whole vocabulary.
        group: tensor-parallel ranks in the order of their columns; None for a single rank.
        vocab_size: tokens of the vocabulary. Columns from here on are padding: they take no part in the softmax and get
            the gradient 0. None: no padding.
        keeps_logits: backward leaves the logits as they are; otherwise it overwrites them with their gradient.

    Returns:
        FP32 [...], equal on all ranks of the group.
    """
    return _VocabParallelCrossEntropy.apply(logits, labels, group, vocab_size, keeps_logits)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, group: Group | None, vocab_size: int | None, keeps_logits: bool
    ) -> Tensor:
        flat = logits.view(-1, logits.shape[-1])
        flat_labels, first = labels.reshape(-1), first_column(flat.shape[1], group)
        num_columns = local_columns(vocab_size, flat.shape[1], group)
        statistics = ops.cross_entropy_statistics(flat, flat_labels, first=first, num_columns=num_columns)
        log_sum_exp, target = agree_on_statistics(*statistics, group)
        ctx.save_for_backward(flat, flat_labels, log_sum_exp)
        ctx.shape, ctx.first, ctx.num_columns, ctx.keeps_logits = logits.shape, first, num_columns, keeps_logits
        return (log_sum_exp - target).view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, log_sum_exp = ctx.saved_tensors
        upstream = grad.reshape(-1).contiguous()
        if ctx.keeps_logits:
            logits = logits.clone()
        ops.cross_entropy_backward_(logits, labels, log_sum_exp, upstream, first=ctx.first, num_columns=ctx.num_columns)
        return logits.view(ctx.shape), None, None, None, None


def first_column(num_columns: int, group: Group | None) -> int:
    """The vocabulary's index of the first of this rank's `num_columns` columns."""
    return 0 if group is None or group.size() == 1 else group.rank() * num_columns


def local_columns(vocab_size: int | None, num_columns: int, group: Group | None) -> int:
    """How many of this rank's `num_columns` columns hold tokens; the later ones are padding.

    Args:
        vocab_size: tokens of the whole vocabulary; None: no padding.
    """
    if vocab_size is None:
        return num_columns
    return min(max(vocab_size - first_column(num_columns, group), 0), num_columns)


def fill_padding(logits: Tensor, vocab_size: int, group: Group | None) -> Tensor:
    """`logits` [..., V / tp] with the padding columns at the lowest finite number, in place, for another loss.

    A softmax gives them the probability 0, and so the gradient 0.

    Args:
        vocab_size: tokens of the whole vocabulary. group: as in `vocab_parallel_cross_entropy`.
    """
    num_columns = local_columns(vocab_size, logits.shape[-1], group)
    return logits if num_columns == logits.shape[-1] else _FillPadding.apply(logits, num_columns)


class _FillPadding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, num_columns: int) -> Tensor:
        logits[..., num_columns:].fill_(torch.finfo(logits.dtype).min)
        ctx.mark_dirty(logits)
        return logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None  # zero in the padding


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
