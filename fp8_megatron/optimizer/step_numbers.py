"""Which parts of each space a step updates, and the number of that step for each parameter.

In torch every parameter counts its own updates, because one without a gradient is left out. Here a step is one kernel a
space with one number. So a parameter's number is kept as how far it lags behind the number of steps: parameters that
missed the same steps share a lag, and as a rule there is one lag, zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..sharding.partition import ParamSpace

#: (start, stop) in this rank's shard, and the step's number, FP32 [1] on the device.
StepRange = tuple[int, int, Tensor]


class StepNumbers:
    """Counts the updates of every parameter, on the device: a skipped step does not count.

    Attributes:
        done: FP32 [1], steps that were not skipped.
    """

    def __init__(self, device: torch.device) -> None:
        self.done = torch.zeros(1, device=device)
        self._spaces: list[ParamSpace] = []
        #: By space and slot, the lag's key.
        self.keys: list[list[int]] = []
        #: FP32 [1] each: the steps that a parameter missed.
        self.lags: dict[int, Tensor] = {0: torch.zeros(1, device=device)}
        self._next_key = 1
        self._has_advanced = False

    def add_space(self, space: ParamSpace) -> None:
        """Count the updates of one more space. Its parameters have had none."""
        self._spaces.append(space)
        self.keys.append([self._new_lag(self.done.clone()) if self._has_advanced else 0] * len(space.slots))

    def number_of(self, space: int, slot: int) -> Tensor:
        """How many updates a parameter has had, FP32 [1]."""
        return self.done - self.lags[self.keys[space][slot]]

    def restart(self, slots: Sequence[tuple[int, int]]) -> None:
        """Parameters, each a space and a slot in it, have had no updates."""
        key = self._new_lag(self.done.clone())
        for space, slot in slots:
            self.keys[space][slot] = key

    def set_numbers(self, numbers: Sequence[Sequence[float]]) -> None:
        """Set how many updates each parameter has had, by space and slot."""
        self._has_advanced = True
        most = max((number for of_space in numbers for number in of_space), default=0.0)
        self.done.fill_(most)
        self.lags = {0: torch.zeros_like(self.done)}
        of_lag = {0.0: 0}
        for of_space, keys in zip(numbers, self.keys, strict=True):
            for index, number in enumerate(of_space):
                lag = most - number
                if lag not in of_lag:
                    of_lag[lag] = self._new_lag(torch.full_like(self.done, lag))
                keys[index] = of_lag[lag]

    def advance(self, used: Sequence[Sequence[bool]], moved: Tensor) -> list[list[StepRange]]:
        """Begin a step: by space, the parts to update.

        Args:
            used: by space and slot, whether the parameter has a gradient.
            moved: FP32 [1], 1 if the step counts, 0 if it is skipped.
        """
        self._has_advanced = True
        self.done = self.done + moved
        if not all(all(flags) for flags in used):
            self._miss(used, moved)
        numbers = {key: self.done - lag for key, lag in self.lags.items()} if len(self.lags) > 1 else {0: self.done}
        return [
            self._parts(space, flags, keys, numbers)
            for space, flags, keys in zip(self._spaces, used, self.keys, strict=True)
        ]

    def _miss(self, used: Sequence[Sequence[bool]], moved: Tensor) -> None:
        """Parameters without a gradient lag one step more."""
        moved_to: dict[int, int] = {}
        for flags, keys in zip(used, self.keys, strict=True):
            for index, is_used in enumerate(flags):
                if not is_used:
                    old = keys[index]
                    if old not in moved_to:
                        moved_to[old] = self._new_lag(self.lags[old] + moved)
                    keys[index] = moved_to[old]
        in_use = {0}.union(*self.keys)
        self.lags = {key: lag for key, lag in self.lags.items() if key in in_use}

    def _new_lag(self, lag: Tensor) -> int:
        key = self._next_key
        self._next_key += 1
        self.lags[key] = lag
        return key

    @staticmethod
    def _parts(
        space: ParamSpace, flags: Sequence[bool], keys: list[int], numbers: dict[int, Tensor]
    ) -> list[StepRange]:
        if all(flags) and len(set(keys)) == 1:
            return [(0, space.shard_numel, numbers[keys[0]])]
        runs: list[tuple[int, int, int]] = []
        fragments = [
            (fragment.shard_start, fragment.shard_start + fragment.length, key)
            for slot, is_used, key in zip(space.slots, flags, keys, strict=True)
            if is_used
            for fragment in space.fragments(slot)
        ]
        for start, stop, key in sorted(fragments):
            if runs and runs[-1][1] == start and runs[-1][2] == key:
                runs[-1] = (runs[-1][0], stop, key)
            else:
                runs.append((start, stop, key))
        return [(start, stop, numbers[key]) for start, stop, key in runs]
