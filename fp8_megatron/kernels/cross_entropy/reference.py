"""The specification of cross-entropy over a sharded vocabulary, in plain PyTorch.

One pass over the logits gives the statistics from which the ranks compute log Σ exp. The gradient replaces the logits
in place, so nothing else of the logits' size is allocated.

The last columns may be padding of the vocabulary. They take no part in the softmax, and their gradient is zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...dtypes import FP8_DTYPES
from ..reference import encode
from ..registration import operator
from ..shapes import fp32, layouts

#: The scale of `cross_entropy_backward_quantize`'s payload beside those of `token_scales`: the label's −1 becomes −2¹⁵,
#: E5M2's largest power of two.
PAYLOAD_SCALE = 2.0**-15
#: The mean of E5M2(v) / v over evenly spread logarithms of v.
KEPT = 0.99722
#: The least 1 − p of a label. Smaller ones are sums of rounding errors.
LEAST = 2.0**-20


def columns_of(logits: Tensor, num_columns: int | None) -> int:
    """Columns of `logits` [T, V] that are no padding; None: all."""
    if num_columns is None:
        return logits.shape[1]
    assert 0 <= num_columns <= logits.shape[1], (num_columns, logits.shape)
    return num_columns


def _check_labels(logits: Tensor, labels: Tensor) -> None:
    assert logits.ndim == 2 and logits.is_contiguous(), (logits.shape, logits.stride())
    assert labels.shape == logits.shape[:1], (logits.shape, labels.shape)


@operator(gpu=".triton", fake=lambda logits: tuple(fp32(logits, len(logits)) for _ in range(3)), check=_check_labels)
def cross_entropy_statistics(
    logits: Tensor, labels: Tensor, *, first: int = 0, num_columns: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """For every row of `logits` [T, V]: its maximum m, Σ exp(logits − m), and the logit of the label; FP32 [T] each.

    Args:
        labels: int64 [T]. first: the label of the first column. A label outside [first, first + num_columns) is in
            another part of the vocabulary and gives 0.
        num_columns: 0 to V; None is V. Later columns are padding. Without any column, m is the lowest FP32 number and
            the sum 0, so that statistics of several ranks merge without a special case.
    """
    num_columns = columns_of(logits, num_columns)
    values = logits[:, :num_columns].float()
    lowest = torch.full((len(logits), 1), torch.finfo(torch.float32).min, device=logits.device)
    largest = torch.cat([values, lowest], dim=1).amax(dim=1)
    total = torch.exp(values - largest[:, None]).sum(dim=1)
    column = labels - first
    is_here = (column >= 0) & (column < num_columns)
    target = logits.gather(1, torch.where(is_here, column, 0)[:, None]).squeeze(1).float()
    return largest, total, torch.where(is_here, target, 0.0)


@operator(gpu=".triton", mutates=["logits"])
def cross_entropy_backward_(
    logits: Tensor, labels: Tensor, log_sum_exp: Tensor, grad: Tensor, *, first: int = 0, num_columns: int | None = None
) -> None:
    """Replace `logits` [T, V] by the gradient (exp(logits − log_sum_exp) − [column is the label]) · grad, in place.

    Args:
        labels, first: as in `cross_entropy_statistics`.
        log_sum_exp: FP32 [T], over the whole vocabulary. grad: FP32 [T], of each token's loss.
        num_columns: later columns are padding. Their gradient is 0, whatever `grad` is.
    """
    logits.copy_(_gradient(logits, labels, log_sum_exp, grad, first, num_columns))


def _check_tokens(log_sum_exp: Tensor, target: Tensor, upstream: Tensor) -> None:
    assert log_sum_exp.shape == target.shape == upstream.shape, (log_sum_exp.shape, target.shape, upstream.shape)
    assert upstream.dtype == torch.float32, upstream.dtype


@operator(
    gpu=".triton",
    fake=lambda upstream: (*(fp32(upstream, len(upstream)) for _ in range(2)), fp32(upstream, 1)),
    check=_check_tokens,
)
def token_scales(log_sum_exp: Tensor, target: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The scales of the logits' gradient: one for each token, upstream · (1 − p) with p = exp(target − log_sum_exp).

    See `nn.lm_head` for why. 1 − p counts as at least `LEAST`.

    Args:
        log_sum_exp, target: FP32 [T], over the whole vocabulary: log Σ exp, and the logit of the label.
        upstream: FP32 [T], the gradient of each token's loss.

    Returns:
        1 / (1 − p) / `KEPT` FP32 [T], which `cross_entropy_backward_quantize` multiplies the gradient by;
        the scales FP32 [T]; `PAYLOAD_SCALE` FP32 [1].
    """
    magnitude = torch.expm1(target - log_sum_exp).neg_().clamp_(min=LEAST)
    return (
        (magnitude * KEPT).reciprocal_(),
        magnitude * upstream,
        torch.full((1,), PAYLOAD_SCALE, device=upstream.device),
    )


def _check_cast(logits: Tensor, labels: Tensor, log_sum_exp: Tensor, grad: Tensor, dtype: torch.dtype) -> None:
    _check_labels(logits, labels)
    assert labels.shape == log_sum_exp.shape == grad.shape, (labels.shape, log_sum_exp.shape, grad.shape)
    assert grad.dtype == torch.float32 and dtype in FP8_DTYPES, (grad.dtype, dtype)


@operator(gpu=".triton", fake=lambda logits, dtype: layouts(logits, dtype), check=_check_cast)
def cross_entropy_backward_quantize(
    logits: Tensor,
    labels: Tensor,
    log_sum_exp: Tensor,
    grad: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    *,
    first: int = 0,
    num_columns: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradient of `cross_entropy_backward_` cast to FP8 in both layouts from one read of `logits` [T, V].

    Args:
        scale: FP32 [1]. dtype: E5M2, for its range: under a scale at which the label's element is 2¹⁵, its steps are
            relative down to 2⁻²⁹ of that.

    Returns:
        payload [T, V] and its transpose [V, T].
    """
    payload = encode(_gradient(logits, labels, log_sum_exp, grad, first, num_columns), scale, dtype)
    return payload, payload.t().contiguous()


def _gradient(
    logits: Tensor, labels: Tensor, log_sum_exp: Tensor, grad: Tensor, first: int, num_columns: int | None
) -> Tensor:
    """FP32 [T, V]."""
    probabilities = torch.exp(logits.float() - log_sum_exp[:, None])
    columns = torch.arange(logits.shape[1], device=logits.device)
    probabilities -= (columns[None, :] == (labels - first)[:, None]).float()
    return torch.where(columns < columns_of(logits, num_columns), probabilities * grad[:, None], 0.0)
