"""What routers say of a step: losses that balance experts, and how many tokens the largest expert has, by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ..config.model import ModelConfig
from ..mcore.moe import Router
from ..mcore.topology import Topology

#: Names of losses here and of megatron-core's router.
_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
    "z_loss": "z_loss",
}
LARGEST = "largest_expert_load"


@dataclass(frozen=True)
class ExpertFigures:
    """The figures of a model with experts, without their factors.

    Attributes:
        losses: that the configuration asks for: names of `reporting.step_figures.StepFigures`.
        layers: with experts, counted over the whole model.
        num_experts: of a layer.
    """

    losses: tuple[str, ...]
    layers: tuple[int, ...]
    num_experts: int

    @classmethod
    def of(cls, model: ModelConfig) -> Self | None:
        """Of a model; None without experts."""
        if model.num_experts is None:
            return None
        factors = {**model.balancing_losses, "z_loss": model.moe_z_loss_coeff or 0.0}
        return cls(
            tuple(name for name, factor in factors.items() if factor > 0), model.expert_layers, model.num_experts
        )

    @property
    def numel(self) -> int:
        """Elements that ranks add up (`of_rank`)."""
        return len(self.layers) * (len(self.losses) + self.num_experts)

    @property
    def num_packed(self) -> int:
        """Elements of `pack`."""
        return len(self.layers) * (len(self.losses) + 1)

    def of_rank(self, routers: Sequence[Router], device: torch.device) -> Tensor:
        """FP32 [numel]: of each layer its losses, and the tokens of this rank for each expert. Other stages' are 0."""
        rows = torch.zeros(len(self.layers), len(self.losses) + self.num_experts, device=device)
        for router in routers:
            row = rows[self.layers.index(router.layer_number - 1)]
            for place, name in enumerate(self.losses):
                if _NAMES[name] in router.losses:
                    row[place] = router.losses[_NAMES[name]]
            row[len(self.losses) :] = router.load
        return rows.view(-1)

    def pack(self, total: Tensor, topology: Topology, num_micro_batches: int) -> Tensor:
        """FP32 [layers, losses + 1]: means over the step's micro-batches, and the tokens of the largest expert over the
        mean of all.

        Args:
            total: the sum of `of_rank` over all ranks.
        """
        rows = total.view(len(self.layers), -1)
        losses, load = rows.split([len(self.losses), self.num_experts], dim=1)
        # Ranks that share a sample add parts of its loss, and all ranks of the global one; the z-loss is a mean.
        replicas, ranks = topology.dp.size(), topology.world_size // topology.pp.size()
        parts = {"global_aux_loss": 1, "z_loss": ranks}
        counts = [num_micro_batches * parts.get(name, replicas) for name in self.losses]
        means = [losses[:, place : place + 1] / count for place, count in enumerate(counts)]
        return torch.cat([*means, load.amax(dim=1, keepdim=True) / load.mean(dim=1, keepdim=True)], dim=1)

    def of_step(self, packed: Tensor) -> dict[str, Tensor]:
        """The figures of the whole model, FP32 [1] each: the mean of the layers' losses, the largest of their loads."""
        *losses, load = packed.split(1, dim=1)
        means = {name: loss.mean().view(1) for name, loss in zip(self.losses, losses, strict=True)}
        return {**means, LARGEST: load.amax().view(1)}

    def by_layer(self, packed: Sequence[float]) -> Mapping[str, list[float]]:
        """Name → figure of each layer, in the order of `layers`; under ``layers`` their numbers."""
        names = (*self.losses, LARGEST)
        columns = {name: list(packed[place :: len(names)]) for place, name in enumerate(names)}
        return {"layers": [float(layer) for layer in self.layers], **columns}
