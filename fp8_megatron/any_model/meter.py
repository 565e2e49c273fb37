"""Memory and speed of a training loop, side by side for several precisions."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeGuard

import torch
from torch import Tensor

from ..quantization.scaled_tensor import ScaledTensor
from ..reporting.tables import table_text
from .optimizer import FP8Optimizer

#: Steps that are not timed: the first ones compile kernels and allocate memory.
_WARMUP_STEPS = 3
_LAST_LOSSES = 10


@dataclass(frozen=True)
class Bytes:
    """Bytes of a training state on one rank.

    Attributes:
        weights: parameters and buffers of the model.
        gradients: gradients between backward and ``zero_grad``.
        optimizer: moments and master weights.

    Each with its scales.
    """

    weights: int
    gradients: int
    optimizer: int

    @classmethod
    def of(cls, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> Bytes:
        """Count. Call it between backward and ``zero_grad``.

        Args:
            optimizer: torch's or an `FP8Optimizer`; None: the model is not trained.
        """
        tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        weights = sum(_stored(tensor) for tensor in tensors.values())
        if isinstance(optimizer, FP8Optimizer):
            held = optimizer.storage_bytes
            state = sum(held.values()) - held["weight"] - held["main_grad"] - held["grad_scales"]
            # The optimizer holds the scales of the weights that it trains.
            state -= sum(_stored(tensor.scale) for tensor in tensors.values() if _is_trained(tensor))
            return cls(weights, held["main_grad"] + held["grad_scales"], state)
        gradients = sum(_stored(param.grad) for param in model.parameters() if param.grad is not None)
        entries = optimizer.state.values() if optimizer is not None else ()
        state = sum(_stored(value) for entry in entries for value in entry.values() if isinstance(value, Tensor))
        return cls(weights, gradients, state)

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.gradients + self.optimizer


class Meter:
    """Watches one training loop: losses, time a step, bytes of its state, peak memory of the GPU.

    Args:
        name: of the row, for instance ``O2``.
        model, optimizer: what is trained.

    Attributes:
        kept_bytes: of the loop's recordings (`RecordedStep.kept_bytes`), for the loop to set.
    """

    def __init__(self, name: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer):
        self.name = name
        self.kept_bytes = 0
        self.bytes: Bytes | None = None
        self.losses: list[Tensor] = []
        self.num_steps = 0
        self._model, self._optimizer = model, optimizer
        self._device = next(model.parameters()).device
        self._seconds: list[float] = []
        self._since = 0.0
        gc.collect()  # an earlier loop's model may be held by a circle of references
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def step(self, loss: Tensor | None = None) -> None:
        """Call it once a step, behind ``optimizer.step()`` and in front of ``zero_grad``. It waits for the device."""
        self.num_steps += 1
        if loss is not None:
            self.losses.append(loss.detach().float())
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        if self.num_steps > _WARMUP_STEPS:
            self._seconds.append(now - self._since)
        if self.bytes is None:
            self.bytes = Bytes.of(self._model, self._optimizer)
        self._since = time.perf_counter()

    @property
    def step_seconds(self) -> float:
        """The median step; NaN before the fifth."""
        return median(self._seconds) if self._seconds else float("nan")

    @property
    def loss(self) -> float:
        """The mean over the last steps; NaN if none was given."""
        if not self.losses:
            return float("nan")
        return float(torch.stack(self.losses[-_LAST_LOSSES:]).mean())

    def peak_bytes(self) -> int | None:
        """Most memory in use on the GPU since the meter was made; None on a CPU."""
        if self._device.type != "cuda":
            return None
        resting = torch.cuda.memory_allocated(self._device)
        return max(torch.cuda.max_memory_allocated(self._device), resting + self.kept_bytes)

    def finish(self, loss: float | None = None) -> Row:
        """The loop's figures. Drops model and optimizer, so that the next loop has their memory.

        Args:
            loss: instead of the mean over the last steps.
        """
        assert self.bytes is not None, "step was never called"
        row = Row(self.name, self.bytes, self.peak_bytes(), self.step_seconds, self.loss if loss is None else loss)
        del self._model, self._optimizer
        return row


@dataclass(frozen=True)
class Row:
    """The figures of one training loop. Bytes on one rank, seconds a step, the mean of the last losses."""

    name: str
    bytes: Bytes
    peak: int | None
    step_seconds: float
    loss: float


def table(rows: Sequence[Row]) -> str:
    """Rows as text, one below the other. Percentages are of the first row."""
    first = rows[0].bytes
    headings = ("", "weights", "gradients", "optimizer", "total", "GPU peak", "ms/step", "loss")
    lines = []
    for row in rows:
        own = row.bytes
        pairs = [
            (own.weights, first.weights),
            (own.gradients, first.gradients),
            (own.optimizer, first.optimizer),
            (own.total, first.total),
        ]
        sizes = [_megabytes(size) + ("" if row is rows[0] else _difference(size, other)) for size, other in pairs]
        peak = "-" if row.peak is None else _megabytes(row.peak)
        lines.append([row.name, *sizes, peak, f"{1000 * row.step_seconds:.1f}", f"{row.loss:.4f}"])
    return table_text(headings, lines, num_left=1, has_lines=False)


def _difference(size: int, other: int) -> str:
    return f" {100 * (size / other - 1):+.0f}%" if other else ""


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.2f} MB" if size < 1e8 else f"{size / 1e9:,.2f} GB"


def _stored(tensor: Tensor) -> int:
    """Bytes of a tensor's values, with their scales."""
    if isinstance(tensor, ScaledTensor):
        return _stored(tensor.payload) + _stored(tensor.scale)
    return tensor.numel() * tensor.element_size()


def _is_trained(tensor: Tensor) -> TypeGuard[ScaledTensor]:
    return isinstance(tensor, ScaledTensor) and tensor.owner is not None
