"""What a kind of model has in megatron-core's GPT beside a decoder's parts. `assembly` finds it for a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from ..nn.links import LayerLinks
from ..quantization.recipe import Recipe
from ..reporting.layer_report import LayerTable

if TYPE_CHECKING:
    from .topology import Topology


class MLPPart(Protocol):
    """What a layer has behind attention: the MLP (`mlp.mlp_spec`), or what stands in its place.

    Its module is built with ``config``, ``pg_collection`` and ``layer_number``, from 1. It takes hidden_states
    [s, b, h] behind the norm, and returns the output [s, b, h] and a bias that is still to add, or None. The module may
    have ``turns``, a `Turns`, for its exchanges between ranks, and be a `ReportingPart`.
    """

    def __call__(self, recipe: Recipe | None, links: LayerLinks) -> ModuleSpec:
        """Its modules.

        Args:
            recipe: of its linear layers; None: 16 bits.
            links: of the layer; its own are ``fc1``, in front, and ``fc2``, whose output the next norm reads.
        """


@runtime_checkable
class ReportingPart(Protocol):
    """A module of a layer that reports what happens in a step (`reporting.layer_report`).

    Attributes:
        layer_number: from 1, over the whole model.
    """

    layer_number: int

    def start_step(self) -> None:
        """Forget the last step's numbers."""

    def numbers(self) -> tuple[Tensor, Tensor]:
        """Counts and means, FP32, summed over the step's micro-batches."""


@dataclass(frozen=True)
class Parts:
    """What a model has beside a decoder's parts.

    Attributes:
        settings: of megatron-core's `TransformerConfig`.
        mlps: layer, counted over the whole model → what it has in the place of the MLP.
        after_gradients: called with a rank's reporting parts when a step's gradients are complete.
        layer_table: how what its layers report lies in one tensor; None: they report nothing.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    mlps: Mapping[int, MLPPart] = field(default_factory=dict)
    after_gradients: Callable[[Sequence[ReportingPart]], None] | None = None
    layer_table: Callable[[Topology], LayerTable] | None = None
