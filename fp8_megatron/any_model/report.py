"""What of a model is in FP8, and what stayed as it was and why."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch

from ..nn.module import FP8Linear
from ..quantization.weight_shards import stored_part

#: Attribute of a linear layer that stayed as it was: the reason.
STAYS = "_fp8_megatron_stays"
#: Names that `str` gives for one reason.
_NAMES_SHOWN = 3


@dataclass(frozen=True)
class LinearReport:
    """The linear layers of a model. ``str`` is one line.

    Attributes:
        fp8: names of the FP8 layers.
        stays: name → reason of the others. A layer that nobody has looked at has the reason "".
        fp8_parameters, parameters: elements of FP8 layers' weights, and of all parameters.
    """

    fp8: tuple[str, ...]
    stays: dict[str, str]
    fp8_parameters: int
    parameters: int

    def __str__(self) -> str:
        total = len(self.fp8) + len(self.stays)
        share = 100.0 * self.fp8_parameters / max(1, self.parameters)
        line = f"FP8: {len(self.fp8)} of {total} linear layers, {share:.1f}% of {self.parameters:,} parameters"
        names_of: dict[str, list[str]] = defaultdict(list)
        for name, reason in self.stays.items():
            names_of[reason].append(name)
        kept = [f"{_listed(names)} ({reason})" if reason else _listed(names) for reason, names in names_of.items()]
        return line if not kept else f"{line}; unchanged: {', '.join(kept)}"


def report(model: torch.nn.Module) -> LinearReport:
    """Which linear layers of `model` are in FP8, and why others are not."""
    fp8, stays, weights = [], {}, {}
    for name, module in model.named_modules():
        if isinstance(module, FP8Linear) and stored_part(module.weight) is not None:
            fp8.append(name)
            weights[module.weight] = module.weight.numel()
        elif isinstance(module, torch.nn.Linear) or hasattr(module, STAYS):
            stays[name] = getattr(module, STAYS, "")
    return LinearReport(tuple(fp8), stays, sum(weights.values()), sum(p.numel() for p in model.parameters()))


def _listed(names: list[str]) -> str:
    shown = ", ".join(name or "the model" for name in names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"
