"""What a part of layers, such as a router, reports of a step beside the step's own figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class LayerReport(Protocol):
    """What a part of layers reports of one step, on the host. All ranks have the same."""

    def row(self) -> Mapping[str, Any]:
        """Name → value, for the step's line in metrics.jsonl."""

    def scalars(self) -> Mapping[str, float]:
        """Tag → figure, for TensorBoard and W&B."""

    def texts(self) -> Sequence[str]:
        """Fields of the step's line on the console."""

    def file_rows(self, iteration: int) -> Mapping[str, Mapping[str, Any]]:
        """Name of a file of its own → the line that the step adds to it. A file that is not due is left out."""


class LayerTable(Protocol):
    """How the numbers of a part of layers lie in one FP32 tensor, in which they travel to the host."""

    @property
    def numel(self) -> int:
        """Elements of the tensor."""

    def pack(self, parts: Mapping[int, tuple[Tensor, Tensor]], device: torch.device) -> Tensor:
        """FP32 [`numel`] of layer → (counts, means) of its part on this rank; zeros for layers of others."""

    def unpack(self, values: Sequence[float], num_micro_batches: int) -> LayerReport:
        """The report of `pack`'s tensors, summed over ranks."""
