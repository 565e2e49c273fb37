"""Results of a step for the host: named figures, packed into one small tensor."""

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
        tag: name in TensorBoard and W&B. None leaves the field out of every report.
        settings: arguments of `dataclasses.field`, such as ``default``.
    """
    return dataclasses.field(metadata={"tag": tag}, **settings)


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """The figures of one step, on the host.

    On the device they are one FP32 tensor in the order of the fields (`pack`). The host copies it while the step runs
    and reads it one step later, so that nothing waits (`training.step_results`). To add a figure, add one line here
    and one where `train_step` packs it; metrics.jsonl, TensorBoard and W&B then report it. The figures of casts come
    from the `CastReport` instead. What parts of layers report stands beside them (`layer_report`).

    A figure with a default may be missing. Then it is NaN in the tensor and None here.
    """

    loss: float = reported("train/loss")
    """Mean over the global batch, nats per token."""
    stop_request: float = reported(None, default=0.0)
    """What any rank asks to stop for, as a number (`training.stopping.request_of`); 0: nothing."""
    grad_norm: float = reported("train/grad_norm")
    """Global norm before clipping."""
    params_norm: float | None = reported("train/params_norm", default=None)
    """Norm of all master weights after the step; None if it is not asked for."""
    num_zeros: float | None = reported("train/num_zeros", default=None)
    """Elements of the averaged gradients that are 0; None if they are not asked for."""
    update_rms_qkv: float | None = reported("optimizer/update_rms_qkv", default=None)
    """Root mean square of the elements of the orthogonal updates of QKV projections, without the learning rate; None if
    not measured."""
    update_rms_proj: float | None = reported("optimizer/update_rms_proj", default=None)
    """That of attention's output projections."""
    update_rms_fc1: float | None = reported("optimizer/update_rms_fc1", default=None)
    """That of the first linear layers of MLPs."""
    update_rms_fc2: float | None = reported("optimizer/update_rms_fc2", default=None)
    """That of the second ones."""
    orthogonality_error: float | None = reported("optimizer/orthogonality_error", default=None)
    """How far orthogonal updates are from that, ‖X·Xᵀ·v − v‖ / ‖v‖, mean over matrices; None if not measured."""
    grad_underflow_fraction: float | None = reported("fp8/grad_underflow_fraction", default=None)
    """Fraction of the non-zero weight gradient elements that a cast to FP8 made zero, over all ranks; None if not
    measured."""
    saturated_tensors: float | None = reported("fp8/saturated_tensors", default=None)
    """Tensors with an element that a delayed scale clamped, over all ranks; None without delayed scaling."""
    input_saturation_fraction: float | None = reported("fp8/input_saturation_fraction", default=None)
    """Fraction of the elements of linear layers' inputs that a delayed scale clamped, over all ranks."""
    grad_output_saturation_fraction: float | None = reported("fp8/grad_output_saturation_fraction", default=None)
    """The clamped fraction of linear layers' output gradients."""
    head_input_saturation_fraction: float | None = reported("fp8/head_input_saturation_fraction", default=None)
    """The clamped fraction of the FP8 LM head's input."""
    weight_grad_saturation_fraction: float | None = reported("fp8/weight_grad_saturation_fraction", default=None)
    """Clamped fraction of the weight gradients that GEMMs wrote in FP8, over all ranks; None if not measured."""
    weight_grad_saturated_tensors: float | None = reported("fp8/weight_grad_saturated_tensors", default=None)
    """Weight gradients among `saturated_tensors`."""
    grad_saturation_fraction: float | None = reported("fp8/grad_saturation_fraction", default=None)
    """Fraction of gradient elements that the native FP8 sum clamped, largest of all tensors; None without that sum."""
    autoscale_mu: float | None = reported("fp8/autoscale_mu", default=None)
    """Smallest pre-scale μ of auto-scaling; None without auto-scaling."""
    loss_scale: float | None = reported("train/loss_scale", default=None)
    """Factor of the next loss; None without a loss scale."""
    peak_memory_gib: float = reported("memory/peak_gib")
    """Peak memory of any rank so far. On a GPU: the allocator's peak and the memory counted beside it."""

    @classmethod
    def pack(cls, **figures: Tensor) -> Tensor:
        """Pack all figures into one tensor. Does not wait for the device.

        Args:
            figures: FP32 [1] each, on one device. Figures with a default can be left out.

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

    @staticmethod
    def num_packed() -> int:
        """Elements of a packed tensor."""
        return len(dataclasses.fields(StepFigures))

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
