"""The registry of update rules: the names of ``--optimizer``, the class and the options of each. Imports no torch.

A rule is one file in `optimizer/rules/` and one row here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol


@dataclass(frozen=True)
class RuleEntry:
    """A row of the registry.

    Attributes:
        place: module and class in `optimizer.rules`.
        options: what the rule reads of a param group beside ``lr`` and ``weight_decay``, with the trainer's defaults.
        stands_for: optimizers that `initialize` recognises.
        copied: those that are copied from project to project as a file, by the names of their classes alone.
        holds_squares: some state averages squares of gradients.
        split_place: of the rule over a split master; None: there is none.
        settings: for an option, the trainer's settings that give it. Others are given by ``--optimizer-options``.
        hidden_power: with muP, the learning rate of matrices of layers is multiplied by this power of the width over
            that of the base (arXiv 2203.03466, table 8).
        other_power: the same of vectors and embeddings, the output layer included.
        rest: of a rule of matrices, the rule of all other parameters, whose options are among its own; None: the rule
            takes all parameters.
    """

    place: str
    options: Mapping[str, Any]
    stands_for: tuple[str, ...]
    copied: tuple[str, ...] = ()
    holds_squares: bool = False
    split_place: str | None = None
    settings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    hidden_power: int = -1
    other_power: int = 0
    rest: str | None = None


@dataclass(frozen=True)
class Rate:
    """How a parameter's learning rate follows from those of the run.

    Attributes:
        is_decoupled: it is the one of embedding and output layer.
        lr_mult: what multiplies it, and the rule's ``eps`` with it.
    """

    is_decoupled: bool = False
    lr_mult: float = 1.0

    def ends(self, run: RunRates) -> tuple[float, float]:
        """Its peak, and its value at the end of the decay."""
        peak, least = (run.decoupled_lr, run.decoupled_min_lr) if self.is_decoupled else (None, None)
        return (
            (run.lr if peak is None else peak) * self.lr_mult,
            (run.min_lr if least is None else least) * self.lr_mult,
        )


#: The run's own.
RUNS_RATE = Rate()


class RunRates(Protocol):
    """The learning rates of a run: peak and end of the decay, and those of embedding and output layer; None: the same
    as of the others."""

    @property
    def lr(self) -> float: ...
    @property
    def min_lr(self) -> float: ...
    @property
    def decoupled_lr(self) -> float | None: ...
    @property
    def decoupled_min_lr(self) -> float | None: ...


_ADAMW = RuleEntry(
    "adamw.AdamW",
    MappingProxyType({"betas": (0.9, 0.95), "eps": 1e-8, "decoupled_weight_decay": True}),
    stands_for=("torch.optim.adam.Adam", "torch.optim.adamw.AdamW"),
    holds_squares=True,
    split_place="split_adamw.SplitAdamW",
    settings=MappingProxyType(
        {
            "betas": ("adam_beta1", "adam_beta2"),
            "eps": ("adam_eps",),
            "decoupled_weight_decay": ("decoupled_weight_decay",),
        }
    ),
)
_SGD = RuleEntry(
    "sgd.SGD",
    MappingProxyType({"momentum": 0.9, "dampening": 0.0, "nesterov": False}),
    stands_for=("torch.optim.sgd.SGD",),
    settings=MappingProxyType({"momentum": ("sgd_momentum",)}),
    hidden_power=0,
    other_power=1,
)
_LION = RuleEntry(
    "lion.Lion",
    MappingProxyType({"betas": (0.95, 0.98)}),
    stands_for=("lion_pytorch.lion_pytorch.Lion",),
    settings=MappingProxyType({"betas": ("lion_beta1", "lion_beta2")}),
)
_MUON = RuleEntry(
    "muon.Muon",
    MappingProxyType(
        {
            **_ADAMW.options,
            "momentum": 0.95,
            "nesterov": True,
            "num_ns_steps": 5,
            "coefficient_type": "quintic",
            "scale_mode": "spectral",
            "extra_scale_factor": 1.0,
            "tp_mode": "duplicated",
        }
    ),
    stands_for=("torch.optim.Muon",),
    copied=("Muon", "SingleDeviceMuon", "MuonWithAuxAdam", "SingleDeviceMuonWithAuxAdam", "MuonAdamW"),
    holds_squares=True,
    split_place="muon.Muon",
    settings=MappingProxyType(
        {
            **_ADAMW.settings,
            "momentum": ("muon_momentum",),
            "nesterov": ("muon_nesterov",),
            "num_ns_steps": ("muon_num_ns_steps",),
            "coefficient_type": ("muon_coefficient_type",),
            "scale_mode": ("muon_scale_mode",),
            "extra_scale_factor": ("muon_extra_scale_factor",),
            "tp_mode": ("muon_tp_mode",),
        }
    ),
    hidden_power=0,
    rest="adamw",
)
#: By the names of ``--optimizer``.
RULES: Mapping[str, RuleEntry] = MappingProxyType(
    {"adam": _ADAMW, "adamw": _ADAMW, "sgd": _SGD, "lion": _LION, "muon": _MUON}
)


def shares_rule(name: str, other: str) -> bool:
    """Whether one of two optimizers has, for its other parameters, the rule of the other one."""
    return any(
        a in RULES and b in RULES and RULES[a].rest is not None and RULES[RULES[a].rest or b] is RULES[b]
        for a, b in ((name, other), (other, name))
    )


def rule_of_space(name: str, *, has_matrices: bool) -> str:
    """The rule of a space of a model whose optimizer has the name `name`.

    Args:
        has_matrices: its parameters are matrices of hidden layers.
    """
    rest = RULES[name].rest
    return name if rest is None or has_matrices else rest


def width_power(name: str, *, is_linear: bool, is_hidden: bool) -> int:
    """The power of muP's width that multiplies a parameter's learning rate.

    Args:
        name: of the model's optimizer.
        is_linear: it is the weight of a linear layer, or of experts'.
        is_hidden: it is a matrix of a layer, as a router's is too.
    """
    rule = RULES[rule_of_space(name, has_matrices=is_linear)]
    return rule.hidden_power if is_hidden else rule.other_power
