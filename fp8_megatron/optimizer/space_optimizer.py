"""`SpaceOptimizer`: an update rule over flat spaces, as a `torch.optim.Optimizer`.

Each space has one gradient buffer and one state, and a step is one call of the rule a space. Every replica owns an even
share of every bucket: each of d replicas holds 1/d of the state and does 1/d of the work, and one replica is the case
d = 1. The check for values that are not finite and the step numbers stay on the device.

Two subclasses say where gradients come from and what a step is part of: `distributed_optimizer.FP8DistributedOptimizer`
for a megatron-core run, `any_model.optimizer.FP8Optimizer` for any model, which also works on fully_shard's shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..dtypes import StorageDtype
from ..quantization.amax_history import AmaxHistory, SquareSum
from ..sharding.gradient import GradBuffer
from ..sharding.partition import ParamSpace, Slot, StorageClass
from ..sharding.released_grads import ReleasedGradBuffer
from ..sharding.storage import ModelStorage
from ..update_rules import rule_of_space
from .matrix_state import MatrixSpaceState, SplitMatrixState
from .rules.rule import MatrixRule, UpdateRule, build_rule
from .split_state import SplitSpaceState
from .state import SpaceState
from .step_numbers import StepNumbers


@dataclass
class OptimizedSpace:
    """One space of an optimizer.

    Attributes:
        buffer: its gradients.
        group: the param group whose numbers a step reads.
    """

    buffer: GradBuffer
    state: SpaceState
    group: dict[str, Any]

    @property
    def space(self) -> ParamSpace:
        """The parameters."""
        return self.state.space

    def squared_norm(self) -> Tensor:
        """Σ x² of this rank's part of the gradients, FP32 [1]."""
        return self.buffer.squared_norm()

    def scaled(self, factor: Tensor) -> Tensor:
        """`factor` with that of the space's own gradients."""
        own = self.space.sharing.grad_factor
        return factor if own == 1.0 else factor * own


class SpaceOptimizer(torch.optim.Optimizer):
    """State of some spaces, and the step over all of them.

    Args:
        storage: what is stored in which format.
        histories: delayed scales of the model's casts. A step in which a cast saw a value that is not finite is
            skipped.
        param_groups, defaults: of torch's optimizer.
    """

    def __init__(
        self,
        param_groups: Sequence[dict[str, Any]],
        defaults: dict[str, Any],
        *,
        storage: ModelStorage,
        histories: Sequence[AmaxHistory],
        device: torch.device,
    ) -> None:
        self.device = device
        self._storage = storage
        self._histories = [history for history in histories if history.num_slots]
        self._numbers = StepNumbers(device)
        super().__init__(param_groups, defaults)

    @property
    def spaces(self) -> Sequence[OptimizedSpace]:
        """All spaces, in the order in which they were added."""
        raise NotImplementedError

    @property
    def step_count(self) -> Tensor:
        """FP32 [1], steps that were not skipped; it may be written."""
        return self._numbers.done

    def slots(self) -> Iterator[tuple[SpaceState, Slot]]:
        """Every parameter of this model-parallel rank with the state that holds this replica's share of it."""
        return ((space.state, slot) for space in self.spaces for slot in space.space.slots)

    def build_state(self, space: ParamSpace, options: Mapping[str, Any], rule: str) -> SpaceState:
        """State of a new space, whose parameters count their updates from now on.

        Args:
            options: of its param group.
            rule: the name of the group's update rule (`update_rules`).
        """
        formats = self._storage.of_state(space.storage, space.dtype)
        is_split = formats.master_weight is StorageDtype.SPLIT
        name = rule_of_space(rule, has_matrices=space.has_matrices)
        built: UpdateRule = build_rule(name, options, is_split=is_split)
        self._numbers.add_space(space)
        if isinstance(built, MatrixRule):
            kind: type[SpaceState] = SplitMatrixState if is_split else MatrixSpaceState
        else:
            kind = SplitSpaceState if is_split else SpaceState
        return kind(space, formats, built, is_trained=self._storage.is_trained)

    def square_sum(self, start: Tensor) -> SquareSum:
        """Σ x² of all gradients, FP32 [1] on the device; each parameter counts once. Called after they were averaged.

        It is NaN or inf if any gradient is. Finite gradients do not show one fault, and the sum is NaN then too: a cast
        with a delayed scale clamps an inf (`AmaxHistory.examine`).

        Args:
            start: FP32 [1], 0, or NaN if the step must be skipped.
        """
        total = SquareSum(start)
        for space in self.spaces:
            sharing = space.space.sharing
            if sharing.counts_in_norm:
                square = space.squared_norm()
                total.add_(square if sharing.grad_factor == 1.0 else square * sharing.grad_factor**2)
        for history in self._histories:
            history.examine(total)
        self._sum_over_ranks_(total)
        return total

    def _sum_over_ranks_(self, square_sum: SquareSum) -> None:
        """Sum over the ranks that step together, in place."""

    def _before_update(self) -> None:
        """Called before state is written."""

    def update(self, factor: Tensor, moved: Tensor, used: Sequence[Sequence[bool]]) -> None:
        """Update what this rank owns and send the new weights; in the order in which the next forward needs them.

        Args:
            factor: FP32 [1], what gradients are multiplied by; if it is not finite, nothing is written.
            moved: FP32 [1], 1 if the step counts, 0 if it is skipped.
            used: by space and slot, whether the parameter has a gradient.
        """
        parts = self._numbers.advance(used, moved)
        self._before_update()
        steps = sorted(zip(self.spaces, used, parts, strict=True), key=lambda one: _first_use(one[0]))
        for space, flags, own_parts in steps:
            if isinstance(space.buffer, ReleasedGradBuffer):
                space.state.finish_update()
            elif any(flags):  # a rank whose shard has nothing to update still sends it
                space.state.update(space.buffer, own_parts, space.group, space.scaled(factor))


def _first_use(space: OptimizedSpace) -> int:
    """Embedding and norms come before linear weights: the order of updates is the order of gathers."""
    return 1 if space.space.storage is StorageClass.LINEAR else 0
