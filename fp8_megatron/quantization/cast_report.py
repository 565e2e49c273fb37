"""What the casts of a step report: which tensor was not finite, and how many elements each GEMM role lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from torch import Tensor

from ..kernels import ops


class Role(IntEnum):
    """What a slot's tensor is to its layer's GEMMs."""

    INPUT = 0
    GRAD_OUTPUT = 1
    WEIGHT_GRAD = 2
    HEAD_INPUT = 3
    """The LM head's input."""
    ATTENTION_INPUT = 4
    """Query, key or value of FP8 attention."""
    ATTENTION_GRAD = 5
    """A gradient inside FP8 attention: of its output, scores, query, key or value."""

    @property
    def text(self) -> str:
        """The role in a message."""
        texts = {Role.GRAD_OUTPUT: "output gradient", Role.WEIGHT_GRAD: "weight gradient"}
        return texts.get(self, "gradient" if self is Role.ATTENTION_GRAD else "input")

    @property
    def is_forward(self) -> bool:
        """Whether forward makes the tensor."""
        return self in (Role.INPUT, Role.HEAD_INPUT, Role.ATTENTION_INPUT)


#: Sums of a report: `kernels.scales.reference.REPORT_SUMS` for each role.
NUM_SUMS = len(Role) * ops.REPORT_SUMS


class SlotName(NamedTuple):
    """The tensor of a slot: its layer's name in the whole model, and its role there."""

    layer: str
    role: Role

    def __str__(self) -> str:
        return f"{self.role.text} of {self.layer}"


#: (rank, model chunk) → `AmaxHistory.suspects` there.
SlotNames = Callable[[int, int], Sequence[SlotName]]


def causes(order: Sequence[tuple[int, SlotName]]) -> list[int]:
    """Slots in the order in which they are blamed, from (position of the layer in forward, name) of each slot.

    A bad value spreads to later casts. So the earliest is wanted: in forward that of the first layer, in backward that
    of the last one. A weight gradient passes nothing on and comes last.
    """

    def key(slot: int) -> tuple[int, int]:
        position, (_, role) = order[slot]
        if role.is_forward:
            return 0, position
        return (2 if role is Role.WEIGHT_GRAD else 1), -position

    return sorted(range(len(order)), key=key)


@dataclass(frozen=True)
class Suspect:
    """A tensor that a rank reports."""

    rank: int
    tensor: SlotName
    reason: str
    """What is wrong with it."""


@dataclass(frozen=True)
class CastReport:
    """What the casts of one step report, on the host.

    On the device it is FP32 [`numel_of`]: sums by role over all ranks, then of every rank and model chunk the head of
    its report (see `kernels.scales.reference.examine_records_`).
    """

    sums: Sequence[float]
    heads: Sequence[Sequence[Sequence[float]]]
    """[ranks][chunks][3]."""

    @staticmethod
    def numel_of(num_ranks: int, num_chunks: int) -> int:
        """Elements on the device."""
        return NUM_SUMS + num_ranks * num_chunks * ops.REPORT_HEAD

    @staticmethod
    def add_(values: Tensor, report: Tensor, place: int) -> None:
        """Put the report of one rank's model chunk into the device's `values`. `place`: rank · chunks + chunk."""
        values[:NUM_SUMS] += report[ops.REPORT_HEAD :]
        first = NUM_SUMS + place * ops.REPORT_HEAD
        values[first : first + ops.REPORT_HEAD] = report[: ops.REPORT_HEAD]

    @classmethod
    def unpack(cls, values: Sequence[float], num_chunks: int) -> CastReport:
        """The report of the device's `values`."""
        sums, rest = values[:NUM_SUMS], values[NUM_SUMS:]
        heads = [rest[first : first + ops.REPORT_HEAD] for first in range(0, len(rest), ops.REPORT_HEAD)]
        return cls(sums, [heads[first : first + num_chunks] for first in range(0, len(heads), num_chunks)])

    def figures(self) -> dict[str, Any]:
        """Name → figure of the step: fractions by role, None where nothing was counted, and saturated tensors."""
        figures: dict[str, Any] = {"saturated_tensors": sum(self.sums[ops.REPORT_SUMS - 1 :: ops.REPORT_SUMS])}
        weight_grads = self.sums[Role.WEIGHT_GRAD * ops.REPORT_SUMS : (Role.WEIGHT_GRAD + 1) * ops.REPORT_SUMS]
        figures["weight_grad_saturated_tensors"] = weight_grads[-1]
        for role in (Role.INPUT, Role.GRAD_OUTPUT, Role.HEAD_INPUT):
            saturated, cast, _ = self.sums[role * ops.REPORT_SUMS : (role + 1) * ops.REPORT_SUMS]
            figures[f"{role.name.lower()}_saturation_fraction"] = saturated / cast if cast > 0 else None
        return figures

    def suspect(self, names: SlotNames, *, most_saturated: float) -> Suspect | None:
        """The tensor that a skipped step is blamed on; None if the casts saw nothing wrong.

        It is the first one in time that held a value that is not finite. If there is none, it is the one with the
        largest saturated fraction above `most_saturated`.
        """
        found = [(rank, names(rank, chunk)[int(head[0]) - 1]) for rank, chunk, head in self._heads() if head[0] > 0]
        if found:
            rank, tensor = next((each for each in found if each[1].role.is_forward), found[-1])
            return Suspect(rank, tensor, "not finite")
        rank, chunk, (_, fraction, place) = max(self._heads(), key=lambda each: each[2][1])
        if fraction <= most_saturated:
            return None
        return Suspect(rank, names(rank, chunk)[int(place) - 1], f"{fraction:.2%} clamped")

    def _heads(self) -> Iterator[tuple[int, int, Sequence[float]]]:
        """Rank, model chunk and head, in the order of forward: the first chunk on every rank, then the second."""
        for chunk in range(len(self.heads[0])):
            for rank, of_rank in enumerate(self.heads):
                yield rank, chunk, of_rank[chunk]
