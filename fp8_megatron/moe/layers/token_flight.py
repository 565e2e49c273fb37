"""What crosses ranks in a call of experts that ranks share, on its way while the device computes something else.

If every rank gets every token, tokens leave before the router says where they go. Sums over a token's experts arrive
while a shared expert is computed, and in backward so does the gradient of those sums. Every rank starts and awaits
the same exchanges in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...collectives.row_exchange import Rows, RowSum
from ...formats.format import Quantized
from ...nn.first_order import once_differentiable
from ...nn.parallelism import PendingSum
from ...nn.rows import OperandRows
from .token_exchange import TokenExchange


class Flight:
    """The exchanges of one call. What is on its way is taken once.

    Attributes:
        exchange: how tokens travel.
        tokens: in FP8 this rank's, and the rows that its experts get; None: they have not left.
        rows: in 16 bits the rows that the experts get; None: they have not left.
        output: the sums over a token's experts.
        start_grad: sends the gradient [T, H] of the output to its experts; None: their backward does, because another
            exchange comes first.
        grad: that gradient, sent by `start_grad`.
    """

    def __init__(self, exchange: TokenExchange) -> None:
        self.exchange = exchange
        self.tokens: tuple[Quantized, OperandRows] | None = None
        self.rows: Rows | None = None
        self.output: RowSum | PendingSum | None = None
        self.start_grad: Callable[[Tensor], Any] | None = None
        self.grad: Any = None

    def take(self, name: str) -> Any:
        """What an attribute holds; it holds None from here on."""
        found = getattr(self, name)
        setattr(self, name, None)
        return found

    def stand_in(self, shape: torch.Size, like: Tensor) -> Tensor:
        """Stands for the `output`, of `shape` and the dtype of `like`, until `arrived`. It has no values."""
        return like.new_empty(()).expand(shape)

    def arrived(self, stand_in: Tensor) -> Tensor:
        """The output [T, H]."""
        output: Tensor = _Arrived.apply(stand_in, self)
        return output


class _Arrived(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stand_in: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        output: Tensor = flight.take("output").wait()
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        start = ctx.flight.take("start_grad")
        if start is not None:
            ctx.flight.grad = start(grad)
        return grad, None


def exchange_choices(probs: Tensor, routing_map: Tensor, exchange: TokenExchange) -> tuple[Tensor, Tensor]:
    """What routers say of this rank's experts, from [T, E] of its tokens to [R, E / parts] of those that it gets.

    Args:
        probs: FP32, not negative.
        routing_map: bool.
    """
    chosen: Tensor = _ExchangeChoices.apply(torch.where(routing_map, probs, -1.0), exchange)
    is_chosen = chosen >= 0.0
    return torch.where(is_chosen, chosen, 0.0), is_chosen


class _ExchangeChoices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chosen: Tensor, exchange: TokenExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.send_choices(chosen)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.sum_choices(grad), None


class SendTokens(torch.autograd.Function):
    """[T, H] → [R, H], as `TokenExchange.send`, in x's dtype; the rows of `flight` if they have left."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: Flight) -> Tensor:
        ctx.exchange = flight.exchange
        rows: Rows = flight.take("rows") or flight.exchange.send(x.contiguous())
        return rows.wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.sum(grad).wait(), None


class StartSum(torch.autograd.Function):
    """Starts the sums of y [R, H] over a token's experts, as `TokenExchange.sum`; returns what stands for them, of
    `shape` [T, H]."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, shape: torch.Size, flight: Flight) -> Tensor:
        ctx.flight = flight
        flight.output = flight.exchange.sum(y)
        flight.start_grad = lambda grad: flight.exchange.send(grad.contiguous())
        return flight.stand_in(shape, y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        sent: Rows = ctx.flight.take("grad") or ctx.flight.exchange.send(grad.contiguous())
        return sent.wait(), None, None
