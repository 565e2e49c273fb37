"""One block of 16-bit attention, forward and backward, with its log-sum-exp: PyTorch's kernels, or a dense
specification.

Blocks with other keys are merged by `merge_attention`. The backward of a block takes the merged output and log-sum-exp:
with them P = exp(Q·Kᵀ·c - L) are the probabilities of the whole row, and each block's gradients are summands
(FlashAttention-2, arXiv 2307.08691, section 3.1).

Tensors are [s, b, heads, d] with any strides over the first three dimensions. A group of query heads shares a head of
key and value.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

#: cudnn and flash are PyTorch's kernels on a GPU. dense computes all scores, on any device and in any dtype.
BlockKernel = Literal["cudnn", "flash", "dense"]

_aten = torch.ops.aten


def attention_block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool,
    scale: float,
    kernel: BlockKernel,
    allowed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(scale · QKᵀ)·V of the keys of one block.

    Args:
        query: [s, b, heads, d].
        key, value: [t, b, groups, d].
        causal: query i attends to the keys up to i; s = t. Otherwise to all.
        allowed: with `dense` alone, bool [b or 1, 1, s, t]: of these keys, those that a query attends to. None: all.

    Returns:
        The output [s, b, heads, d], and log Σ exp of the scaled scores FP32 [b, heads, s] (float64 for float64).
    """
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    if kernel == "cudnn":
        out, log_sum_exp = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, scale=scale)[:2]
    elif kernel == "flash":
        out, log_sum_exp = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[:2]
    else:
        out, log_sum_exp = _dense(q, k, v, _hidden(q, k, causal, allowed), scale)
    return out.permute(2, 0, 1, 3), log_sum_exp.reshape(out.shape[:3])


def attention_block_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sum_exp: Tensor,
    *,
    causal: bool,
    scale: float,
    kernel: BlockKernel,
    allowed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The block's summands of the gradients of query, key and value.

    Args:
        grad_out, out: [s, b, heads, d], of the whole rows. Both contiguous: cuDNN's plans are remembered by the strides
            of query, key and value alone.
        log_sum_exp: FP32 [b, heads, s], contiguous, of the whole rows.

    Returns:
        In the dtype of `query`: [s, b, heads, d], and two [t, b, groups, d].
    """
    assert grad_out.is_contiguous() and out.is_contiguous() and log_sum_exp.is_contiguous()
    q, k, v, o, grad = (x.permute(1, 2, 0, 3) for x in (query, key, value, out, grad_out))
    if kernel == "dense":
        grads = _dense_backward(grad, q, k, v, o, log_sum_exp, _hidden(q, k, causal, allowed), scale)
    else:
        operands, lengths = (grad, q, k, v, o), (q.shape[2], k.shape[2], 0.0, causal)
        no_seed = torch.empty(2, dtype=torch.int64, device=q.device)  # without dropout nobody reads it
        if kernel == "cudnn":
            grads = _aten._scaled_dot_product_cudnn_attention_backward(
                *operands, log_sum_exp[..., None], no_seed[0], no_seed[1], None, None, None, *lengths, scale=scale
            )
        else:
            grads = _aten._scaled_dot_product_flash_attention_backward(
                *operands, log_sum_exp, None, None, *lengths, no_seed, no_seed[0], scale=scale
            )
    grad_query, grad_key, grad_value = (x.permute(2, 0, 1, 3) for x in grads)
    return grad_query, grad_key, grad_value


def _dense(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """[b, heads, s, d] each, computed in FP32 or float64."""
    scores = _scores(_wide(q), _of_heads(_wide(k), q), hidden, scale)
    log_sum_exp = scores.logsumexp(dim=-1)
    return (torch.exp(scores - log_sum_exp[..., None]) @ _of_heads(_wide(v), q)).to(q.dtype), log_sum_exp


def _dense_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, log_sum_exp: Tensor, hidden: Tensor | None, scale: float
) -> list[Tensor]:
    dtype, groups = q.dtype, k.shape[1]
    grad, q, o = _wide(grad), _wide(q), _wide(o)
    k, v = _of_heads(_wide(k), q), _of_heads(_wide(v), q)
    probabilities = torch.exp(_scores(q, k, hidden, scale) - log_sum_exp[..., None])
    inner = (grad * o).sum(dim=-1, keepdim=True)
    grad_scores = probabilities * (grad @ v.transpose(-1, -2) - inner) * scale
    grads = grad_scores @ k, grad_scores.transpose(-1, -2) @ q, probabilities.transpose(-1, -2) @ grad
    of_groups = (x.unflatten(1, (groups, -1)).sum(dim=2) for x in grads[1:])
    return [x.to(dtype) for x in (grads[0], *of_groups)]


def _hidden(q: Tensor, k: Tensor, causal: bool, allowed: Tensor | None) -> Tensor | None:
    """The keys that a query does not see, for `masked_fill` of scores [b, heads, s, t]; None: it sees all."""
    hidden = None if allowed is None else ~allowed
    if not causal:
        return hidden
    is_later = torch.ones((q.shape[2], k.shape[2]), dtype=torch.bool, device=q.device).triu(1)
    return is_later if hidden is None else hidden | is_later


def _scores(q: Tensor, k: Tensor, hidden: Tensor | None, scale: float) -> Tensor:
    scores = q @ k.transpose(-1, -2) * scale
    return scores if hidden is None else scores.masked_fill(hidden, -math.inf)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _of_heads(x: Tensor, q: Tensor) -> Tensor:
    """A group's head, once for each of its query heads."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)
