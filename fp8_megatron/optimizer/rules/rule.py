"""`UpdateRule`: what an optimizer stores beside a weight, and its step. Everything else reads this declaration.

State of a space, checkpoints, state dicts, planning, reports and hashes of replicas go by `UpdateRule.states`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...device.group import Group
from ...dtypes import E4M3
from ...errors import UserError
from ...kernels import ops
from ...storage import StateSpec, StorageDtype, StorageFormats
from ...update_rules import RULES, rule_of_space


class UpdateRule(ABC):
    """One kind of optimizer.

    Attributes:
        states: what it stores beside each weight, in the order of `ops.FlatOperands.states`.

    Args:
        options: of the param group, at its start.
    """

    states: tuple[StateSpec, ...] = ()
    #: Options of a param group that must be in a saved one.
    required_options: ClassVar[tuple[str, ...]] = ()
    #: Whether the optimizer that it stands for saves the number of steps. If not, a saved state has seen one at least.
    counts_steps: ClassVar[bool] = True

    def __init__(self, options: Mapping[str, Any]) -> None:
        del options

    @classmethod
    def refusal(cls, optimizer: torch.optim.Optimizer) -> str | None:
        """Why an optimizer of the rule's kind cannot be taken over, with the fix; None if it can."""
        return None

    @classmethod
    def take_groups(cls, optimizer: torch.optim.Optimizer, name: str) -> list[str]:
        """The name of the rule of each param group. Options that its class has without naming them are added.

        Args:
            name: of this rule.
        """
        return [name] * len(optimizer.param_groups)

    @abstractmethod
    def step(self, operands: ops.FlatOperands, group: Mapping[str, Any], *, grad_factor: Tensor, step: Tensor) -> None:
        """One step over flat storage, in place.

        Args:
            group: the param group, whose numbers are read.
            grad_factor: FP32 [1], multiplies the gradient. If it is not finite, nothing is written.
            step: FP32 [1], the number of this step counted from 1 over steps that were not skipped.
        """

    def dtypes(self, formats: StorageFormats) -> list[StorageDtype]:
        """Storage dtypes of the states."""
        return [spec.dtype(formats) for spec in self.states]


class ElementwiseRule(UpdateRule):
    """A rule without a kernel of its own: its step is `change`, in plain PyTorch on every device."""

    @abstractmethod
    def change(
        self, grad: Tensor, param: Tensor, states: list[Tensor], group: Mapping[str, Any], step: Tensor
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """What is added to the parameter, and the new states. All tensors are FP32 [n]; see `UpdateRule.step`."""

    def step(self, operands: ops.FlatOperands, group: Mapping[str, Any], *, grad_factor: Tensor, step: Tensor) -> None:
        ops.elementwise_step_(
            operands,
            lambda grad, param, states: self.change(grad, param, states, group, step),
            holds_squares=[spec.holds_squares for spec in self.states],
            grad_factor=grad_factor,
            step=step,
        )


class MatrixRule(UpdateRule):
    """A rule whose step is made of whole matrices: `direct` each element, make these `orthogonal`, and subtract that
    (`step`, `step_split`). Its state is `matrix_state.MatrixSpaceState`."""

    @abstractmethod
    def direct(
        self,
        operands: ops.FlatOperands,
        direction: Tensor,
        group: Mapping[str, Any],
        *,
        grad_factor: Tensor,
        step: Tensor,
    ) -> None:
        """The first half of a step: update the states, and write what matrices are made of.

        Args:
            operands: the master, the weight and the amaxes are not touched.
            direction: BF16 [n].
            group, grad_factor, step: as in `step`.
        """

    @abstractmethod
    def orthogonal(
        self,
        matrices: Tensor,
        group: Mapping[str, Any],
        ranks: Group | None = None,
        axis: int | None = None,
        *,
        errors: list[Tensor] | None = None,
    ) -> Tensor:
        """What is subtracted from the weights, times lr.

        Args:
            matrices: directions, BF16 [b, rows, columns].
            ranks, axis: those that have parts of the same matrices along this axis (1 or 2); None: they are whole.
            errors: how far from orthogonal each is, FP32 [b], is added; None: that is not measured.
        """

    @abstractmethod
    def largest_update(self, shapes: Sequence[tuple[int, int]], group: Mapping[str, Any]) -> float:
        """No element of `orthogonal` is larger, of matrices of these (rows, columns)."""

    def next_scales(self, amax: Tensor, largest: Tensor, group: Mapping[str, Any], previous: Tensor) -> Tensor:
        """FP32 [matrices], the scales that this step writes the weights of a split master with.

        Args:
            amax: FP32 [matrices], the largest magnitude of each master. previous: their scales.
            largest: FP32 [matrices], `largest_update` of each.
        """
        scale = ops.scale_from_amax(amax + float(group["lr"]) * largest, E4M3, power_of_two=True)
        return torch.where(torch.isfinite(scale), scale, previous)

    def step(self, operands: ops.FlatOperands, group: Mapping[str, Any], *, grad_factor: Tensor, step: Tensor) -> None:
        """The second half of a step: `operands.grad` is what `orthogonal` made, and the states are done."""
        ops.orthogonal_step_(
            operands.grad.payload,
            operands.master,
            operands.places,
            **_numbers(group),
            grad_factor=grad_factor,
            step=step,
            weight=operands.weight,
            chunk_amax=operands.chunk_amax,
        )

    def step_split(
        self,
        made: Tensor,
        master: ops.SplitMaster,
        group: Mapping[str, Any],
        *,
        grad_factor: Tensor,
        step: Tensor,
        chunk_amax: Tensor,
    ) -> None:
        """`step` of split masters; the caller adopts their new scales."""
        ops.orthogonal_split_step_(
            made, master, **_numbers(group), grad_factor=grad_factor, step=step, chunk_amax=chunk_amax
        )


def _numbers(group: Mapping[str, Any]) -> dict[str, float]:
    return {"lr": float(group["lr"]), "weight_decay": float(group["weight_decay"])}


def build_rule(name: str, options: Mapping[str, Any], *, is_split: bool = False) -> UpdateRule:
    """The rule of a name of the registry.

    Args:
        options: of the param group, at its start.
        is_split: over a split master.
    """
    entry = RULES[name]
    place = entry.split_place if is_split else entry.place
    assert place is not None, f"{name} has no rule over a split master"
    return _class_of(place)({**entry.options, **options})


def all_states(name: str, options: Mapping[str, Any]) -> tuple[StateSpec, ...]:
    """What a rule of the registry stores, and what that of the other parameters does."""
    names = dict.fromkeys(rule_of_space(name, has_matrices=has_matrices) for has_matrices in (True, False))
    return tuple(dict.fromkeys(spec for rule in names for spec in build_rule(rule, options).states))


def recognised(optimizer: torch.optim.Optimizer) -> list[str] | None:
    """The names of the rules of the param groups of an optimizer of another library; None: there is none.

    Raises:
        UserError: it has something that the rule does not do.
    """
    own = type(optimizer)
    kind = f"{own.__module__}.{own.__qualname__}"
    for name, entry in RULES.items():
        # A class of that name that is derived from another one is a library's own.
        if kind in entry.stands_for or (own.__name__ in entry.copied and own.__base__ is torch.optim.Optimizer):
            rule = _class_of(entry.place)
            refusal = rule.refusal(optimizer)
            if refusal is not None:
                raise UserError(f"{kind}: {refusal}")
            return rule.take_groups(optimizer, name)
    return None


@cache
def known_states() -> frozenset[str]:
    """The names of all that some rule stores."""
    return frozenset(spec.name for entry in RULES.values() for spec in _class_of(entry.place).states)


def _class_of(place: str) -> type[UpdateRule]:
    module, _, name = place.partition(".")
    kind: type[UpdateRule] = getattr(import_module(f"{__package__}.{module}"), name)
    return kind
