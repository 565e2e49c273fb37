"""The optimizer of a rank of a megatron-core run: clip, update the shards that the rank owns, send the weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ..device.group import Group
from ..quantization.amax_history import AmaxHistory, SquareSum
from ..sharding.data_parallel import DataParallelModule
from ..sharding.gradient import GradBuffer
from ..sharding.partition import ParamSpace, StorageClass
from ..sharding.released_grads import ReleasedGrad, ReleasedGradBuffer
from ..sharding.storage import ModelStorage
from ..update_rules import RULES
from . import statistics
from .hyperparameters import OptimizerSettings
from .loss_scale import LossScale
from .matrix_state import MatrixSpaceState
from .rules.rule import all_states
from .space_optimizer import OptimizedSpace, SpaceOptimizer
from .state import SpaceState


class Copied(Protocol):
    """The end of copies on another stream, such as a `torch.cuda.Event`."""

    def wait(self) -> None:
        """Make the current stream wait for it."""


class FP8DistributedOptimizer(SpaceOptimizer):
    """An update rule over the spaces of all model chunks of a rank, state sharded over each space's replicas.

    Of a model that is evaluated it holds the masters alone, from which the weights are derived.

    `param_groups` has one group per space with Megatron's keys (`lr`, `weight_decay`, `max_lr`, `min_lr`, `wd_mult`,
    `is_decoupled_lr`, `lr_mult`) and the rule's options. megatron-core's scheduler sets the first two. Vectors (norms,
    biases) have no decay.

    Args:
        model: this rank's model chunks; their parameters have no values until `load_weights`.
        storage: what the chunks were built with.
        world: the ranks that hold the whole model between them and share the gradient norm; None for one rank.
        device: of the step count and the norm.
        loss_scale: the factor of the loss; None: 1.
        histories: delayed scales of the model's casts. A step in which a cast saw a value that is not finite is
            skipped.
    """

    def __init__(
        self,
        model: Sequence[DataParallelModule],
        settings: OptimizerSettings,
        storage: ModelStorage,
        *,
        world: Group | None,
        device: torch.device,
        loss_scale: LossScale | None = None,
        histories: Sequence[AmaxHistory] = (),
    ) -> None:
        self.settings = settings
        #: What the update rule stores, of any parameter of the model.
        self.rule_states = all_states(settings.rule, settings.all_options)
        self.model = model
        self.loss_scale = loss_scale
        self._world = world
        self._copied: Copied | None = None
        # The same on all ranks, although one rank may have no linear weight in FP8.
        self._releases = storage.releases_gradients
        #: bool [1]: whether the backward of this step has updated a parameter.
        self._released_moved = torch.zeros(1, dtype=torch.bool, device=device)
        owned = [(chunk, buffer) for chunk in model for buffer in chunk.grad_buffers]
        groups = [_param_group(buffer.space, settings) for _, buffer in owned]
        super().__init__(groups, {}, storage=storage, histories=histories, device=device)
        self._spaces: list[OptimizedSpace] = []
        for (chunk, buffer), group in zip(owned, groups, strict=True):
            state = self.build_state(buffer.space, group, settings.rule)
            self._spaces.append(OptimizedSpace(buffer, state, group))
            if state.gather is not None:
                chunk.receive_weights_through(state.gather)
        self._every_slot = [[True] * len(buffer.space.slots) for _, buffer in owned]
        self._take_released()

    @property
    def spaces(self) -> Sequence[OptimizedSpace]:
        return self._spaces

    @property
    def buffers(self) -> list[GradBuffer]:
        """The gradients of each space."""
        return [space.buffer for space in self._spaces]

    @property
    def states(self) -> list[SpaceState]:
        """The state of each space."""
        return [space.state for space in self._spaces]

    def load_weights(self, values: Iterable[tuple[str, Tensor]]) -> None:
        """Set master weights by name and derive the weights; called by every rank.

        Args:
            values: (name, value in any float dtype, this tensor-parallel rank's shard).

        Raises:
            ValueError: an unknown or missing name, or another shape, with both shapes.
        """
        self.wait_for_copies()
        by_name = {slot.name: (state, slot) for state, slot in self.slots()}
        missing = set(by_name)
        for name, value in values:
            if name not in by_name:
                raise ValueError(f"the model has no parameter {name!r}")
            state, slot = by_name[name]
            state.set_master(slot, value)
            missing.discard(name)
        if missing:
            raise ValueError(f"no value for parameter {min(missing)!r} ({len(missing)} missing)")
        for state in self.states:
            state.derive_weights()

    def hold_state(self, copied: Copied) -> None:
        """Masters and states are being copied: the next update waits for `copied`, on the device."""
        self._copied = copied

    def wait_for_copies(self) -> None:
        """Let the current stream write masters and states. The host does not wait."""
        if self._copied is not None:
            self._copied.wait()
            self._copied = None

    def _take_released(self) -> None:
        """Update each parameter of a released space as soon as its gradient is written."""
        for space in self._spaces:
            if space.state.is_trained and isinstance(space.buffer, ReleasedGradBuffer):
                assert self.settings.clip_grad == 0, (
                    f"clip_grad({self.settings.clip_grad}) with gradients that are released"
                )
                space.buffer.release_to(partial(self._update_released, space))

    @torch.no_grad()
    def _update_released(self, space: OptimizedSpace, grad: ReleasedGrad) -> None:
        """One parameter's step, inside its backward; skipped where its own gradient is not finite, or a cast so far."""
        self.wait_for_copies()
        seen = grad.squared_norm
        for history in self._histories:
            seen = torch.maximum(seen, history.amax.amax(dim=0, keepdim=True))
        factor = space.scaled(seen * 0.0 + 1.0)  # NaN where it is not finite
        self._released_moved.logical_or_(torch.isfinite(factor))
        space.state.update_slot(grad, space.group, grad_factor=factor, step_count=self.step_count + 1)

    def _moved(self, factor: Tensor) -> Tensor:
        """bool [1], the same on all ranks: whether this step updates anything."""
        moved = torch.isfinite(factor)
        if not self._releases:
            return moved
        moved = moved | self._released_moved
        self._released_moved.zero_()
        if self._world is not None and self._world.size() > 1:
            count = moved.float()
            torch.distributed.all_reduce(count, group=self._world)
            moved = count > 0
        return moved

    def _sum_over_ranks_(self, square_sum: SquareSum) -> None:
        if self._world is not None and self._world.size() > 1:
            torch.distributed.all_reduce(square_sum, group=self._world)

    def _before_update(self) -> None:
        self.wait_for_copies()

    def params_norm(self) -> Tensor:
        """`statistics.params_norm` of this optimizer's state."""
        return statistics.params_norm(self.states, self._world, self.device)

    def num_zeros_in_grad(self) -> Tensor:
        """`statistics.num_zeros` of this optimizer's gradients."""
        return statistics.num_zeros(self.buffers, self._world, self.device)

    def measure_updates(self, measures: bool) -> bool:
        """Let whole matrices be measured in the next step, or not; whether the update rule has such. Called by every
        rank, before the backward, which may update."""
        for state in self.states:
            if isinstance(state, MatrixSpaceState):
                state.measures = measures
        return measures and RULES[self.settings.rule].rest is not None

    def update_figures(self) -> dict[str, Tensor]:
        """`statistics.update_figures` of this optimizer's state."""
        return statistics.update_figures(self.states, self._world, self.device)

    @torch.no_grad()
    def step(self, loss: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Clip, update and send the weights; returns the gradient norm before clipping, FP32 [1] on the device.

        A norm that is not finite skips the step on the device: nothing changes, nothing waits. Spaces with released
        gradients were updated during backward; there, only parameters with a finite gradient changed.

        Args:
            loss: FP32 [1], this rank's part of the step's loss. If it is not finite on any rank, the norm is NaN: a
                target whose logit is -inf has the loss inf, and finite gradients.
        """
        start = torch.zeros(1, device=self.device) if loss is None else loss * 0.0
        norm = self.square_sum(start).sqrt()
        factor = clip_factor(norm, self.settings.clip_grad)
        if self.loss_scale is not None:
            norm = norm / self.loss_scale.scale
            factor = clip_factor(norm, self.settings.clip_grad) / self.loss_scale.scale
            self.loss_scale.update(~torch.isfinite(norm))
        for space in self._spaces:
            space.buffer.end_step(torch.isfinite(factor))
        self.update(factor, self._moved(factor).float(), self._every_slot)
        return norm


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients are multiplied by, FP32 [1]: min(1, max_norm / norm), 1 if max_norm is 0, NaN for a bad norm.

    With NaN the optimizer step writes nothing.
    """
    factor = torch.ones_like(norm) if max_norm <= 0 else (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return torch.where(torch.isfinite(norm), factor, torch.full_like(norm, torch.nan))


def _param_group(space: ParamSpace, settings: OptimizerSettings) -> dict[str, Any]:
    """A space's parameter group, with Megatron's keys."""
    peak, least = space.rate.ends(settings)
    options = dict(settings.all_options)
    if "eps" in options:
        options["eps"] *= space.rate.lr_mult
    decay_multiplier = 0.0 if space.storage is StorageClass.VECTOR else 1.0
    return {
        "params": [slot.param for slot in space.slots],
        "lr": peak,
        "max_lr": peak,
        "min_lr": least,
        "weight_decay": settings.weight_decay * decay_multiplier,
        "wd_mult": decay_multiplier,
        "is_decoupled_lr": space.rate.is_decoupled,
        "lr_mult": space.rate.lr_mult,
        **options,
    }
