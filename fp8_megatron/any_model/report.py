"""What of a model is in FP8, and what stayed as it was and why."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..nn.scaled_module import ScaledModule
from ..quantization.weight_shards import stored_part

#: Attribute of a linear layer that stayed as it was: the reason.
STAYS = "_fp8_megatron_stays"
#: The same of a module that does not count as a linear layer (`Kind.is_layer`).
MATRICES_STAY = "_fp8_megatron_matrices_stay"
#: Modules whose parameters are looked up, or multiplied element by element.
_NO_PRODUCTS = (torch.nn.Embedding, torch.nn.EmbeddingBag, torch.nn.LayerNorm, torch.nn.RMSNorm)
#: Names that `str` gives for one reason.
_NAMES_SHOWN = 3


class OtherMatrix(NamedTuple):
    """A parameter of another module than a linear layer.

    Attributes:
        kind: the module's class.
        reason: why the module stays; None: it is of no kind that becomes FP8.
    """

    kind: str
    shape: torch.Size
    reason: str | None


@dataclass(frozen=True)
class LinearReport:
    """The linear layers of a model. ``str`` is one line.

    Attributes:
        fp8: names of the FP8 layers.
        stays: name → reason of the others. A layer that nobody has looked at has the reason "".
        fp8_parameters, parameters: elements of FP8 layers' weights, and of all parameters.
        others: name → parameter, of those that may be multiplied, with two or more dimensions above 1, and that no
            linear layer, embedding or norm holds: convolutions, weights of ``einsum``. They stay as they are.
        matrices: elements of all parameters that may be multiplied: those of linear layers, and `others`.
    """

    fp8: tuple[str, ...]
    stays: dict[str, str]
    fp8_parameters: int
    parameters: int
    others: dict[str, OtherMatrix]
    matrices: int

    @property
    def is_vain(self) -> bool:
        """Whether no linear layer is in FP8, or less than what no linear layer holds."""
        return sum(one.shape.numel() for one in self.others.values()) > self.fp8_parameters or (
            bool(self.stays) and not self.fp8
        )

    def __str__(self) -> str:
        total = len(self.fp8) + len(self.stays)
        share = 100.0 * self.fp8_parameters / max(1, self.parameters)
        line = f"FP8: {len(self.fp8)} of {total} linear layers, {share:.1f}% of {self.parameters:,} parameters"
        names_of: dict[str, list[str]] = defaultdict(list)
        for name, reason in self.stays.items():
            names_of[reason].append(name)
        kept = [f"{_listed(names)} ({reason})" if reason else _listed(names) for reason, names in names_of.items()]
        others_of: dict[tuple[str, int, str | None], list[str]] = defaultdict(list)
        for name, one in self.others.items():
            others_of[one.kind, len(one.shape), one.reason].append(name)
        for (kind, ndim, cause), names in others_of.items():
            numel = sum(self.others[name].shape.numel() for name in names)
            why = f"{kind} is no torch.nn.Linear" if cause is None else f"{kind}, because {cause}"
            kept.append(
                f"{_listed(names)} ({why}: {numel:,} parameters with {ndim} dimensions, "
                f"{100.0 * numel / self.matrices:.1f}% of all matrices)"
            )
        return line if not kept else f"{line}; unchanged: {', '.join(kept)}"


def report(model: torch.nn.Module) -> LinearReport:
    """Which linear layers of `model` are in FP8, why others are not, and which other matrices are not."""
    fp8, stays = [], {}
    weights: dict[torch.Tensor, int] = {}
    linear: dict[torch.Tensor, int] = {}
    others: dict[torch.Tensor, tuple[str, str, str | None]] = {}
    for name, module in model.named_modules():
        held = [getattr(module, each) for each in module.scaled_names] if isinstance(module, ScaledModule) else []
        if held and all(stored_part(weight) is not None for weight in held):
            fp8.append(name)
            weights.update({weight: weight.numel() for weight in held})
        elif isinstance(module, torch.nn.Linear) or hasattr(module, STAYS):
            stays[name] = getattr(module, STAYS, "")
            linear.update({param: param.numel() for param in module.parameters() if _is_matrix(param)})
        elif isinstance(module, _NO_PRODUCTS):
            linear = dict.fromkeys(module.parameters(recurse=False), 0) | linear
        else:
            own = module.named_parameters(name, recurse=False)
            facts = type(module).__name__, getattr(module, MATRICES_STAY, None)
            others.update({param: (key, *facts) for key, param in own if _is_matrix(param)})
    named = {
        key: OtherMatrix(kind, param.shape, reason)
        for param, (key, kind, reason) in others.items()
        if param not in linear
    }
    return LinearReport(
        tuple(fp8),
        stays,
        sum(weights.values()),
        sum(param.numel() for param in model.parameters()),
        named,
        matrices=sum((weights | linear).values()) + sum(one.shape.numel() for one in named.values()),
    )


def _is_matrix(param: torch.Tensor) -> bool:
    return param.numel() > 0 and sum(size > 1 for size in param.shape) > 1


def _listed(names: list[str]) -> str:
    shown = ", ".join(name or "the model" for name in names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"
