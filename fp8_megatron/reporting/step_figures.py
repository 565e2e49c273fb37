"""What a step tells the host: named figures that travel in one small tensor."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor


def reported(tag: str | None, **settings: Any) -> Any:
    """A field of a report.

    Args:
        tag: its name in TensorBoard and W&B. None leaves it out of every report.
        settings: of `dataclasses.field`, such as ``default``.
    """
    return dataclasses.field(metadata={"tag": tag}, **settings)


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """The figures of one step, on the host.

    On the device they are one FP32 tensor in the order of the fields (`pack`). The host copies it while the step runs
    and reads it one step later, so that nothing waits (`training.step_results`). A new figure is one line here, and
    one where `train_step` packs it; metrics.jsonl, TensorBoard and W&B then have it under its name.

    A figure with a default may be missing: NaN in the tensor, None here.
    """

    loss: float = reported("train/loss")
    """Mean over the global batch, nats per token."""
    num_stop_requests: float = reported(None, default=0.0)
    """Ranks that want to stop."""
    grad_norm: float = reported("train/grad_norm")
    """Global norm before clipping."""
    grad_underflow_fraction: float | None = reported("fp8/grad_underflow_fraction", default=None)
    """This rank's non-zero gradient elements that a cast to FP8 made zero; None where that was not measured."""
    grad_saturation_fraction: float | None = reported("fp8/grad_saturation_fraction", default=None)
    """Worst tensor's gradient elements that the native FP8 sum clamped; None where FP8 blocks cannot saturate."""
    autoscale_mu: float | None = reported("fp8/autoscale_mu", default=None)
    """Least pre-scale μ of auto-scaling; None without it."""
    loss_scale: float | None = reported("train/loss_scale", default=None)
    """What the next loss is multiplied by; None without a loss scale."""
    peak_memory_gib: float = reported("memory/peak_gib")
    """The most memory that any rank has held so far; on a GPU the allocator's, and what is counted beside it."""

    @classmethod
    def pack(cls, **figures: Tensor) -> Tensor:
        """One tensor of all figures; waits for no device.

        Args:
            figures: FP32 [1] each, on one device. Those that may be missing can be left out.

        Returns:
            FP32 [number of figures].
        """
        missing = torch.full((1,), math.nan, device=figures["loss"].device)
        ordered = [
            figures.pop(field.name, missing) if field.default is None else figures.pop(field.name)
            for field in dataclasses.fields(cls)
        ]
        assert not figures, f"unknown figures: {sorted(figures)}"
        return torch.cat(ordered)

    @classmethod
    def unpack(cls, values: Sequence[float]) -> Self:
        """The figures of a packed tensor's `values`."""
        figures: dict[str, Any] = {}
        for field, value in zip(dataclasses.fields(cls), values, strict=True):
            figures[field.name] = None if field.default is None and math.isnan(value) else value
        return cls(**figures)

    def as_dict(self) -> dict[str, Any]:
        """Name → figure."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(StepFigures)}
