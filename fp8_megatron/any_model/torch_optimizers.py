"""What is read of the user's ``torch.optim`` optimizers."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from ..optimizer.rules.rule import MatrixRule, UpdateRule, recognised
from ..update_rules import RULES

#: Options of torch's optimizers that change the update and that the FP8 optimizer does not have.
_UNKNOWN_OPTIONS = ("amsgrad", "maximize", "differentiable", "capturable")
#: Where an optimizer keeps hooks that other code has registered.
_HOOKS = tuple(
    f"_optimizer_{event}_{when}_hooks"
    for event in ("step", "state_dict", "load_state_dict")
    for when in ("pre", "post")
)
#: Dtypes that a parameter may have beside FP8 weights.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.complex64)


class OptimizerError(UserError):
    """The optimizer, or a parameter that it holds, cannot be used with FP8."""


#: What a user gives for a model: one optimizer, or several that each have some of its parameters.
Given = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


@dataclass(frozen=True)
class UserOptimizers:
    """The user's optimizers of one model, for all of which one `FP8Optimizer` stands.

    Attributes:
        each: one, or several if the user gave a sequence.
        rules: the name of the update rule of each param group.
    """

    each: tuple[torch.optim.Optimizer, ...]
    rules: tuple[str, ...]

    @classmethod
    def of(cls, given: Given) -> UserOptimizers:
        """Optimizers that are unused, and have no options that the FP8 optimizer has not.

        Raises:
            OptimizerError: one has no update rule, or has something that the FP8 optimizer has not.
        """
        each = tuple(given) if isinstance(given, Sequence) else (given,)
        if not each:
            raise OptimizerError("optimizer is empty: give one, or a list such as [Muon(…), AdamW(…)]")
        rules = [rule for one in each for rule in _rules_of(one)]
        for hooks in _HOOKS:
            if sum(bool(getattr(one, hooks)) for one in each) > 1:
                raise OptimizerError(
                    f"several of the optimizers have hooks ({hooks}), and one takes their place: register them on the "
                    f"optimizer that initialize returns"
                )
        return cls(each, tuple(rules))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Of all of them, in order."""
        return [group for one in self.each for group in one.param_groups]

    @property
    def defaults(self) -> dict[str, Any]:
        """For options that a group does not have. Several optimizers, or rules, have none: groups are complete."""
        return dict(self.each[0].defaults) if len(self.each) == 1 else {}

    def check_shares(self, names: Mapping[torch.nn.Parameter, str]) -> None:
        """Check that several optimizers have each trained parameter of the model once.

        Raises:
            OptimizerError: two have one, or none has.
        """
        owner: dict[torch.nn.Parameter, int] = {}
        for index, one in enumerate(self.each):
            for param in (param for group in one.param_groups for param in group["params"]):
                if owner.setdefault(param, index) != index and param in names:
                    raise OptimizerError(
                        f"optimizer[{owner[param]}] and optimizer[{index}] both hold {names[param]}: give it to one"
                    )
        without = [name for param, name in names.items() if param.requires_grad and param not in owner]
        if len(self.each) > 1 and without:
            raise OptimizerError(
                f"none of the optimizers holds {_first(without)}: give them to one, or call requires_grad_(False)"
            )

    def use_params(self, replaced: Mapping[torch.nn.Parameter, torch.nn.Parameter]) -> list[dict[str, Any]]:
        """The param groups, with replaced parameters in place of the old ones.

        The dicts are the same objects, so a learning-rate scheduler that holds an old optimizer sets the rates of the
        new one too.

        Raises:
            OptimizerError: parameters that became one are in several groups.
        """
        groups_of: dict[torch.nn.Parameter, int] = {}
        for index, group in enumerate(self.param_groups):
            group["params"] = list(dict.fromkeys(replaced.get(param, param) for param in group["params"]))
            for param in group["params"]:
                if groups_of.setdefault(param, index) != index:
                    raise OptimizerError(
                        f"param_groups[{groups_of[param]}] and [{index}] hold parts of one weight of shape "
                        f"{tuple(param.shape)}: put the parts of a Transformer Engine layer into one group"
                    )
        return self.param_groups

    def give_place_to(self, built: torch.optim.Optimizer) -> None:
        """Let `built` have their hooks, for it stands for them from now on.

        Learning-rate schedulers that hold one of them are told that it has made a step: they do not see those of
        `built`, and would warn of a wrong order.
        """
        for hooks in _HOOKS:  # the same dicts, from which handles remove their hook
            setattr(built, hooks, max((getattr(one, hooks) for one in self.each), key=len))
        for one in self.each:
            one._opt_called = True  # type: ignore[attr-defined]


def _rules_of(optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of the update rules of an optimizer's groups; see `UserOptimizers.of`."""
    kind = type(optimizer)
    rules = recognised(optimizer)
    if rules is None:
        known = dict.fromkeys(place for entry in RULES.values() for place in entry.stands_for)
        raise OptimizerError(
            f"optimizer is {kind.__module__}.{kind.__qualname__}: FP8 state needs one of {', '.join(known)}"
        )
    if optimizer.state:
        raise OptimizerError(
            f"the optimizer has state of {len(optimizer.state)} parameters: call initialize before the first step, and "
            f"load the state into the optimizer that it returns"
        )
    check_options(optimizer.param_groups)
    return rules


def check_options(groups: Sequence[Mapping[str, Any]]) -> None:
    """Check that param groups ask for nothing that the FP8 optimizer would ignore.

    Raises:
        OptimizerError: a group does.
    """
    for index, group in enumerate(groups):
        for option in _UNKNOWN_OPTIONS:
            if group.get(option):
                raise OptimizerError(
                    f"param_groups[{index}] has {option}={group[option]}, which the FP8 optimizer does not have: "
                    f"leave {option} out, or set it to False"
                )


def look_before_steps(optimizer: torch.optim.Optimizer, look: Callable[[torch.optim.Optimizer], bool]) -> None:
    """Call ``look(optimizer)`` in front of each step, until it returns True.

    The hook stays: torch iterates over the hooks that it calls, so none may remove itself.
    """
    looks = [look]

    def hook(stepping: torch.optim.Optimizer, *unused: Any) -> None:
        if looks and looks[0](stepping):
            looks.clear()

    optimizer.register_step_pre_hook(hook)


def check_matrices(rule: UpdateRule, group: Mapping[str, Any], names: Mapping[torch.nn.Parameter, str]) -> None:
    """Check that a rule of matrices has nothing else.

    Raises:
        OptimizerError: it has.
    """
    if not isinstance(rule, MatrixRule):
        return
    for param in group["params"]:
        if param.ndim != 2 or param.is_complex():
            raise OptimizerError(
                f"{names[param]} has shape {tuple(param.shape)}, and Muon takes matrices: give it to an AdamW"
            )


def _first(names: Sequence[str]) -> str:
    """The first three names, and the number of the others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def check_params(
    group: Mapping[str, Any], names: Mapping[torch.nn.Parameter, str], scaled: Container[torch.nn.Parameter] = ()
) -> None:
    """Check the parameters of one group.

    Args:
        scaled: FP8 parameters whose scales are known.

    Raises:
        OptimizerError: one is not the model's or comes twice, or has a dtype or device that the FP8 optimizer does not
            take.
    """
    seen: set[Tensor] = set()
    for param in group["params"]:
        if param not in names:
            raise OptimizerError(
                f"the optimizer holds a parameter of shape {tuple(param.shape)} that the model did not have at "
                f"initialize: build it from model.parameters() of this model, and add layers before initialize"
            )
        if param.dtype not in _DTYPES and param not in scaled:
            known = ", ".join(str(dtype) for dtype in _DTYPES)
            raise OptimizerError(f"{names[param]} is {param.dtype}: parameters are {known}; convert the model first")
        if param.requires_grad and getattr(param, "reduced_by_ddp", False):
            raise OptimizerError(
                f"torch's DDP reduces the gradient of {names[param]} already, which no FP8 optimizer held: add its "
                f"param group before DDP wraps the model"
            )
        if param in seen:
            raise OptimizerError(
                f"the optimizer holds {names[param]} twice: give it each parameter once, as model.parameters() does"
            )
        seen.add(param)
        if param.is_meta:
            raise OptimizerError(f"{names[param]} is on the meta device: give the model values first (to_empty, init)")
    devices = {param.device: names[param] for param in names if param.requires_grad}
    if len(devices) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise OptimizerError(f"the model's parameters are on several devices ({places}): move it to one")
