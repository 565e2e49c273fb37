"""What the routers of a step report: the tokens that each expert got, the losses that balance experts, and what has no
room. `RouterTable` and `RouterReport` are what `reporting.layer_report` asks for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from ..config.moe import DROPPED, LOSSES, reported_means
from ..config.schema import Config

#: With --save-tokens-per-expert-interval: the tokens of every expert of a step.
TOKENS_FILE = "tokens_per_expert.jsonl"


@dataclass(frozen=True)
class RouterTable:
    """How the routers of a model lie in one FP32 tensor: of each layer the tokens of its experts, then its means.

    Attributes:
        layers: those with experts, from 0.
        means: name of a loss, or of what is dropped → how many ranks have a mean of their own. Parts of one mean are
            added up over the others.
        reports_layers: each layer's figures are reported too.
        tokens_interval: iterations between lines of tokens_per_expert.jsonl; None: it has none.
    """

    layers: tuple[int, ...]
    num_experts: int
    means: Mapping[str, int]
    reports_layers: bool = False
    tokens_interval: int | None = None

    @property
    def numel(self) -> int:
        """Elements on the device."""
        return len(self.layers) * (self.num_experts + len(self.means))

    def pack(self, parts: Mapping[int, tuple[Tensor, Tensor]], device: torch.device) -> Tensor:
        """FP32 [`numel`] of layer → (tokens [E], means [N]) of its router on this rank; zeros for layers of others."""
        absent = (torch.zeros(self.num_experts + len(self.means), device=device),)
        return torch.cat([part for layer in self.layers for part in parts.get(layer, absent)])

    def unpack(self, values: Sequence[float], num_micro_batches: int) -> RouterReport:
        """The report of `pack`'s tensors, summed over ranks."""
        width = self.num_experts + len(self.means)
        rows = [values[start : start + width] for start in range(0, self.numel, width)]
        means = {
            name: [row[self.num_experts + index] / (num_ranks * num_micro_batches) for row in rows]
            for index, (name, num_ranks) in enumerate(self.means.items())
        }
        return RouterReport(self, [row[: self.num_experts] for row in rows], means)


def router_table(config: Config, *, num_sequences: int, num_ranks: int) -> RouterTable:
    """What the routers of all ranks report.

    A balancing loss is one mean over the ranks that share a sequence, or over all ranks if it is that of the global
    batch. The z-loss and what is dropped are means on each rank.

    Args:
        num_sequences: ranks of a pipeline stage with sequences of their own.
        num_ranks: of a pipeline stage.
    """
    model, logging = config.model, config.logging
    assert model.num_experts is not None
    means = {"global_load_balancing_loss": 1, "z_loss": num_ranks, DROPPED: num_ranks}
    names = reported_means(model.balancing_losses, model.moe_z_loss_coeff, model.moe_expert_capacity_factor)
    return RouterTable(
        model.expert_layers,
        model.num_experts,
        {name: means.get(name, num_sequences) for name in names},
        reports_layers=logging.moe_per_layer_logging,
        tokens_interval=logging.save_tokens_per_expert_interval,
    )


@dataclass(frozen=True)
class RouterReport:
    """What the routers of one step report, on the host.

    Attributes:
        table: the model's.
        tokens: of each layer, those that the step sent to each expert, over all ranks and micro-batches.
        means: name → of each layer its mean over the step's micro-batches, without its factor.
    """

    table: RouterTable
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
        """As `LayerReport.row`: the figures of the step, None for means that no flag asks for, and the figures of each
        layer if they are asked for."""
        row: dict[str, Any] = {**dict.fromkeys(_MEANS), **self.figures()}
        if self.table.reports_layers:
            row["expert_layers"] = list(self.table.layers)
            for name, values in self.by_layer().items():
                row[f"{name}_by_layer"] = [value if math.isfinite(value) else None for value in values]
        return row

    def scalars(self) -> dict[str, float]:
        """As `LayerReport.scalars`. Tags of losses and of single layers are Megatron's."""
        scalars = {_OWN_TAGS.get(name, name): figure for name, figure in self.figures().items()}
        return scalars | (dict(self._layer_scalars()) if self.table.reports_layers else {})

    def _layer_scalars(self) -> Iterator[tuple[str, float]]:
        for name, values in self.by_layer().items():
            for layer, value in zip(self.table.layers, values, strict=True):
                yield f"moe/{name}_layer_{layer}", value

    def texts(self) -> list[str]:
        """As `LayerReport.texts`: how experts are loaded, and the losses that balance them."""
        figures = self.figures()
        load = f"experts' load {figures['min_load']:.2f} to {figures['load_imbalance']:.2f} of the mean"
        load += f", {figures['idle_experts']:.0f} idle" if figures["idle_experts"] else ""
        load += f", {figures[DROPPED]:.2%} dropped" if DROPPED in figures else ""
        losses = {name: figures[name] for name in self.means if name != DROPPED}
        return [load, *(f"{name.replace('_', ' ')} {loss:.4f}" for name, loss in losses.items())]

    def file_rows(self, iteration: int) -> dict[str, dict[str, Any]]:
        """As `LayerReport.file_rows`."""
        interval = self.table.tokens_interval
        if interval is None or iteration % interval:
            return {}
        tokens = [list(map(int, counts)) for counts in self.tokens]
        row = {"kind": "tokens_per_expert", "iteration": iteration, "layers": list(self.table.layers), "tokens": tokens}
        return {TOKENS_FILE: row}


#: All that a router may report the mean of.
_MEANS = (*LOSSES.values(), "z_loss", DROPPED)
#: Name of a figure → its tag in TensorBoard and W&B, where that is another one.
_OWN_TAGS = {name: f"moe/{name}" for name in ("load_imbalance", "min_load", "idle_experts", DROPPED)}
