"""One step of an update rule that has no kernel of its own, in plain PyTorch on every device.

State is stored and rounded as the fused steps do it (`reference`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..quantize.blockwise import load_state
from ..rounding import Places, exp_avg_bits, exp_avg_sq_bits, rounding_bits
from .reference import FlatState, is_rounded, move_master_, store_moment_, update_where_finite

#: Elements whose FP32 values are held at a time, a multiple of all blocks and of all units of places.
_PIECE = 1 << 24

#: (gradient, parameter, states), FP32 [n] each → (what is added to the parameter, the new states).
ChangeFunction = Callable[[Tensor, Tensor, list[Tensor]], tuple[Tensor, Sequence[Tensor]]]


class FlatOperands(NamedTuple):
    """What a step of any rule reads and writes, flat [n] each, in its own storage dtype.

    Attributes:
        grad: only read.
        states: what the rule stores beside each weight.
        places: where the elements lie in the whole model, for stochastic rounding; only read.
        weight: 16- or 32-bit copy that receives the new value as the master stores it, or None.
        chunk_amax: FP32 [n / chunk] receives the largest magnitude of each chunk of the new master, or None.
    """

    grad: FlatState
    states: tuple[FlatState, ...]
    master: FlatState
    places: Places
    weight: Tensor | None
    chunk_amax: Tensor | None

    def part(self, start: int, stop: int) -> FlatOperands:
        """Elements [start, stop) (views)."""
        numel = self.master.payload.numel()

        def cut(flat: Tensor) -> Tensor:
            return flat[start * len(flat) // numel : stop * len(flat) // numel]

        def cut_state(stored: FlatState) -> FlatState:
            return FlatState(cut(stored.payload), None if stored.scales is None else cut(stored.scales))

        places = self.places
        if places.table is not None:
            places = places._replace(table=cut(places.table))
        elif start:
            table = torch.zeros(1, 5, dtype=torch.int32, device=self.master.payload.device)
            table[0, 1], table[0, 2:4] = start, numel
            places = Places(table)
        return FlatOperands(
            cut_state(self.grad),
            tuple(map(cut_state, self.states)),
            cut_state(self.master),
            places,
            None if self.weight is None else cut(self.weight),
            None if self.chunk_amax is None else cut(self.chunk_amax),
        )


def elementwise_step_(
    operands: FlatOperands, change: ChangeFunction, *, holds_squares: Sequence[bool], grad_factor: Tensor, step: Tensor
) -> None:
    """One step over flat storage, in place. Each element's change depends on that element alone.

    Args:
        holds_squares: by state, whether it is never negative; see `reference.store_moment_`.
        grad_factor, step: as in `reference.adamw_step_`.
    """
    for piece in _pieces(operands):
        _step_(piece, change, holds_squares, grad_factor, step)


def _pieces(operands: FlatOperands) -> Iterator[FlatOperands]:
    """Parts whose FP32 values fit in memory at once."""
    numel = operands.master.payload.numel()
    for start in range(0, numel, _PIECE):
        yield operands.part(start, min(start + _PIECE, numel))


def _step_(
    piece: FlatOperands, change: ChangeFunction, holds_squares: Sequence[bool], grad_factor: Tensor, step: Tensor
) -> None:
    states, master, weight, chunk_amax = piece.states, piece.master, piece.weight, piece.chunk_amax

    def update() -> None:
        value = load_state(*master)
        added, new = change(load_state(*piece.grad) * grad_factor, value, [load_state(*state) for state in states])
        bits = rounding_bits(value.numel(), step, piece.places) if is_rounded(*states, master) else None
        for state, kept, is_square in zip(states, new, holds_squares, strict=True):
            store_moment_(kept, state, bits, exp_avg_sq_bits if is_square else exp_avg_bits)
        move_master_(value, added, master, bits, weight, chunk_amax)

    written = [tensor for state in (*states, master) for tensor in state]
    update_where_finite(grad_factor, [*written, weight, chunk_amax], update)
