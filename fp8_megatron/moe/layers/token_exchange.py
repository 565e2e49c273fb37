"""Tokens of ranks that share experts, on their way to the experts' ranks and back.

[T, K] are this rank's tokens, [R, K] those that its experts get, by the rank that they come from. With `AllGather`
these are all ranks' tokens, and the host knows every size. With `AllToAll` a token goes once to each rank that has
experts of it, so the host waits for the numbers of tokens.

Where one of two routines would wait (`Turns`), the other one runs: once for tokens and what routers say of them, once
for sums, and likewise in backward. The gradient of what routers say is small, and comes when a turn is just over. Two
exchanges of a kind may be on their way, in memory of their own; copy engines' rings have no room for them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from ...collectives.row_exchange import Rows, RowSum, gather_rows, sum_rows
from ...collectives.turns import Turns
from ...device.group import Group
from ...device.memory import HostCopy
from ...dtypes import GROUP_ROWS
from ...kernels import ops


class TokenExchange(Protocol):
    """The exchange of one call of a layer's experts. Every rank of `group` calls the same methods in the same order."""

    group: Group

    @property
    def num_routed(self) -> int | None:
        """Pairs of a token and an expert that this rank computes; None: the host does not know them."""

    def send(self, x: Tensor) -> Rows:
        """Start to send [T, K], contiguous, of any dtype; a row has a multiple of 8 bytes. The rows [R, K] may lie in
        reused memory: read all of them before the next `send`."""

    def sum(self, y: Tensor) -> RowSum:
        """Start to return [R, K]; the result is each token's sum [T, K] over ranks, contiguous."""

    def send_choices(self, chosen: Tensor) -> Tensor:
        """From [T, E] to [R, E/parts], the columns of this rank's experts; -1 in rows that belong to no token."""

    def sum_choices(self, grad: Tensor) -> Tensor:
        """From [R, E/parts] to [T, E], where ranks that have parts of the same experts add up theirs."""


class AllGather:
    """Every rank gets every token.

    Args:
        group: the ranks. Those of one part follow each other.
        num_parts: parts of the experts. Ranks of one part share each of its experts, and their gradients are summed.
        turns: who else may run while this exchange is under way; None: nobody.
    """

    num_routed: int | None = None

    def __init__(self, group: Group, num_parts: int, turns: Turns | None = None) -> None:
        self.group, self._num_parts, self._turns = group, num_parts, turns or Turns()

    def send(self, x: Tensor) -> Rows:
        """See `TokenExchange.send`."""
        rows, turn = gather_rows(x, self.group), self._turns.exchange()
        return replace(rows, complete=[turn, *rows.complete])

    def sum(self, y: Tensor) -> RowSum:
        """See `TokenExchange.sum`; a sum is rounded as `row_exchange.sum_rows` says."""

        def write(rows: slice, out: Tensor, adds_bias: bool) -> None:
            out.copy_(y[rows])

        total = sum_rows(write, (y.shape[0], y.shape[1]), y.dtype, y.device, self.group)
        turn = self._turns.exchange()

        def arrive() -> Tensor:
            turn.wait()
            return total.arrive()

        return RowSum(arrive)

    def send_choices(self, chosen: Tensor) -> Tensor:
        """See `TokenExchange.send_choices`."""
        parts = chosen.view(len(chosen), self._num_parts, -1).transpose(0, 1)
        received, work = self._start(parts.repeat_interleave(self.group.size() // self._num_parts, dim=0))
        self._turns.exchange().wait()
        work.wait()
        return received.flatten(0, 1)

    def sum_choices(self, grad: Tensor) -> Tensor:
        """See `TokenExchange.sum_choices`."""
        of_ranks, work = self._start(grad.view(self.group.size(), -1, grad.shape[1]))
        work.wait()
        return of_ranks.unflatten(0, (self._num_parts, -1)).sum(dim=1).transpose(0, 1).flatten(1)

    def _start(self, parts: Tensor) -> tuple[Tensor, torch.distributed.Work]:
        """Start to send part r of this rank to rank r; and what is received."""
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        work: torch.distributed.Work = torch.distributed.all_to_all_single(
            received, parts, group=self.group, async_op=True
        )
        return received, work


class AllToAll:
    """Every rank gets the tokens of its experts, each once.

    The numbers of tokens are on their way when this returns. The host waits for them where it first needs one, once for
    forward and backward. Received rows are filled up to a multiple of `GROUP_ROWS`, so that kernels see few shapes;
    what the last rows hold means nothing.

    Args:
        routing_map: bool [T, E], which experts a token goes to.
        group, num_parts, turns: as `AllGather`.
        top_k: experts of a token.
    """

    def __init__(
        self, routing_map: Tensor, group: Group, num_parts: int, top_k: int, turns: Turns | None = None
    ) -> None:
        self.group, self._num_parts, self._num_tokens, self._top_k = group, num_parts, len(routing_map), top_k
        self._turns = turns or Turns()
        of_parts = routing_map.view(self._num_tokens, num_parts, -1).sum(dim=2)
        chosen = of_parts.t().repeat_interleave(group.size() // num_parts, dim=0)  # experts of a rank [ranks, T]
        self._goes = chosen > 0
        sent = torch.stack([self._goes.sum(dim=1), chosen.sum(dim=1)], dim=1)
        arriving = torch.empty_like(sent)
        torch.distributed.all_to_all_single(arriving, sent, group=group)
        self._counts = HostCopy(torch.cat([sent[:, 0], arriving.t().flatten()]))

    @cached_property
    def _sizes(self) -> tuple[list[int], list[int], int]:
        """Tokens that go to each rank and come from it, and `num_routed`. Without values all ranks get equally many."""
        num_ranks, num_parts = self.group.size(), self._num_parts
        if self._goes.is_meta:
            each = [self._num_tokens * min(self._top_k, num_parts) // num_parts] * num_ranks
            return each, each, self._num_tokens * self._top_k * num_ranks // num_parts
        counts = [int(count) for count in self._counts.read()]  # waits: they are sizes of memory
        return counts[:num_ranks], counts[num_ranks : 2 * num_ranks], sum(counts[2 * num_ranks :])

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor]:
        """Of a sent row rank · T + token, int64 [S]; of a token and a rank the sent row, or -1, int32 [T, ranks]."""
        goes, num_sent = self._goes.flatten(), sum(self._sizes[0])
        row = goes.cumsum(dim=0) - 1
        place = torch.where(goes, row, num_sent)  # all others share one place behind them
        source = row.new_empty(num_sent + 1).scatter_(0, place, torch.arange(len(goes), device=row.device))
        rows = torch.where(goes, row, -1).view(self._goes.shape)
        return source[:num_sent], rows.t().int().contiguous()

    @property
    def num_routed(self) -> int | None:
        """See `TokenExchange.num_routed`."""
        return self._sizes[2]

    def send(self, x: Tensor) -> Rows:
        """See `TokenExchange.send`."""
        sent, received, _ = self._sizes
        rows = x.view(torch.int64)[self._places[0] % self._num_tokens]  # eight bytes at once
        whole = x.new_empty((_padded(sum(received)), x.shape[1]))
        work = self._start(whole, received, rows, sent)
        return Rows(whole, [(slice(0, len(whole)), whole, work)], [self._turns.exchange(), work])

    def sum(self, y: Tensor) -> RowSum:
        """See `TokenExchange.sum`; FP32, in the order of ranks, rounded once."""
        returned, work = self._start_return(y)
        turn = self._turns.exchange()

        def arrive() -> Tensor:
            turn.wait()
            work.wait()
            return ops.sum_rows(returned, self._places[1]).unsqueeze(0)

        return RowSum(arrive)

    def send_choices(self, chosen: Tensor) -> Tensor:
        """See `TokenExchange.send_choices`."""
        sent, received, _ = self._sizes
        source, num_parts = self._places[0], self._num_parts
        token, rank = source % self._num_tokens, source // self._num_tokens
        part = rank // (self.group.size() // num_parts)
        of_parts = chosen.reshape(self._num_tokens * num_parts, -1)
        arrived = of_parts.new_full((_padded(sum(received)), of_parts.shape[1]), -1.0)
        work = self._start(arrived, received, of_parts[token * num_parts + part], sent)
        self._turns.exchange().wait()
        work.wait()
        return arrived

    def sum_choices(self, grad: Tensor) -> Tensor:
        """See `TokenExchange.sum_choices`."""
        returned, work = self._start_return(grad)
        work.wait()
        rows = self._places[1].unsqueeze(2)
        of_ranks = torch.where(rows < 0, 0.0, returned[rows.squeeze(2).clamp(min=0)])
        return of_ranks.view(self._num_tokens, self._num_parts, -1, grad.shape[1]).sum(dim=2).flatten(1)

    def _start_return(self, y: Tensor) -> tuple[Tensor, torch.distributed.Work]:
        """The rows [S, K] that come back, at least one, from [R, K]."""
        sent, received, _ = self._sizes
        returned = y.new_empty((max(sum(sent), 1), y.shape[1]))
        return returned, self._start(returned, sent, y.contiguous(), received)

    def _start(self, out: Tensor, received: list[int], rows: Tensor, sent: list[int]) -> torch.distributed.Work:
        """Start to send so many `rows` to each rank; those that are received are the first of `out`."""
        target, source = (tensor[: sum(sizes)].view(torch.uint8) for tensor, sizes in ((out, received), (rows, sent)))
        work: torch.distributed.Work = torch.distributed.all_to_all_single(
            target, source, received, sent, group=self.group, async_op=True
        )
        return work


def _padded(num_rows: int) -> int:
    """At least one group of rows."""
    return max(-(-num_rows // GROUP_ROWS), 1) * GROUP_ROWS
