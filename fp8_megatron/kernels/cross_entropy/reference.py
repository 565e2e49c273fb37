"""The specification of cross-entropy over a sharded vocabulary, in plain PyTorch.

One pass over the logits gives the statistics from which the ranks compute log Σ exp. The gradient replaces the logits
in place, so nothing else of the logits' size is allocated.

The last columns may be padding of the vocabulary. They take no part in the softmax, and their gradient is zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..reference import amax, encode, scale_from_amax
from ..registration import operator
from ..shapes import fp32, layouts, taken_scale


@operator(gpu=".triton", fake=lambda a: tuple(fp32(a.logits, len(a.logits)) for _ in range(3)))
def cross_entropy_statistics(logits: Tensor, labels: Tensor, num_columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """For every row of `logits` [T, V]: its maximum m, Σ exp(logits − m), and the logit of the label; FP32 [T] each.

    Args:
        labels: int64 [T], counted from this rank's first column. A label outside [0, num_columns) is another rank's
            and gives 0.
        num_columns: 0 to V. Later columns are padding. Without any column, m is the lowest FP32 number and the sum 0,
            so that statistics of several ranks merge without a special case.
    """
    values = logits[:, :num_columns].float()
    lowest = torch.full((len(logits), 1), torch.finfo(torch.float32).min, device=logits.device)
    largest = torch.cat([values, lowest], dim=1).amax(dim=1)
    total = torch.exp(values - largest[:, None]).sum(dim=1)
    is_here = (labels >= 0) & (labels < num_columns)
    target = logits.gather(1, torch.where(is_here, labels, 0)[:, None]).squeeze(1).float()
    return largest, total, torch.where(is_here, target, 0.0)


@operator(gpu=".triton", mutates=["logits"])
def cross_entropy_backward_(
    logits: Tensor, labels: Tensor, log_sum_exp: Tensor, grad: Tensor, num_columns: int
) -> None:
    """Replace `logits` [T, V] by the gradient (exp(logits − log_sum_exp) − [column is the label]) · grad, in place.

    Args:
        log_sum_exp: FP32 [T], over the whole vocabulary. grad: FP32 [T], of each token's loss.
        num_columns: later columns are padding. Their gradient is 0, whatever `grad` is.
    """
    logits.copy_(_gradient(logits, labels, log_sum_exp, grad, num_columns))


@operator(gpu=".triton", fake=lambda a: (*layouts(a.logits, a.dtype), taken_scale(a.logits, a.scale)))
def cross_entropy_backward_quantize(
    logits: Tensor,
    labels: Tensor,
    log_sum_exp: Tensor,
    grad: Tensor,
    dtype: torch.dtype,
    scale: Tensor | None,
    power_of_two: bool,
    num_columns: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of `cross_entropy_backward_` cast to FP8 in both layouts from one read of `logits` [T, V].

    Args:
        dtype: E5M2, for the range that a given `scale` or the bound below needs.
        scale: FP32 [1]; None takes one from the largest magnitude of `grad`. A probability minus 1 or 0 is at most 1 in
            magnitude, so this bounds the gradient, and no pass over the logits is needed for its amax. If the bound is
            never reached, a floating-point format only loses range at its lower end. E5M2's steps stay relative down to
            2⁻²⁹·⁸ of the bound. Only probabilities below 2⁻³²·⁸ become zero; 50,304 of these sum to less than 10⁻⁵.

    Returns:
        payload [T, V], its transpose [V, T], the scale taken FP32 [1] (empty if it was given).
    """
    taken = scale_from_amax(amax(grad), dtype, power_of_two=power_of_two) if scale is None else None
    used = scale if scale is not None else taken
    assert used is not None
    payload = encode(_gradient(logits, labels, log_sum_exp, grad, num_columns), used, dtype)
    return payload, payload.t().contiguous(), used.new_empty(0) if taken is None else taken


def _gradient(logits: Tensor, labels: Tensor, log_sum_exp: Tensor, grad: Tensor, num_columns: int) -> Tensor:
    """FP32 [T, V]."""
    probabilities = torch.exp(logits.float() - log_sum_exp[:, None])
    columns = torch.arange(logits.shape[1], device=logits.device)
    probabilities -= (columns[None, :] == labels[:, None]).float()
    return torch.where(columns < num_columns, probabilities * grad[:, None], 0.0)
