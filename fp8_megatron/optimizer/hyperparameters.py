"""Settings of the optimizer that are constant over a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..update_rules import RULES


@dataclass(frozen=True)
class OptimizerSettings:
    """Which update rule a run has, and its numbers.

    Attributes:
        rule: a name of `update_rules.RULES`.
        options: the rule's own, where they are not the registry's defaults.
        lr: peak learning rate. min_lr: the one at the end of a schedule's decay.
        decoupled_lr, decoupled_min_lr: those of spaces whose `Rate` is decoupled; None: as for the others.
        weight_decay: of matrices; norms and biases have none.
        clip_grad: the global gradient norm is clipped to this; 0: never.
    """

    rule: str = "adamw"
    options: Mapping[str, Any] = field(default_factory=dict)
    lr: float = 3e-4
    min_lr: float = 0.0
    weight_decay: float = 0.1
    clip_grad: float = 1.0
    decoupled_lr: float | None = None
    decoupled_min_lr: float | None = None

    @property
    def all_options(self) -> dict[str, Any]:
        """The rule's options, with the defaults."""
        return {**RULES[self.rule].options, **self.options}
