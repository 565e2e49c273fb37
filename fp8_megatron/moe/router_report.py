"""What the routers of a step report: the tokens that each expert got, the losses that balance
experts, and what has no room."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class RouterTable:
    """How the routers of a model lie in one FP32 tensor: of each layer the tokens of its experts, then its means.

    Attributes:
        layers: those with experts, from 0.
        means: name of a loss, or of what is dropped → how many ranks have a mean of their own. Parts of one mean are
            added up over the others.
    """

    layers: tuple[int, ...]
    num_experts: int
    means: Mapping[str, int]

    @property
    def numel(self) -> int:
        """Elements on the device."""
        return len(self.layers) * (self.num_experts + len(self.means))

    def pack(self, routers: Mapping[int, tuple[Tensor, Tensor]], device: torch.device) -> Tensor:
        """FP32 [`numel`] of layer → (tokens [E], means [N]) on this rank; zeros for layers of others."""
        absent = (torch.zeros(self.num_experts + len(self.means), device=device),)
        return torch.cat([part for layer in self.layers for part in routers.get(layer, absent)])

    def unpack(self, values: Sequence[float], num_micro_batches: int) -> RouterReport:
        """The report of `pack`'s tensors, summed over ranks."""
        width = self.num_experts + len(self.means)
        rows = [values[start : start + width] for start in range(0, self.numel, width)]
        means = {
            name: [row[self.num_experts + index] / (num_ranks * num_micro_batches) for row in rows]
            for index, (name, num_ranks) in enumerate(self.means.items())
        }
        return RouterReport(self.layers, [row[: self.num_experts] for row in rows], means)


@dataclass(frozen=True)
class RouterReport:
    """What the routers of one step report, on the host.

    Attributes:
        layers: those with experts, from 0.
        tokens: of each layer, those that the step sent to each expert, over all ranks and micro-batches.
        means: name → of each layer its mean over the step's micro-batches, without its factor.
    """

    layers: Sequence[int]
    tokens: Sequence[Sequence[float]]
    means: Mapping[str, Sequence[float]]

    def by_layer(self) -> dict[str, list[float]]:
        """Name → figure of each layer."""
        means = [fmean(tokens) or 1.0 for tokens in self.tokens]
        return {
            "load_imbalance": [max(tokens) / mean for tokens, mean in zip(self.tokens, means, strict=True)],
            "min_load": [min(tokens) / mean for tokens, mean in zip(self.tokens, means, strict=True)],
            "idle_experts": [float(sum(count == 0 for count in tokens)) for tokens in self.tokens],
            **{name: list(values) for name, values in self.means.items()},
        }

    def figures(self) -> dict[str, float]:
        """Name → figure of the step: of loads the worst layer's, of experts without a token the sum, of means that
        over layers."""
        by_layer = self.by_layer()
        loads = {
            "load_imbalance": max(by_layer["load_imbalance"]),
            "min_load": min(by_layer["min_load"]),
            "idle_experts": sum(by_layer["idle_experts"]),
        }
        return loads | {name: fmean(values) for name, values in self.means.items()}

    def row(self) -> dict[str, Any]:
        """What metrics.jsonl has of single layers."""
        finite = {
            f"{name}_by_layer": [value if math.isfinite(value) else None for value in values]
            for name, values in self.by_layer().items()
        }
        return {"expert_layers": list(self.layers), **finite}

    def scalars(self) -> dict[str, float]:
        """Tag → figure of a layer, for TensorBoard and W&B. Tags of losses are Megatron's."""
        return {
            f"moe/{name}_layer_{layer}": value
            for name, values in self.by_layer().items()
            for layer, value in zip(self.layers, values, strict=True)
        }

    def tokens_row(self, iteration: int) -> dict[str, Any]:
        """A line of tokens_per_expert.jsonl."""
        tokens = [list(map(int, counts)) for counts in self.tokens]
        return {"kind": "tokens_per_expert", "iteration": iteration, "layers": list(self.layers), "tokens": tokens}
