"""The whole state of an `FP8Optimizer` as a state dict, and back.

`param_state` has the entry of one parameter. Here the entries of all parameters get torch's numbers, are checked and
taken on. The first entry also has what belongs to no parameter: delayed scales, skipped steps, and how many gradients
of a step the storage of each space has room for.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..optimizer.rules.rule import UpdateRule
from ..optimizer.state import StateTensor
from ..optimizer.step_numbers import StepNumbers
from ..optimizer.written_weights import MasterWeight, publish
from ..quantization.amax_history import AmaxHistory
from ..quantization.scaled_tensor import ScaledTensor
from .model_ranks import ModelRanks, ModelSpace
from .param_state import (
    GRADIENTS,
    Entry,
    LocalParam,
    StateNames,
    check_param_state,
    load_param_state,
    param_state,
    state_keys,
)
from .torch_optimizers import OptimizerError

#: The user's param groups, as torch's optimizers have them.
ParamGroups = Sequence[Mapping[str, Any]]
#: State by the numbers of parameters.
Entries = dict[Any, Entry]

#: What a param group keeps when a state is loaded: decoupled decay stays so with a state of the L2 term.
_OWN_KEYS = ("params", "decoupled_weight_decay")


class OptimizerStateDict:
    """Writes and reads the state of one optimizer.

    Methods take the optimizer's param groups, as they are now.

    Args:
        spaces: the optimizer's, to which it may add.
        params: by parameter with state, what this rank has of it. The optimizer may add to it.
        numbers: the parameters' numbers of steps.
        num_skipped: FP32 [1], steps that changed nothing.
        histories: delayed scales of the model's casts.
        ranks: how the model lies on ranks.
    """

    def __init__(
        self,
        spaces: Sequence[ModelSpace],
        params: Mapping[Tensor, LocalParam],
        numbers: StepNumbers,
        num_skipped: Tensor,
        histories: Sequence[AmaxHistory],
        ranks: ModelRanks,
    ) -> None:
        self._spaces = spaces
        self._params = params
        self._numbers = numbers
        self._num_skipped = num_skipped
        self._histories = histories
        self._ranks = ranks
        self._consolidated: Entries | None = None
        self._is_consolidated = False

    def names(self, rule: UpdateRule) -> StateNames:
        """All that a state dict may have of a parameter."""
        states = [history.state_dict() for history in self._histories]
        run = [f"delayed_{index}_{key}" for index, state in enumerate(states) for key in state]
        names = ["step", *sorted(state_keys(rule)), GRADIENTS, "skipped_steps", *run]
        return StateNames(dict.fromkeys(names))

    def restart(self, params: Iterable[LocalParam]) -> None:
        """Make states and step numbers of parameters zero. Masters stay."""
        dropped = set(params)
        slots = [
            (place, index)
            for place, space in enumerate(self._spaces)
            for index, one in enumerate(space.params)
            if one in dropped
        ]
        for place, index in slots:
            state = self._spaces[place].state
            load_param_state(state, state.space.slots[index], {})
        self._numbers.restart(slots)

    def state_dict(self, groups: ParamGroups) -> dict[str, Any]:
        """torch's ``{"state": …, "param_groups": …}``. Called by every replica, or by the one that has consolidated it.

        Raises:
            OptimizerError: another replica has.
        """
        consolidated = self._consolidated
        if consolidated is None and self._is_consolidated:
            raise OptimizerError(
                "consolidate_state_dict has gathered the state on another rank: call optimizer.state_dict() there, or "
                "consolidate_state_dict(to=None) on every rank"
            )
        entries = self._collect(groups) if consolidated is None else {key: {**one} for key, one in consolidated.items()}
        return {"state": entries, "param_groups": _packed(groups)}

    def _collect(self, groups: ParamGroups) -> Entries:
        """The entries by the parameters' numbers, with weights as they are stored."""
        states: dict[LocalParam, Entry] = {}
        for place, space in enumerate(self._spaces):
            for index, (slot, one) in enumerate(zip(space.space.slots, space.params, strict=True)):
                number = self._numbers.number_of(place, index).reshape(()).cpu()
                states[one] = {"step": number, **param_state(space.state, slot)}
        self._ranks.complete_(states)
        indices = _indices(groups)
        found = sorted((indices[one.param], one) for one in states)
        for _, one in found[:1]:
            states[one].update(self._run_state())
        return {number: one.to_global(states[one]) for number, one in found}

    def _run_state(self) -> dict[str, Tensor]:
        """What a resumed run needs that belongs to no parameter."""
        rooms = [space.buffer.most_gradients for space in self._spaces]
        run = {GRADIENTS: torch.tensor(rooms, device="cpu"), "skipped_steps": self._num_skipped.cpu()}
        for index, history in enumerate(self._histories):
            run |= {f"delayed_{index}_{key}": tensor.clone() for key, tensor in history.state_dict().items()}
        return run

    @property
    def is_consolidated(self) -> bool:
        """Whether some replica has the whole state of the last step (`consolidate`)."""
        return self._is_consolidated

    @property
    def has_changed(self) -> bool:
        """Whether an FP8 weight was written since `consolidate`. All replicas say the same."""
        return self._is_consolidated and not all(owner.is_consolidated for owner in self._masters())

    def consolidate(self, groups: ParamGroups, *, keeps: bool) -> None:
        """Collect the state of all replicas; called by every one. `drop_consolidated` ends it.

        Args:
            keeps: whether this rank keeps it, on the CPU, and has `state_dict` without the others.
        """
        entries = self._collect(groups)
        self._is_consolidated = True
        for owner in self._masters():
            owner.is_consolidated = True
        if not keeps:
            return
        self._consolidated = entries
        indices = _indices(groups)
        for param in self._weights():
            entry = entries[indices[param]]
            if "master_weight_payload" in entry and isinstance(param.owner, MasterWeight):
                stored = StateTensor(entry["master_weight_payload"].view(-1), entry["master_weight_scale"])
                param.owner.consolidated = stored.load().view(param.shape)

    def drop_consolidated(self) -> None:
        """Forget what `consolidate` has collected: a value has changed, or is about to."""
        if self._is_consolidated:
            self._consolidated, self._is_consolidated = None, False
            for owner in self._masters():
                owner.consolidated, owner.is_consolidated = None, False

    def _masters(self) -> Iterator[MasterWeight]:
        return (param.owner for param in self._weights() if isinstance(param.owner, MasterWeight))

    def _weights(self) -> Iterator[ScaledTensor]:
        """The weights that a master owns."""
        for space in self._spaces:
            yield from (slot.param for slot in space.space.slots if isinstance(slot.param, ScaledTensor))

    def load(self, state_dict: Mapping[str, Any], groups: Sequence[dict[str, Any]]) -> None:
        """Take on a state dict with all of the state; called by every replica. Groups take its numbers.

        Raises:
            ValueError: groups or shapes differ, or the state is another optimizer's. Nothing has changed.
        """
        saved_groups = state_dict["param_groups"]
        for space in self._spaces:
            for index, (group, saved) in enumerate(zip(groups, saved_groups, strict=False)):
                if group is space.group:
                    _check_group(space.state.rule, index, saved)
        present = {number: _present(entry) for number, entry in state_dict["state"].items()}
        entries = self._matched(present, groups, saved_groups)
        for space in self._spaces:
            rule = space.state.rule
            for slot, one in zip(space.space.slots, space.params, strict=True):
                if not rule.counts_steps and state_keys(rule) & entries[one].keys():
                    entries[one] = {"step": 1.0, **entries[one]}
                check_param_state(rule, slot, entries[one])
        for group, saved in zip(groups, saved_groups, strict=True):
            group.update({key: copy.deepcopy(value) for key, value in saved.items() if key not in _OWN_KEYS})
        for space in self._spaces:
            for slot, one in zip(space.space.slots, space.params, strict=True):
                load_param_state(space.state, slot, entries[one])
            publish(space.state)
            space.see()
        steps = [[float(entries[one].get("step", 0.0)) for one in space.params] for space in self._spaces]
        self._numbers.set_numbers(steps)
        # The first parameter's; torch.distributed.checkpoint gives names, in any order.
        self._load_run_state(next((entry for entry in present.values() if "skipped_steps" in entry), {}))

    def _matched(
        self, saved_states: Entries, groups: ParamGroups, saved_groups: ParamGroups
    ) -> dict[LocalParam, Entry]:
        """This rank's part of the saved entry of each parameter with state; {} if there is none."""
        sizes, saved_sizes = ([len(group["params"]) for group in each] for each in (groups, saved_groups))
        if sizes != saved_sizes:
            raise ValueError(f"the saved param groups have {saved_sizes} parameters, the optimizer's have {sizes}")
        number_of = dict(zip(_numbers_of(_packed(groups)), _numbers_of(saved_groups), strict=True))
        indices = _indices(groups)
        return {
            one: one.to_local(saved_states.get(number_of[indices[param]], {})) for param, one in self._params.items()
        }

    def _load_run_state(self, run: Mapping[str, Any]) -> None:
        rooms = [int(room) for room in torch.as_tensor(run.get(GRADIENTS, 1), device="cpu").flatten()]
        if len(rooms) != len(self._spaces):  # of a rank with other parts of the model
            rooms = [max(rooms)] * len(self._spaces)
        for space, room in zip(self._spaces, rooms, strict=True):
            space.buffer.expect(room)
        self._num_skipped.fill_(float(run.get("skipped_steps", 0.0)))
        for index, history in enumerate(self._histories):
            prefix = f"delayed_{index}_"
            saved = {key.removeprefix(prefix): value for key, value in run.items() if key.startswith(prefix)}
            history.load_state_dict(saved)


def _check_group(rule: UpdateRule, index: int, saved: Mapping[str, Any]) -> None:
    """Check that a saved group is one of the rule: an optimizer without state could not be told by it.

    Raises:
        ValueError: it lacks an option.
    """
    for option in rule.required_options:
        if option not in saved:
            raise ValueError(
                f"the saved param_groups[{index}] has {', '.join(map(str, saved))} and no {option}: it is another "
                f"optimizer's"
            )


def _present(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What an entry has: ``flatten_optimizer_state_dict`` gives empty dicts for what was not saved, torch None."""
    return {key: value for key, value in entry.items() if isinstance(value, Tensor) or value not in ({}, None)}


def _indices(groups: ParamGroups) -> dict[Tensor, int]:
    """Parameter → its number over all groups."""
    params = dict.fromkeys(param for group in groups for param in group["params"])
    return {param: number for number, param in enumerate(params)}


def _packed(groups: ParamGroups) -> list[dict[str, Any]]:
    """The groups with numbers in place of parameters."""
    indices = _indices(groups)
    return [{**group, "params": [indices[param] for param in group["params"]]} for group in groups]


def _numbers_of(groups: ParamGroups) -> list[int]:
    """The parameters' numbers, in order, of groups that have them in place of parameters."""
    return [number for group in groups for number in group["params"]]
