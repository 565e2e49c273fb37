"""A function over chunks of tokens, forward and backward, and its parameters' gradients, added over them in FP32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .operands import delivered


def chunks(num_rows: int, rows: int) -> Iterator[slice]:
    """`rows` rows at a time of `num_rows`; the last chunk may be shorter."""
    return (slice(first, min(first + rows, num_rows)) for first in range(0, num_rows, rows))


def rows_of_chunk(num_rows: int, num_chunks: int, multiple: int = 1) -> int:
    """Rows of each of `num_chunks` chunks but the last, rounded up to a multiple."""
    return -(-num_rows // (num_chunks * multiple)) * multiple


def in_chunks(function: Callable[..., Tensor], x: Tensor, params: tuple[Tensor | None, ...], *, rows: int) -> Tensor:
    """``function(x, *params)`` [s, b, n] for `rows` of x [s, b, k] at a time. Backward computes each chunk again.

    Args:
        function: has no state; a second call with the same values gives the same bits.
        params: their gradients go through autograd.
    """
    return _InChunks.apply(function, x, rows, *params)


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], x: Tensor, rows: int, *params: Tensor | None) -> Tensor:
        ctx.function, ctx.rows, ctx.params = function, rows, params  # themselves, with their main gradients
        ctx.save_for_backward(x)
        with torch.no_grad():
            return torch.cat([function(x[own], *params) for own in chunks(x.shape[0], rows)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        grads = ChunkGrads(ctx.params, ctx.needs_input_grad[3:])
        for own in chunks(x.shape[0], ctx.rows):
            grad_x[own] = grads.of_chunk(ctx.function, x[own], grad[own])
        return None, grad_x, None, *grads.results()


class ChunkGrads:
    """The gradients of `params` over all chunks.

    Args:
        params: what the function of a chunk takes; None where it takes nothing.
        needed: whether each has a gradient.
    """

    def __init__(self, params: Sequence[Tensor | None], needed: Sequence[bool]) -> None:
        self._params = params
        self._wanted = [
            index
            for index, (param, needs) in enumerate(zip(params, needed, strict=True))
            if param is not None and needs
        ]
        self._totals: dict[int, Tensor] = {}

    def of_chunk(self, function: Callable[..., Tensor], x: Tensor, upstream: Tensor, *others: Tensor) -> Tensor:
        """Run ``function(x, *others, *params)``, add its gradients of the parameters, and return that of `x`.

        Args:
            upstream: the gradient of the function's result.
        """
        x = x.detach().requires_grad_()
        leaves = [None if param is None else param.detach().requires_grad_() for param in self._params]
        with torch.enable_grad():
            result = function(x, *others, *leaves)
        wanted = [leaf for index in self._wanted if (leaf := leaves[index]) is not None]
        grad_x, *grads = torch.autograd.grad(result, [x, *wanted], upstream)
        del result
        while grads:  # frees each before the next is added
            index, part = self._wanted[len(grads) - 1], grads.pop()
            self._totals[index] = part.float() if index not in self._totals else self._totals[index].add_(part)
            del part
        return grad_x

    def results(self) -> Iterator[Tensor | None]:
        """Each parameter's gradient for autograd; see `delivered` for vectors. Call it once."""
        for index, param in enumerate(self._params):
            grad = self._totals.pop(index, None)
            if param is None or grad is None:
                yield None
            else:
                # Autograd adds a matrix's to that of a tied embedding.
                yield delivered(grad, param) if param.dim() == 1 else grad.to(param.dtype)
