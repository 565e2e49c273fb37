"""`FP8Optimizer`: an update rule over FP8 state for any model, as a `torch.optim.Optimizer`.

How it fits together:

- The trainable parameters of each of the user's param groups lie in a few spaces (`sharding.partition`): FP8 linear
  weights, and plain matrices and vectors by dtype. A space has one gradient buffer (`gradients`) and one optimizer
  state (`optimizer.state.SpaceState`), and a step of the rule (`optimizer.rules`) is one call a space.
- Linear weights are stored as the level says. Other parameters keep the user's dtype: FP32 is its own master, 16 bits
  have a master beside them. The rule's states of matrices are stored as the level says, of vectors in FP32. Frozen
  parameters are in no space.
- The group's numbers are read at every step. Parameters without a gradient are not updated, as in torch: their part of
  the kernel's range is left out, and they have step numbers of their own (`step_numbers`).
- The master is the truth. Values written to a weight reach it at once (`ScaledTensor.owner`), values written to a plain
  parameter at the next step (its version counter, or its memory, has changed).
- `model_ranks` says how the model lies on ranks: one, replicas, or ``fully_shard``'s shards.
- `state_dict` writes and reads state dicts.
- Nothing in a step waits for the device. A step with a gradient that is not finite is skipped there, and counted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from operator import is_
from typing import Any

import torch
from torch import Tensor

from ..nn.scaled_module import Layout
from ..optimizer.rules.rule import build_rule
from ..optimizer.space_optimizer import SpaceOptimizer
from ..optimizer.written_weights import MasterWeight, publish, write_weight
from ..quantization.amax_history import AmaxHistory, SquareSum
from ..quantization.scaled_tensor import ScaledTensor
from ..sharding.partition import ParamSpace, Slot, alone
from ..sharding.storage import ModelStorage
from .model_ranks import ModelRanks, ModelSpace
from .param_state import LocalParam
from .skipped_steps import SkippedSteps
from .state_dict import OptimizerStateDict
from .torch_optimizers import OptimizerError, check_matrices, check_options, check_params

logger = logging.getLogger(__name__)

#: What `OptimizerError` says where ``fully_shard`` came too late.
SHARDED_SINCE = (
    "fully_shard has sharded the model since initialize: first replace_linears, then fully_shard (or Accelerate's "
    "prepare under FSDP2), then initialize (docs/fsdp2.md)"
)


class FP8Optimizer(SpaceOptimizer):
    """An optimizer with state in FP8, for the parameters of one model. `build.build_optimizer` makes it.

    ``param_groups`` are the user's, whose numbers are read at every step. `GradScaler`
    works without waiting for the device. State is read through `state_dict`; ``state`` has its names alone, for each
    parameter. State of a parameter that is removed from it starts anew.

    Args:
        param_groups: torch's param groups, with the rule's options.
        defaults: for options that a group does not have; {}: no groups are added later.
        names: the names of the model's parameters, for errors and for random numbers.
        values: what computes the initial value of a parameter that is not to start from the value that it has.
        storage: what is stored in which format.
        histories: delayed scales of the model's casts; `step` advances them.
        num_gradients: gradients that each parameter is expected to receive per step.
        ranks: how the model lies on ranks; None: one rank has all of it.
        layouts: of weights that the user's model has in another shape.
        rules: the name of each group's update rule (`update_rules`).
    """

    #: GradScaler leaves unscaling and the check for inf to `step`.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        param_groups: Sequence[dict[str, Any]],
        defaults: dict[str, Any],
        *,
        names: Mapping[torch.nn.Parameter, str],
        values: Mapping[torch.nn.Parameter, Callable[[], Tensor]],
        storage: ModelStorage,
        histories: Sequence[AmaxHistory] = (),
        num_gradients: int = 1,
        ranks: ModelRanks | None = None,
        layouts: Mapping[Tensor, Layout] | None = None,
        rules: Sequence[str],
    ) -> None:
        #: By parameter with state, what this rank has of it.
        self._params: dict[Tensor, LocalParam] = {}
        self._ranks = ranks or ModelRanks()
        self._knew_ranks = _num_ranks() is not None
        self._names = names
        self._values = values
        self._num_gradients = num_gradients
        self._spaces: list[ModelSpace] = []
        self._rules = rules
        #: The param groups as they were added, each with its parameters and the name of its rule.
        self._added: list[tuple[dict[str, Any], list[torch.nn.Parameter], str]] = []
        self._frozen: list[LocalParam] = []
        device = next(iter(names)).device
        self._layouts = dict(layouts or {})
        super().__init__(param_groups, defaults, storage=storage, histories=histories, device=device)
        self._values = {}  # the masters hold them

    @cached_property
    def _skipped(self) -> SkippedSteps:
        return SkippedSteps(self.device, self._histories, self._bad_gradients)

    @cached_property
    def _whole(self) -> OptimizerStateDict:
        parts = (self._spaces, self._params, self._numbers, self._skipped.num, self._histories, self._ranks)
        return OptimizerStateDict(*parts)

    @property
    def spaces(self) -> Sequence[ModelSpace]:
        return self._spaces

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of the model's parameters; its trainable parameters get state.

        Raises:
            OptimizerError: a parameter is not the model's, or has a dtype that the optimizer does not take.
        """
        name = self._join(param_group)
        rule = build_rule(name, param_group)
        check_matrices(rule, param_group, self._names)
        params = [
            self._ranks.local_param(self._names[param], param, rule) for param in param_group["params"] if param.numel()
        ]
        for one in params:
            one.layout = self._layouts.get(one.param)
        self._frozen += [one for one in params if not one.param.requires_grad]
        self._add_spaces([one for one in params if one.param.requires_grad], param_group, name)

    def _add_spaces(self, params: Sequence[LocalParam], param_group: dict[str, Any], rule: str) -> None:
        """Give parameters of a group gradients and state."""
        self._params |= {one.param: one for one in params}
        self._name_state(params)
        of_rows = {one.rows: one for one in params if one.rows.numel()}
        for space in self._ranks.spaces(list(of_rows.values())):
            self._spaces.append(self._build(space, [of_rows[slot.param] for slot in space.slots], param_group, rule))

    @torch.no_grad()
    def take_unfrozen(self) -> None:
        """Give parameters state that were frozen when they were added and are trained now; called by every replica.

        `step` and the state dicts do so. Over several replicas each forward does, so that the first gradient is the
        mean for whoever reads it.
        """
        unfrozen = self._ranks.unfrozen([one for one in self._frozen if one.param.requires_grad])
        if not unfrozen:
            return
        self._whole.drop_consolidated()
        self._frozen = [one for one in self._frozen if one not in unfrozen]
        for group, params, rule in self._added:
            own = set(params)
            self._add_spaces([one for one in unfrozen if one.param in own], group, rule)

    def holds(self, param: torch.nn.Parameter) -> bool:
        """Whether `param` is in a param group."""
        return any(param is own for group in self.param_groups for own in group["params"])

    def _join(self, param_group: dict[str, Any]) -> str:
        """torch's `add_param_group`; the groups stay as they are if a parameter or an option cannot be used. Returns
        the name of the group's rule."""
        index = len(self._added)
        if index >= len(self._rules) and not self.defaults:
            raise OptimizerError(
                "initialize had several optimizers or rules, and no group says whose it is: add it before initialize"
            )
        super().add_param_group(param_group)
        try:
            check_params(param_group, self._names)
            check_options(self.param_groups)
        except OptimizerError:
            self.param_groups.pop()
            raise
        rule = self._rules[min(index, len(self._rules) - 1)]
        self._added.append((param_group, list(param_group["params"]), rule))
        return rule

    @torch.no_grad()
    def _build(self, space: ParamSpace, params: Sequence[LocalParam], group: dict[str, Any], rule: str) -> ModelSpace:
        """State and gradients of a new space, with the values that its parameters have."""
        slots = list(zip(space.slots, params, strict=True))
        known = [None if slot.param in self._values else one.value for slot, one in slots]
        state = self.build_state(space, group, rule)
        for slot, value in zip(space.slots, known, strict=True):
            own = self._values[slot.param]() if value is None else value  # of one at a time, as it may be in FP32
            self._ranks.broadcast([own])
            state.set_master(slot, own)
        publish(state)
        for slot in space.slots:
            if isinstance(slot.param, ScaledTensor):
                slot.param.owner = MasterWeight(state, slot)
            else:
                slot.param.data = alone(slot.param.data)
        buffer = self._ranks.grad_buffer(space, self._storage, self._num_gradients)
        buffer.attach()
        built = ModelSpace(buffer, state, group, params)
        built.see()
        return built

    def _name_state(self, params: Iterable[LocalParam]) -> None:
        """Give ``state`` all that a state dict may have of these. torch's tools take an empty ``state`` for an
        optimizer that needs a first step, and ``flatten_optimizer_state_dict`` loads what ``state`` names."""
        for one in params:
            self.state[one.param] = self._whole.names(one.rule)

    def _start_anew(self) -> None:
        """Make states and step numbers zero where the user has dropped a parameter's ``state``
        (``optimizer.state.clear()``), as in torch's optimizers. `step` and the state dicts do so."""
        if len(self.state) == len(self._params) and all(self.state.values()):
            return
        dropped = [one for param, one in self._params.items() if not self.state.get(param)]
        self._whole.restart(dropped)
        self._name_state(dropped)

    @property
    def num_skipped_steps(self) -> int:
        """Steps that changed nothing: a gradient was not finite, or a cast with a delayed scale saw such a value or
        clamped more than half of its tensor. Reading it waits for the device."""
        return int(self._skipped.num.item())

    @property
    def skip_cause(self) -> str | None:
        """The first cast with a delayed scale that was bad in the last skipped step, such as ``"not finite: input of
        encoder.0"``. Such a cast clamps what it sees, so the loss and ``p.grad`` may look healthy.

        It speaks of this rank's casts; the step is skipped on all ranks. None: they were good, no step was skipped, or
        the recipe is another one. Reading it waits for the device.
        """
        return self._skipped.cause

    @property
    def storage_bytes(self) -> dict[str, int]:
        """Bytes held on this rank, by kind: weight, master_weight, each of the rule's states, scales (of these, with
        other small tensors), main_grad and grad_scales. Frozen parameters are not counted."""
        total: dict[str, int] = {}
        for space in self._spaces:
            grads = {"main_grad": space.buffer.nbytes, "grad_scales": space.buffer.scale_bytes}
            counts = space.state.byte_counts() | grads
            for kind, count in counts.items():
                total[kind] = total.get(kind, 0) + count
        return total

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """torch's ``{"state": …, "param_groups": …}`` with plain tensors.

        Called by every replica; after `consolidate_state_dict`, by the one that it names. Before the first step all
        of the rule's states are zero.

        Raises:
            OptimizerError: another replica has the consolidated state.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        if not self.is_consolidated:
            self._prepare_to_collect()
        result = self._whole.state_dict(self.param_groups)
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, result)
            result = result if changed is None else changed
        return result

    @property
    def is_consolidated(self) -> bool:
        """Whether some replica has the whole state, as it is now (`consolidate_state_dict`)."""
        if self._whole.has_changed or next(self._written_plain(), None) is not None:
            self._whole.drop_consolidated()
        return self._whole.is_consolidated

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Gather all state on one replica, on the CPU; called by every replica.

        Until the next step or write that replica reads the state dicts of the optimizer and of the model without the
        others. Those may read the model's too: it has their stored weights, in FP8 at O3. With one replica nothing is
        to be done.

        Args:
            to: the replica's rank among the replicas; None: all of them.
        """
        if self._ranks.group is None:
            return
        self._whole.drop_consolidated()
        with torch.no_grad():
            self._prepare_to_collect()
            self._whole.consolidate(self.param_groups, keeps=to is None or to == self._ranks.group.rank())

    def _prepare_to_collect(self) -> None:
        """Meet the other replicas, and follow the user."""
        self._ranks.meet("optimizer.state_dict()")
        self._follow_user()

    def _follow_user(self) -> None:
        """Take what users did since the last step: parameters unfrozen, state dropped, values written."""
        self.take_unfrozen()
        self._start_anew()
        self.take_written_values()

    def __getstate__(self) -> dict[str, Any]:
        """A copy or a pickle would have no state, because other objects hold it.

        Raises:
            OptimizerError: always.
        """
        raise OptimizerError(
            "an FP8Optimizer is not copied or pickled: save optimizer.state_dict(), and load it into the one that "
            "initialize returns for the model"
        )

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take on the result of `state_dict`, of this or another number of replicas, or of torch's optimizer; called
        by every replica with all of the state.

        Masters in it become the weights. Load the model's state before or after: values that are the rounded masters
        leave the masters as they are.

        Raises:
            ValueError: groups or shapes differ, or the state is another optimizer's. The optimizer stays as it is.
            OptimizerError: a group has an option that the FP8 optimizer does not have.
        """
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        check_options(state_dict["param_groups"])
        self._whole.drop_consolidated()
        self._follow_user()  # a shard's master would overwrite written values
        self._warn_of_frozen(state_dict)
        self._whole.load(state_dict, self.param_groups)
        self._skipped.end_row()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _warn_of_frozen(self, state_dict: Mapping[str, Any]) -> None:
        """Say which frozen parameters have moments in a state that is loaded: they are left out."""
        own = [param for group in self.param_groups for param in group["params"]]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        frozen = {one.param for one in self._frozen if not one.param.requires_grad}
        states = state_dict["state"]
        left = [
            self._names[param] for param, key in zip(own, numbers, strict=False) if param in frozen and key in states
        ]
        if left:
            logger.warning(
                "the loaded state has moments of parameters that are frozen (%s), and they are left out: to go on "
                "training these, call requires_grad_() before load_state_dict",
                ", ".join(left[:3]) + (f" and {len(left) - 3} more" if len(left) > 3 else ""),
            )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; returns the closure's result.

        A gradient that is not finite skips the step on the device, and so does a bad cast (`num_skipped_steps`).

        Args:
            closure: computes the loss and its gradients once more.

        Raises:
            OptimizerError: the step before was the 100th in a row that was skipped; or the parameters or their groups
                are not those that the optimizer was built with.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self._update()
        return result

    @torch.no_grad()
    def _update(self) -> None:
        self._check_not_recorded()
        check_options(self.param_groups)
        self._check_groups()
        self._check_ranks()
        self._whole.drop_consolidated()
        self._follow_user()
        used = [space.buffer.settle() for space in self._spaces]
        self._ranks.finish_step()
        if not any(any(flags) for flags in used):
            return
        factor = self._grad_factor()
        moved = torch.isfinite(factor).float()
        self._skipped.count(moved)
        self.update(factor, moved, used)
        for history in self._histories:
            history.update(self._ranks.group)
        self._wait_for_weights()
        self._ranks.finish_update()
        self._skipped.tell(is_scaled=getattr(self, "grad_scale", None) is not None)

    def _bad_gradients(self) -> list[str]:
        return [name for space in self._spaces for name in space.buffer.non_finite_slots()]

    def _check_not_recorded(self) -> None:
        if self._skipped.num.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise OptimizerError(
                "optimizer.step() is inside a recorded step, where it would repeat its numbers: call it behind the step"
            )

    def _check_groups(self) -> None:
        same = len(self._added) == len(self.param_groups) and all(
            group is own and len(params) == len(own["params"]) and all(map(is_, params, own["params"]))
            for (group, params, _), own in zip(self._added, self.param_groups, strict=True)
        )
        if not same:
            own = {param for _, params, _ in self._added for param in params}
            if any(is_sharded(param) for group in self.param_groups for param in group["params"] if param not in own):
                raise OptimizerError(SHARDED_SINCE)
            raise OptimizerError(
                "param_groups are not those that the optimizer was built with, and it updates those: change numbers in "
                "the groups, add groups with add_param_group, and freeze parameters with requires_grad_(False)"
            )

    def _check_ranks(self) -> None:
        num_ranks = None if self._knew_ranks else _num_ranks()
        if num_ranks is not None and num_ranks > 1:
            raise OptimizerError(
                f"torch.distributed has {num_ranks} ranks now and had none at initialize, so gradients stay on their "
                f"ranks: call init_process_group (or make the Accelerator, or Trainer's TrainingArguments) before "
                f"initialize"
            )

    def _grad_factor(self) -> Tensor:
        """What gradients are multiplied by, FP32 [1]: 1 / GradScaler's scale, or NaN if the step is skipped."""
        start = torch.zeros(1, device=self.device)
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if found_inf is not None:
            start = torch.where(found_inf.to(start.device).reshape(1) == 0, 0.0, torch.nan)
        total = self.square_sum(start)
        factor = torch.ones_like(total) if grad_scale is None else 1.0 / grad_scale.to(total).reshape(1)
        return torch.where(torch.isfinite(total), factor, torch.nan)

    def _sum_over_ranks_(self, square_sum: SquareSum) -> None:
        self._ranks.sum_over_ranks_(square_sum, self._histories)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside of the block add their gradients on their rank, and send nothing.

        The next backward outside of it sends the sum. What reads ``p.grad``, and `step`, also do; all ranks call that.
        Inside, ranks may call backward differently often. Weights take two bytes more a parameter on each rank, above
        32 passes four. With one replica it does nothing.

        Example:
            >>> for index, batch in enumerate(micro_batches):
            ...     with optimizer.no_sync() if index + 1 < len(micro_batches) else contextlib.nullcontext():
            ...         loss_of(model, batch).backward()
            >>> optimizer.step()
        """
        return self._ranks.no_sync()

    def all_reduce_grads(self, model: torch.nn.Module | None = None) -> None:
        """Wait until ``p.grad`` is the mean over replicas; called by every replica.

        `step` and whatever reads a gradient do so themselves. This is for loops that were written for MS-AMP.

        Args:
            model: as MS-AMP's; not used.
        """
        del model
        if self._ranks.group is not None:
            for space in self._spaces:
                space.buffer.settle()
            self._ranks.finish()

    def _wait_for_weights(self) -> None:
        """Wait for the weights of other ranks. On CUDA the stream waits, not the host.

        A model of any kind may read any weight at any time, so nothing waits for a first use.
        """
        for space in self._spaces:
            if space.state.gather is not None:
                space.state.gather.wait()

    def take_written_values(self) -> None:
        """Give the masters of plain parameters the values that were written to the parameters since the last step.

        `step` does so. Memory that was exchanged (``param.data = …``) is exchanged back, with its values.
        """
        for space, slot, one in self._written_plain():
            write_weight(space.state, slot, one.written_value(space.state, slot))
            one.see()

    def _written_plain(self) -> Iterator[tuple[ModelSpace, Slot, LocalParam]]:
        """Each plain parameter that was written to since its values were its master's."""
        for space in self._spaces:
            if space.is_plain:
                for slot, one in zip(space.space.slots, space.params, strict=True):
                    if one.is_written:
                        yield space, slot, one


def is_sharded(param: Tensor) -> bool:
    """Whether `param` is one that torch's ``fully_shard`` has made."""
    return any(base.__name__ == "DTensor" for base in type(param).__mro__)


def is_fully_sharded(model: torch.nn.Module) -> bool:
    """Whether torch's ``fully_shard`` was called on the model or on a part of it."""
    return any(base.__name__ == "FSDPModule" for module in model.modules() for base in type(module).__mro__)


def _num_ranks() -> int | None:
    """Ranks of torch.distributed; None before it is initialised."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    return torch.distributed.get_world_size()
