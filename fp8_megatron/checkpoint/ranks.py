"""What one rank does for all: every rank learns the result, or fails with the same error. No rank waits for another."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
from torch.distributed import ProcessGroup

from ..errors import UserError
from .files import CheckpointError, RunLockError

Result = TypeVar("Result")


class RankPlace(Protocol):
    """A rank's place among all ranks (`mcore.topology.Topology`)."""

    @property
    def rank(self) -> int:
        """This rank's number. 0 is the first rank."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""


class Ranks:
    """All ranks of a run. Each calls the same methods in the same order.

    Args:
        place: this rank's.
        group: where the ranks meet. Default: torch's default group.
    """

    def __init__(self, place: RankPlace, group: ProcessGroup | None = None) -> None:
        self._rank, self._size, self._group = place.rank, place.world_size, group

    @classmethod
    def apart(cls, place: RankPlace, name: str, timeout: timedelta) -> Ranks:
        """Ranks that meet in a gloo group of their own, beside what else they exchange."""
        if place.world_size == 1:
            return cls(place)
        return cls(place, torch.distributed.new_group(backend="gloo", timeout=timeout, group_desc=name))

    def first_says(self, action: Callable[[], Result]) -> Result:
        """Run an action on the first rank, and return its result on every rank.

        Raises:
            CheckpointError: the action failed; `RunLockError` if it raised one. An error of the program itself, neither
                a `UserError` nor an `OSError`, is raised as it is on the first rank.
        """
        result: Any = None
        failure: tuple[type[CheckpointError], str] | None = None
        error: Exception | None = None
        if self._rank == 0:
            try:
                result = action()
            except Exception as caught:
                kind = RunLockError if isinstance(caught, RunLockError) else CheckpointError
                error, failure = caught, (kind, text_of(caught))
        outcome = [(result, failure)]
        if self._size > 1:
            torch.distributed.broadcast_object_list(outcome, src=0, group=self._group)
        result, failure = outcome[0]
        if error is not None and not isinstance(error, UserError | OSError):
            raise error
        if failure is not None:
            kind, text = failure
            raise kind(text) from error
        return result

    def first_keeps(self, action: Callable[[], Result]) -> Result | None:
        """Run an action on the first rank, which keeps the result; None on the others. Raises as `first_says`."""
        kept: list[Result] = []
        self.first_says(lambda: kept.append(action()))
        return kept[0] if kept else None

    def everyones(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        values = [value] * self._size
        if self._size > 1:
            torch.distributed.all_gather_object(values, value, group=self._group)
        return values

    def all_do(self, action: Callable[[], Any]) -> list[Any]:
        """Run an action on every rank. The first rank gets all results by rank, with errors as text; other ranks get
        nothing.
        """
        result: Any
        try:
            result = action()
        except Exception as caught:
            result = text_of(caught)
        if self._size == 1:
            return [result]
        results: list[Any] | None = [None] * self._size if self._rank == 0 else None
        torch.distributed.gather_object(result, results, dst=0, group=self._group)
        return results or []


def text_of(error: Exception) -> str:
    """The text of an error, or the name of its type if it has none."""
    return str(error) or type(error).__name__
