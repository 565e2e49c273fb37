"""The loss over chunks of tokens, so that the logits of one chunk exist at a time.

Forward keeps no logits. Backward computes a chunk's logits again, makes its gradients from them and frees both. So the
head's GEMM runs once more. Gradients of parameters are added over chunks in FP32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .operands import delivered


class TokenLoss(Protocol):
    """The loss of each token of a chunk."""

    def __call__(self, x: Tensor, labels: Tensor, *params: Tensor | None) -> Tensor:
        """x [s/r, b, h], labels [s, b] and the parameters that have a gradient → FP32 [s, b].

        A second call with the same values gives the same bits.
        """


def loss_in_chunks(
    token_loss: TokenLoss, x: Tensor, labels: Tensor, params: tuple[Tensor | None, ...], *, chunk: int, ranks: int = 1
) -> Tensor:
    """`token_loss` of all tokens, FP32 [s, b], computed for `chunk` positions of each sequence at a time.

    Args:
        x: [s/r, b, h]; every rank that shares the sequence has one consecutive part of it.
        labels: int64 [s, b].
        params: what `token_loss` takes. Their gradients go through autograd.
        chunk: positions, a multiple of `ranks`; the last chunk may be shorter.
        ranks: r, the ranks whose parts `token_loss` gathers in rank order. A chunk then has as many positions of each.
    """
    return _LossInChunks.apply(token_loss, x, labels, chunk // ranks, ranks, *params)


class _LossInChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, token_loss: TokenLoss, x: Tensor, labels: Tensor, rows: int, ranks: int, *params: Tensor | None
    ) -> Tensor:
        ctx.token_loss, ctx.rows, ctx.ranks = token_loss, rows, ranks
        ctx.save_for_backward(x, labels)
        ctx.params = params  # themselves, with their main gradients
        losses = torch.empty(labels.shape, dtype=torch.float32, device=x.device)
        with torch.no_grad():
            for own in _chunks(x.shape[0], rows):
                part = token_loss(x[own], _of_chunk(labels, own, ranks), *params)
                losses.view(ranks, -1, *labels.shape[1:])[:, own] = part.view(ranks, -1, *labels.shape[1:])
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, labels), params = ctx.saved_tensors, ctx.params
        grad_x = torch.empty_like(x)
        wanted = [index for index, param in enumerate(params) if param is not None and ctx.needs_input_grad[5 + index]]
        totals: dict[int, Tensor] = {}
        for own in _chunks(x.shape[0], ctx.rows):
            chunk = x[own].detach().requires_grad_()
            leaves = [None if param is None else param.detach().requires_grad_() for param in params]
            with torch.enable_grad():
                loss = ctx.token_loss(chunk, _of_chunk(labels, own, ctx.ranks), *leaves)
            upstream = _of_chunk(grad, own, ctx.ranks)
            of_chunk, *of_params = torch.autograd.grad(loss, [chunk, *(leaves[index] for index in wanted)], upstream)
            grad_x[own] = of_chunk
            del loss, of_chunk, chunk
            while of_params:  # frees each before the next is added
                index, part = wanted[len(of_params) - 1], of_params.pop()
                totals[index] = part.float() if index not in totals else totals[index].add_(part)
                del part
        return (
            None,
            grad_x,
            None,
            None,
            None,
            *(_of_param(param, totals.pop(i, None)) for i, param in enumerate(params)),
        )


def _chunks(num_rows: int, rows: int) -> Iterator[slice]:
    """Each chunk's rows of a rank's part."""
    return (slice(first, min(first + rows, num_rows)) for first in range(0, num_rows, rows))


def _of_param(param: Tensor | None, grad: Tensor | None) -> Tensor | None:
    """The gradient for autograd, which adds a matrix's to that of a tied embedding."""
    if param is None or grad is None:
        return None
    return delivered(grad, param) if param.dim() == 1 else grad.to(param.dtype)


def _of_chunk(values: Tensor, rows: slice, ranks: int) -> Tensor:
    """[r · rows, b]: `rows` of each rank's part of [s, b], in rank order."""
    parts = values.view(ranks, -1, *values.shape[1:])[:, rows]
    return parts.reshape(-1, *values.shape[1:])
