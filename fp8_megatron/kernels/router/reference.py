"""The specification of how a router's logits become probabilities of experts, in plain PyTorch.

Scores are sigmoids of the logits, or softmax over experts. A token goes to the `top_k` experts with the largest ones;
of equal ones the first comes first. With groups, experts lie in groups of equal size side by side, and the choice is
among the `group_top_k` groups whose best top_k // group_top_k scores have the largest sums (DeepSeek-V3, arXiv
2412.19437, section 2.1.2).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..registration import operator

#: Added to sums of sigmoids before a division, as in megatron-core.
TINY = 1e-20


class Choice(NamedTuple):
    """How experts are chosen, and probabilities made.

    Attributes:
        top_k: experts of a token.
        is_sigmoid: what scores are; False: softmax.
        over_all: softmax over all experts; False: over the chosen ones.
        num_groups, group_top_k: 0 without groups.
        factor: of the probabilities.
    """

    top_k: int
    is_sigmoid: bool
    over_all: bool
    num_groups: int
    group_top_k: int
    factor: float


def _check(logits: Tensor, how: Choice) -> None:
    num_experts = logits.shape[-1]
    assert logits.ndim == 2 and logits.dtype in (torch.float32, torch.bfloat16), (logits.shape, logits.dtype)
    assert 0 < how.top_k <= num_experts < 2**15, (how, logits.shape)
    if how.num_groups:
        assert num_experts % how.num_groups == 0 and 0 < how.group_top_k <= how.num_groups, (how, logits.shape)
        size = num_experts // how.num_groups
        assert how.group_top_k <= how.top_k <= how.group_top_k * size, (how, logits.shape)


@operator(
    gpu=".triton",
    fake=lambda logits: (
        logits.new_empty(logits.shape, dtype=torch.float32),
        logits.new_empty(logits.shape, dtype=torch.bool),
    ),
    check=_check,
)
def choose_experts(logits: Tensor, bias: Tensor | None, how: Choice) -> tuple[Tensor, Tensor]:
    """Probabilities and choice of each token's experts.

    Args:
        logits: FP32 or BF16 [T, E].
        bias: FP32 [E], added to sigmoids for the choice alone (arXiv 2408.15664).

    Returns:
        FP32 [T, E], 0 for experts that are not chosen; and bool [T, E], `top_k` true in a row.
    """
    logits = logits.float()
    key = torch.sigmoid(logits) + bias if bias is not None else logits
    if how.num_groups:
        groups = (_group_scores(logits, key, how)).unflatten(1, (how.num_groups, -1))
        sums = _sorted(groups).values[..., : how.top_k // how.group_top_k].sum(dim=2)
        is_best = _first(sums, how.group_top_k).repeat_interleave(groups.shape[2], dim=1)
        key = key.masked_fill(~is_best, -torch.inf)
    chosen = _first(key, how.top_k)
    return _probabilities(logits, chosen, how) * how.factor, chosen


@operator(gpu=".triton", fake=lambda logits: logits.new_empty(logits.shape, dtype=torch.float32), check=_check)
def choose_experts_backward(logits: Tensor, chosen: Tensor, grad: Tensor, how: Choice) -> Tensor:
    """The gradient of the logits, FP32 [T, E], from that of the probabilities of `choose_experts`.

    Args:
        grad: FP32 [T, E].
    """
    logits = logits.float()
    probs = _probabilities(logits, chosen, how)
    grad = torch.where(chosen, grad, 0.0) * how.factor
    if not how.is_sigmoid:  # over all experts, those that are not chosen have a part in the sum
        shares = torch.softmax(logits, dim=1) if how.over_all else probs
        return shares * (grad - (probs * grad).sum(dim=1, keepdim=True))
    scores = torch.sigmoid(logits)
    if how.top_k > 1:  # p = s / Σ s
        total = torch.where(chosen, scores, 0.0).sum(dim=1, keepdim=True) + TINY
        grad = torch.where(chosen, grad - (probs * grad).sum(dim=1, keepdim=True), 0.0) / total
    return grad * scores * (1.0 - scores)


def _group_scores(logits: Tensor, key: Tensor, how: Choice) -> Tensor:
    """What groups are compared by, [T, E]."""
    if how.is_sigmoid:
        return key if key is not logits else torch.sigmoid(logits)
    return torch.softmax(logits, dim=1) if how.over_all else logits


def _probabilities(logits: Tensor, chosen: Tensor, how: Choice) -> Tensor:
    """[T, E] without the factor."""
    if how.is_sigmoid:
        scores = torch.where(chosen, torch.sigmoid(logits), 0.0)
        return scores / (scores.sum(dim=1, keepdim=True) + TINY) if how.top_k > 1 else scores
    if how.over_all:
        return torch.where(chosen, torch.softmax(logits, dim=1), 0.0)
    return torch.softmax(logits.masked_fill(~chosen, -torch.inf), dim=1)


def _sorted(x: Tensor) -> torch.return_types.sort:
    return x.sort(dim=-1, descending=True, stable=True)


def _first(x: Tensor, count: int) -> Tensor:
    """The map of the `count` largest of each row."""
    best = _sorted(x).indices[..., :count]
    return torch.zeros_like(x, dtype=torch.bool).scatter_(-1, best, value=True)
