"""The loss over chunks of tokens, so that the logits of one chunk exist at a time.

Forward keeps no logits. Backward computes a chunk's logits again, makes its gradients from them and frees both. So the
head's GEMM runs once more. Gradients of parameters are added over chunks in FP32.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from .chunk_grads import ChunkGrads, chunks
from .first_order import once_differentiable


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
            for own in chunks(x.shape[0], rows):
                part = token_loss(x[own], _of_chunk(labels, own, ranks), *params)
                losses.view(ranks, -1, *labels.shape[1:])[:, own] = part.view(ranks, -1, *labels.shape[1:])
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, labels = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        grads = ChunkGrads(ctx.params, ctx.needs_input_grad[5:])
        for own in chunks(x.shape[0], ctx.rows):
            upstream, targets = (_of_chunk(values, own, ctx.ranks) for values in (grad, labels))
            grad_x[own] = grads.of_chunk(ctx.token_loss, x[own], upstream, targets)
        return None, grad_x, None, None, None, *grads.results()


def _of_chunk(values: Tensor, rows: slice, ranks: int) -> Tensor:
    """[r · rows, b]: `rows` of each rank's part of [s, b], in rank order."""
    parts = values.view(ranks, -1, *values.shape[1:])[:, rows]
    return parts.reshape(-1, *values.shape[1:])
