"""State of a space whose rule needs whole matrices (`rules.rule.MatrixRule`).

A step goes through the matrices in turns (`sharding.whole_matrices`): the new states and directions of this rank's
shard, the matrices that it owns, and the update of its shard. Three turns are under way at a time, so that exchanges
overlap what is computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..device.group import Group
from ..dtypes import CHUNK
from ..kernels import ops
from ..sharding.gradient import GradBuffer
from ..sharding.partition import Fragment, Slot
from ..sharding.released_grads import ReleasedGrad
from ..sharding.whole_matrices import Turn, WholeMatrix, matrices_of, turns
from .rules.rule import MatrixRule
from .split_state import SplitSpaceState
from .state import SpaceState

#: Elements of matrices of one shape that are made orthogonal together.
_BATCH_NUMEL = 1 << 26

_END = object()

#: A part of a turn: its place in the shard, where it starts in the turn's parts, its gradient, and its step number.
_Run = tuple[Fragment, int, ops.FlatState, Tensor]


#: Linear layers of a block by what Megatron's names of their weights contain, for `MatrixSpaceState.measured`.
ROLES = ("qkv", "proj", "fc1", "fc2")


class MatrixSpaceState(SpaceState):
    """`SpaceState` of matrices.

    Attributes:
        measures: whether updates are measured from now on.
    """

    rule: MatrixRule
    measures = False

    @cached_property
    def measured(self) -> Tensor:
        """FP64 [roles + 2, 2], sums over what this rank made orthogonal since it was last zeroed: squares and number of
        the elements of updates by role, those of no role last; then how far from orthogonal matrices are, and their
        number."""
        return torch.zeros(len(ROLES) + 2, 2, dtype=torch.float64, device=self.space.device)

    @cached_property
    def _turns(self) -> list[Turn]:
        return turns(self.space, _cost)

    def update(
        self,
        buffer: GradBuffer,
        parts: Sequence[tuple[int, int, Tensor]],
        group: Mapping[str, Any],
        grad_factor: Tensor,
    ) -> None:
        written = self._weights_to_write()
        under_way: list[Iterator[None]] = []
        for turn in self._turns:
            under_way.append(self._stages(turn, list(_runs(turn, buffer, parts)), written, group, grad_factor))
            if turn.ranks.size > 1:
                under_way = _next_stages(under_way)
            else:  # nothing travels, and one turn takes the least memory
                _finish(under_way)
        _finish(under_way)
        self._publish_weights(written)

    def update_slot(
        self,
        grad: ReleasedGrad,
        group: Mapping[str, Any],
        *,
        grad_factor: Tensor,
        step_count: Tensor,
    ) -> None:
        slot = grad.slot
        runs = [(Fragment(slot.offset, 0, slot.padded), 0, ops.FlatState(grad.payload, grad.scales), step_count)]
        turn = Turn(self.space, tuple(matrices_of(self.space, slot)))
        _finish([self._stages(turn, runs, self._weights_to_write(), group, grad_factor)])

    def _stages(
        self,
        turn: Turn,
        runs: Sequence[_Run],
        written: Tensor | None,
        group: Mapping[str, Any],
        grad_factor: Tensor,
    ) -> Iterator[None]:
        """The step of a turn's matrices, in three stages. Between them its directions travel to the owners, and what
        these have made travels back."""
        parts = torch.zeros(turn.numel, dtype=torch.bfloat16, device=self.space.device)
        for place, start, grad, step in runs:
            direction = parts[start : start + place.length]
            operands = self._operands(place, grad, None)
            self.rule.direct(operands, direction, group, grad_factor=grad_factor, step=step)
        sent = turn.gather(parts)
        yield
        directions = turn.gathered(sent, parts)
        self._orthogonal_(turn.owned, directions, group)
        sent = turn.scatter(directions, parts)
        del directions
        yield
        turn.scattered(sent, parts)
        for place, start, _, step in runs:
            made = ops.FlatState(parts[start : start + place.length])
            self._step(place, made, written, group, grad_factor, step)

    def _orthogonal_(
        self, owned: Sequence[WholeMatrix], directions: Sequence[Tensor], group: Mapping[str, Any]
    ) -> None:
        """Make of whole matrices what the rule does, in place. Those of one shape are made together."""
        alike: dict[tuple[int, int, int, int], list[Tensor]] = {}
        for matrix, stored in zip(owned, directions, strict=True):
            split = matrix.slot.row_split
            for part in (stored,) if split is None else split.split(stored):
                rows = math.prod(part.shape[1:-1])
                alike.setdefault((_role(matrix.slot), _axis(matrix.slot) or 0, rows, part.shape[-1]), []).append(part)
        for (role, axis, rows, columns), parts in alike.items():
            ranks = self.space.sharing.parts_with if axis else None
            for batch in _batches(parts):
                stacked = [part.reshape(-1, rows, columns) for part in batch]
                whole = stacked[0] if len(stacked) == 1 else torch.cat(stacked)
                errors: list[Tensor] | None = [] if self.measures else None
                made = self.rule.orthogonal(whole, group, ranks, axis or None, errors=errors)
                if errors:
                    self._measure(role, made, torch.cat(errors))
                for part, result in zip(batch, made.split([len(part) for part in batch]), strict=True):
                    part.copy_(result.view_as(part))

    def _measure(self, role: int, made: Tensor, errors: Tensor) -> None:
        sums = self.measured
        sums[role, 0] += torch.linalg.vector_norm(made, dtype=torch.float32).square()
        sums[role, 1] += made.numel()
        sums[-1, 0] += errors.sum()
        sums[-1, 1] += errors.numel()


class SplitMatrixState(MatrixSpaceState, SplitSpaceState):
    """`MatrixSpaceState` over split masters."""

    #: The scales before and after the step that is being made, FP32 [num_matrices].
    _moving: tuple[Tensor, Tensor] | None = None

    #: FP32 [num_matrices], what the rule's update of each does not exceed. The rule's options are those of a run.
    _largest: Tensor | None = None

    def _next(self, group: Mapping[str, Any]) -> Tensor:
        if self._largest is None:
            largest = [
                self.rule.largest_update(_shapes(slot, self.space.sharing.parts_with), group)
                for slot in self.space.slots
                for _ in range(slot.num_matrices)
            ]
            self._largest = torch.tensor(largest, device=self.space.device)
        return self.rule.next_scales(self.matrix_amax, self._largest, group, self.scales)

    def update(
        self,
        buffer: GradBuffer,
        parts: Sequence[tuple[int, int, Tensor]],
        group: Mapping[str, Any],
        grad_factor: Tensor,
    ) -> None:
        assert len(parts) == 1, "a split master is updated whole"
        before = self.scales.contiguous()
        after = torch.where(torch.isfinite(grad_factor), self._next(group), before)
        self._moving = before, after
        super().update(buffer, parts, group, grad_factor)
        self.scales.copy_(after)

    def update_slot(
        self,
        grad: ReleasedGrad,
        group: Mapping[str, Any],
        *,
        grad_factor: Tensor,
        step_count: Tensor,
    ) -> None:
        if self._next_scales is None:
            self._next_scales = self._next(group)
        self._moving = self.scales.contiguous(), self._next_scales
        super().update_slot(grad, group, grad_factor=grad_factor, step_count=step_count)
        own, new = self.scale_of(grad.slot), self._next_scales[grad.slot.matrices]
        own.copy_(torch.where(torch.isfinite(grad_factor), new, own))

    def _step(
        self,
        place: Fragment,
        grad: ReleasedGrad | ops.FlatState,
        written: Tensor | None,
        group: Mapping[str, Any],
        grad_factor: Tensor,
        step_count: Tensor,
    ) -> None:
        assert written is not None and self._moving is not None and self.chunk_amax is not None
        start, stop = place.shard_start, place.shard_start + place.length
        chunks = slice(start // CHUNK, stop // CHUNK)
        self.rule.step_split(
            grad.payload,
            ops.SplitMaster(
                written[start:stop],
                self.master.part(place).payload,
                *self._moving,
                self.chunk_matrices[chunks],
                self.places_of(place),
            ),
            group,
            grad_factor=grad_factor,
            step=step_count,
            chunk_amax=self.chunk_amax[chunks],
        )


def _next_stages(under_way: list[Iterator[None]]) -> list[Iterator[None]]:
    """Do the next stage of each, the newest first: what it sends travels while older ones compute. Returns those that
    go on."""
    return [stages for stages in reversed(under_way) if next(stages, _END) is not _END][::-1]


def _finish(under_way: list[Iterator[None]]) -> None:
    while under_way:
        under_way[:] = _next_stages(under_way)


def _shapes(slot: Slot, ranks: Group | None) -> list[tuple[int, int]]:
    """(rows, columns) of the whole matrices that a matrix of a parameter stores."""
    rows, columns = slot.param.shape[-2:]
    axis, size = _axis(slot), 1 if ranks is None else ranks.size()
    sizes = [rows] if slot.row_split is None else [slot.row_split.groups * one for one in slot.row_split.sizes]
    return [(own * (size if axis == 1 else 1), columns * (size if axis == 2 else 1)) for own in sizes]


def _runs(turn: Turn, buffer: GradBuffer, parts: Sequence[tuple[int, int, Tensor]]) -> Iterator[_Run]:
    """What a step updates of a turn, of `parts` of the shard (`SpaceState.update`)."""
    for own in turn.parts:
        for first, last, step in parts:
            start, stop = max(first, own.shard_start), min(last, own.shard_start + own.length)
            if start < stop:
                for begin, end, grad in buffer.runs(start, stop):
                    yield Fragment(begin, 0, end - begin), own.slot_start + begin - own.shard_start, grad, step


def _batches(parts: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    size = max(1, _BATCH_NUMEL // parts[0].numel())
    for start in range(0, len(parts), size):
        yield list(parts[start : start + size])


def _role(slot: Slot) -> int:
    """The number of its role; len(`ROLES`): it has none."""
    return next((index for index, role in enumerate(ROLES) if f"linear_{role}." in slot.name), len(ROLES))


def _axis(slot: Slot) -> int | None:
    """The axis of a batch of its matrices [b, rows, columns] that ranks share."""
    axis = None if slot.region is None else slot.region.axis
    return None if axis is None else axis + 3 - slot.param.ndim


def _cost(shape: tuple[int, int, int]) -> float:
    """Multiplications of one step of Newton-Schulz of matrices [b, rows, columns], in proportion."""
    count, *sides = shape
    return float(count * min(sides) ** 2 * (2 * max(sides) + min(sides)))
