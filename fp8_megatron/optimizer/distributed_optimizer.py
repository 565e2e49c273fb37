"""The optimizer of a rank: clip, update the shards that the rank owns, send the weights.

Every replica owns an even share of every bucket. Each of d replicas thus holds 1/d of the state and does 1/d of the
work. A single replica runs the same code with d = 1. Clipping, the non-finite check and the step count stay on the
device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ..device.group import Group
from ..dtypes import StorageDtype
from ..quantization.amax_history import AmaxHistory
from ..sharding.data_parallel import DataParallelModule
from ..sharding.gradient import GradBuffer
from ..sharding.partition import Slot, StorageClass
from ..sharding.released_grads import ReleasedGrad, ReleasedGradBuffer
from ..sharding.storage import ModelStorage
from . import statistics
from .clip_grads import clip_factor, global_grad_norm
from .hyperparameters import OptimizerSettings
from .loss_scale import LossScale
from .rules.rule import build_rule
from .split_state import SplitSpaceState
from .state import SpaceState


class Copied(Protocol):
    """The end of copies on another stream, such as a `torch.cuda.Event`."""

    def wait(self) -> None:
        """Make the current stream wait for it."""


class FP8DistributedOptimizer:
    """An update rule over the spaces of all model chunks of a rank, state sharded over each space's replicas.

    Of a model that is evaluated it holds the masters alone, from which the weights are derived.

    `param_groups` has one group per space with Megatron's keys (`lr`, `weight_decay`, `max_lr`, `min_lr`, `wd_mult`,
    `is_decoupled_lr`) and the rule's options. megatron-core's scheduler sets the first two. Vectors (norms,
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
        #: What the update rule stores beside each weight.
        self.rule_states = build_rule(settings.rule, settings.all_options).states
        self.device = device
        self.model = model
        self.loss_scale = loss_scale
        self.buffers: list[GradBuffer] = [buffer for chunk in model for buffer in chunk.grad_buffers]
        self.states: list[SpaceState] = []
        for chunk in model:
            for buffer in chunk.grad_buffers:
                formats = storage.of_state(buffer.space.storage)
                is_split = formats.master_weight is StorageDtype.SPLIT
                rule = build_rule(settings.rule, settings.all_options, is_split=is_split)
                kind = SplitSpaceState if is_split else SpaceState
                state = kind(buffer.space, formats, rule, is_trained=storage.is_trained)
                self.states.append(state)
                if state.gather is not None:
                    chunk.receive_weights_through(state.gather)
        self.param_groups = [_param_group(state, settings) for state in self.states]
        self.step_count = torch.zeros(1, device=device)
        self._world = world
        self._histories = [history for history in histories if history.num_slots]
        self._copied: Copied | None = None
        # The same on all ranks, although one rank may have no linear weight in FP8.
        self._releases = storage.releases_gradients
        #: bool [1]: whether the backward of this step has updated a parameter.
        self._released_moved = torch.zeros(1, dtype=torch.bool, device=device)
        self._take_released()

    def slots(self) -> Iterator[tuple[SpaceState, Slot]]:
        """Every parameter of this model-parallel rank with the state that holds this replica's share of it."""
        for state in self.states:
            for slot in state.space.slots:
                yield state, slot

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
        for buffer, state, group in zip(self.buffers, self.states, self.param_groups, strict=True):
            if isinstance(buffer, ReleasedGradBuffer):
                assert self.settings.clip_grad == 0, (
                    f"clip_grad({self.settings.clip_grad}) with gradients that are released"
                )
                buffer.release_to(partial(self._update_released, state, group))

    @torch.no_grad()
    def _update_released(self, state: SpaceState, group: dict[str, Any], grad: ReleasedGrad) -> None:
        """One parameter's step, inside its backward; skipped where its own gradient is not finite, or a cast so far."""
        self.wait_for_copies()
        seen = grad.squared_norm
        for history in self._histories:
            seen = torch.maximum(seen, history.amax.amax(dim=0, keepdim=True))
        factor = _scaled(seen * 0.0 + 1.0, state)  # NaN where it is not finite
        self._released_moved.logical_or_(torch.isfinite(factor))
        state.update_slot(grad, group, grad_factor=factor, step_count=self.step_count + 1)

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

    def _by_first_use(self) -> list[tuple[GradBuffer, SpaceState, dict[str, Any]]]:
        """Buffers, states and groups, ordered by when the next forward needs the weights (embedding and norms first):
        the order of updates is the order of gathers.
        """
        together = zip(self.buffers, self.states, self.param_groups, strict=True)
        return sorted(together, key=lambda three: _first_use(three[1].space.storage))

    def params_norm(self) -> Tensor:
        """`statistics.params_norm` of this optimizer's state."""
        return statistics.params_norm(self.states, self._world, self.device)

    def num_zeros_in_grad(self) -> Tensor:
        """`statistics.num_zeros` of this optimizer's gradients."""
        return statistics.num_zeros(self.buffers, self._world, self.device)

    @torch.no_grad()
    def step(self, loss: Tensor | None = None) -> Tensor:
        """Clip, update and send the weights; returns the gradient norm before clipping, FP32 [1] on the device.

        A norm that is not finite skips the step on the device: nothing changes, nothing waits. Spaces with released
        gradients were updated during backward; there, only parameters with a finite gradient changed.

        Args:
            loss: FP32 [1], this rank's part of the step's loss. If it is not finite on any rank, the norm is NaN.
        """
        norm = global_grad_norm(self.buffers, self._world, self.device, self._histories, loss)
        factor = clip_factor(norm, self.settings.clip_grad)
        if self.loss_scale is not None:
            norm = norm / self.loss_scale.scale
            factor = clip_factor(norm, self.settings.clip_grad) / self.loss_scale.scale
            self.loss_scale.update(~torch.isfinite(norm))
        for buffer in self.buffers:
            buffer.end_step(torch.isfinite(factor))
        self.step_count += self._moved(factor)
        self.wait_for_copies()
        for buffer, state, group in self._by_first_use():
            if isinstance(buffer, ReleasedGradBuffer):
                state.finish_update()
                continue
            state.update(buffer, group, grad_factor=_scaled(factor, state), step_count=self.step_count)
        return norm


def _param_group(state: SpaceState, settings: OptimizerSettings) -> dict[str, Any]:
    """A space's parameter group, with Megatron's keys."""
    decoupled = state.space.has_decoupled_lr
    peak, least = settings.rates(decoupled=decoupled)
    return {
        "params": [slot.param for slot in state.space.slots],
        "lr": peak,
        "max_lr": peak,
        "min_lr": least,
        "weight_decay": settings.weight_decay * _decay_multiplier(state),
        "wd_mult": _decay_multiplier(state),
        "is_decoupled_lr": decoupled,
        **settings.all_options,
    }


def _scaled(factor: Tensor, state: SpaceState) -> Tensor:
    """`factor` with that of the space's own gradients."""
    own = state.space.sharing.grad_factor
    return factor if own == 1.0 else factor * own


def _first_use(storage: StorageClass) -> int:
    return 1 if storage is StorageClass.LINEAR else 0


def _decay_multiplier(state: SpaceState) -> float:
    return 0.0 if state.space.storage is StorageClass.VECTOR else 1.0
