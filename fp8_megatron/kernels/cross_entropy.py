"""The specification of cross-entropy over a sharded vocabulary, in plain PyTorch.

One pass over the logits gives what the ranks need to agree on log Σ exp; the gradient replaces the logits in place, so
that nothing of the size of the logits is allocated beside them.
"""

from __future__ import annotations

import torch
from torch import Tensor


def cross_entropy_statistics(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of every row of `logits` [T, V]: its maximum m, Σ exp(logits − m), and the logit of the label; FP32 [T] each.

    Args:
        labels: int64 [T], counted from this rank's first column; one outside [0, V) is another rank's and gives 0.
    """
    values = logits.float()
    largest = values.amax(dim=1)
    total = torch.exp(values - largest[:, None]).sum(dim=1)
    is_here = (labels >= 0) & (labels < logits.shape[1])
    target = values.gather(1, torch.where(is_here, labels, 0)[:, None]).squeeze(1)
    return largest, total, torch.where(is_here, target, 0.0)


def cross_entropy_backward_(logits: Tensor, labels: Tensor, log_sum_exp: Tensor, grad: Tensor) -> None:
    """Replace `logits` [T, V] by the gradient (exp(logits − log_sum_exp) − [column is the label]) · grad, in place.

    Args:
        log_sum_exp: FP32 [T], over the whole vocabulary. grad: FP32 [T], of each token's loss.
    """
    probabilities = torch.exp(logits.float() - log_sum_exp[:, None])
    columns = torch.arange(logits.shape[1], device=logits.device)
    probabilities -= (columns[None, :] == labels[:, None]).float()
    logits.copy_(probabilities * grad[:, None])
