"""Causal attention over sequences that several ranks share (context parallelism).

Rank r of n has chunks r and 2n - 1 - r of c tokens each (`data.document_bounds`). Its queries attend in blocks:

- to its own tokens: causal, 2c × 2c, because the second chunk comes after the first;
- to the first chunk of each rank below it: all 2c queries, without a mask;
- to both chunks of each rank above it: the c queries of its second chunk, without a mask.

Every rank so computes the same, and no block computes scores that the mask drops. Outputs are merged by their
log-sum-exp (`kernels.ops.merge_attention`). Backward calls each block's backward with the merged output and
log-sum-exp.

With ``all_gather`` a rank fetches all keys and values that it needs at once, while it computes the first block. The
blocks of the ranks below it are one, and so are those of the ranks above it. With ``p2p`` whole parts go round a ring,
the next one while a block is computed. Both fetch again in backward, and keep only this rank's query, key,
value, output and log-sum-exp. Gradients of keys and values return in 16 bits from ``all_gather``, and are added up in
FP32 on the rank that owns them; round the ring they travel as FP32 sums. ``all_gather`` may send FP8; a rank's own keys
and values stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..collectives.context_exchange import Gathering, Returning, RingStep
from ..device.group import Group
from ..kernels import ops
from .attention_sinks import sink_gradient, with_sinks
from .first_order import once_differentiable

CommType = Literal["p2p", "all_gather"]

#: Outputs, or gradients of query, that are held before they become one FP32 sum: a kernel adds as many.
_MOST_HELD = 4


class ContextParallel(NamedTuple):
    """How the ranks that share a sequence attend.

    Attributes:
        group: the ranks, at least two.
        comm_type: how keys and values travel.
        scale: the factor of the scores.
        kernel: what computes a block.
        wire: with ``all_gather``, the FP8 format in which keys, values and their gradients travel; None: their dtype.
    """

    group: Group
    comm_type: CommType
    scale: float
    kernel: ops.BlockKernel
    wire: torch.dtype | None = None


def context_attention(
    query: Tensor, key: Tensor, value: Tensor, context: ContextParallel, sinks: Tensor | None = None
) -> Tensor:
    """softmax(scale · QKᵀ)·V under a causal mask over the whole sequence.

    Called by all ranks of the group, in the same order of layers.

    Args:
        query: [s / n, b, heads, d], this rank's two chunks. key, value: [s / n, b, groups, d].
        sinks: [heads] (`attention_sinks`); None: there are none. Their gradient is that of this rank's queries.

    Returns:
        [s / n, b, heads · d], contiguous.
    """
    return _ContextAttention.apply(query, key, value, sinks, context)


class _ContextAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, context: ContextParallel
    ) -> Tensor:
        outs: list[Tensor] = []
        log_sum_exps: list[Tensor] = []
        for block in _blocks(key, value, context):
            out, log_sum_exp = ops.attention_block(
                block.rows_of(query),
                *block.keys_values(),
                causal=block.is_own,
                scale=context.scale,
                kernel=context.kernel,
            )
            outs.append(out.contiguous())
            log_sum_exps.append(log_sum_exp.contiguous())
            if len(outs) == _MOST_HELD:
                merged, log_sum_exp = ops.merge_attention(outs, log_sum_exps, dtype=_sum_dtype(query))
                outs, log_sum_exps = [merged], [log_sum_exp]
        out, log_sum_exp = ops.merge_attention(outs, log_sum_exps, dtype=query.dtype)
        if sinks is not None:
            out, log_sum_exp = with_sinks(out, log_sum_exp, sinks)
        result = out.view(*query.shape[:2], -1)
        ctx.save_for_backward(query, key, value, sinks, result, log_sum_exp)
        ctx.context = context
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, result, log_sum_exp = ctx.saved_tensors
        context: ContextParallel = ctx.context
        grad_out, out = grad_output.contiguous().view(query.shape), result.view(query.shape)
        # Kernels read it as a dense tensor.
        of_second = log_sum_exp[..., query.shape[0] // 2 :].contiguous()
        grads_query: list[Tensor] = []
        returned = (_GatheredGradient if context.comm_type == "all_gather" else _RingGradient)(context)
        for block in _blocks(key, value, context):
            grad_query, *of_keys_values = ops.attention_block_backward(
                block.rows_of(grad_out),
                block.rows_of(query),
                *block.keys_values(),
                block.rows_of(out),
                of_second if block.is_for_second else log_sum_exp,
                causal=block.is_own,
                scale=context.scale,
                kernel=context.kernel,
            )
            returned.add(block, torch.stack(of_keys_values, dim=2))
            grads_query.append(grad_query.contiguous())
            if len(grads_query) == _MOST_HELD:
                grads_query = [ops.sum_partials(grads_query, at_end=True, dtype=_sum_dtype(query))]
        whole = ops.sum_partials(grads_query, at_end=True, dtype=query.dtype)
        of_sinks = None if sinks is None else sink_gradient(grad_out, out, log_sum_exp, sinks)
        return whole, *returned.finish(query.dtype).unbind(dim=2), of_sinks, None


class _Block(NamedTuple):
    """Keys and values that some of this rank's queries attend to.

    Attributes:
        packed: [t, b, 2, groups, d]: keys, then values. None: this rank's own.
        own: this rank's key and value.
        is_for_second: only this rank's second chunk attends to them. They are then of ranks above it.
    """

    packed: Tensor | None
    own: tuple[Tensor, Tensor]
    is_for_second: bool = False

    @property
    def is_own(self) -> bool:
        return self.packed is None

    def keys_values(self) -> tuple[Tensor, Tensor]:
        """[t, b, groups, d] each."""
        if self.packed is None:
            return self.own
        key, value = self.packed.unbind(dim=2)
        return key, value

    def rows_of(self, x: Tensor) -> Tensor:
        """The rows of this rank's [2c, …] that attend to these keys."""
        return x[-(x.shape[0] // 2) :] if self.is_for_second else x


def _blocks(key: Tensor, value: Tensor, context: ContextParallel) -> Iterator[_Block]:
    """This rank's own block first, with the others on their way meanwhile."""
    packed = torch.stack((key, value), dim=2)
    blocks = _gathered_blocks if context.comm_type == "all_gather" else _ring_blocks
    return blocks(packed, (key, value), context)


def _gathered_blocks(packed: Tensor, own: tuple[Tensor, Tensor], context: ContextParallel) -> Iterator[_Block]:
    gathering = Gathering(packed, context.group, context.wire)
    yield _Block(None, own)
    earlier, later = gathering.wait()
    if len(earlier):
        yield _Block(earlier, own)
    if len(later):
        yield _Block(later, own, is_for_second=True)


def _ring_blocks(packed: Tensor, own: tuple[Tensor, Tensor], context: ContextParallel) -> Iterator[_Block]:
    group = context.group
    rank, size = group.rank(), group.size()
    step = RingStep(packed, group)
    yield _Block(None, own)
    for distance in range(1, size):
        packed = step.wait()
        if distance < size - 1:
            step = RingStep(packed, group)
        is_from_below = distance <= rank
        yield _Block(packed[: len(packed) // 2] if is_from_below else packed, own, is_for_second=not is_from_below)


class _GatheredGradient:
    """The gradient of this rank's keys and values: other ranks' summands return in 16 bits, once all are computed.

    Ranks reach the ends of their blocks at different times. A message between blocks would keep multiprocessors
    waiting.
    """

    def __init__(self, context: ContextParallel) -> None:
        self._context = context
        self._own: Tensor | None = None
        self._others: dict[bool, Tensor] = {}

    def add(self, block: _Block, grad: Tensor) -> None:
        """The gradient [t, b, 2, groups, d] of a block's keys and values, in the order of `_blocks`."""
        if block.is_own:
            self._own = grad
        else:
            self._others[block.is_for_second] = grad

    def finish(self, dtype: torch.dtype) -> Tensor:
        """Of this rank's keys and values [2c, b, 2, groups, d]."""
        assert self._own is not None
        none = self._own[:0]
        of_earlier, of_later = (self._others.get(is_for_second, none) for is_for_second in (False, True))
        returning = Returning(of_earlier, of_later, self._context.group, self._context.wire)
        return ops.sum_partials([self._own, *returning.wait()], at_end=False, dtype=dtype)


class _RingGradient:
    """The gradient of this rank's keys and values: an FP32 sum that goes round with them, one rank behind."""

    def __init__(self, context: ContextParallel) -> None:
        self._group = context.group
        self._step: RingStep | None = None

    def add(self, block: _Block, grad: Tensor) -> None:
        """As `_GatheredGradient.add`."""
        if self._step is None:
            total = grad.to(_sum_dtype(grad))
        else:
            total = self._step.wait()
            total[: len(grad)] += grad
        self._step = RingStep(total, self._group)

    def finish(self, dtype: torch.dtype) -> Tensor:
        """As `_GatheredGradient.finish`."""
        assert self._step is not None
        return self._step.wait().to(dtype)


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
