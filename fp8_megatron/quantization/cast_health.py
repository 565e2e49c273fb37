"""Statistics of single casts on sampled steps: what each layer's FP8 operands lose, and where their values lie.

Every cast has a probe. On a sampled step the probe measures its first cast, of the step's first micro-batch; on other
steps it costs the test of a flag. Large operands are measured on evenly spaced rows. A fused kernel never writes the
values that it casts, so they are computed again for these rows (`unfused`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..dtypes import GRAD_BLOCK
from ..formats.format import Quantized
from ..kernels import ops
from . import unfused
from .sources import (
    ActivationGradSource,
    ActivationSource,
    ExpertActivationGradSource,
    ExpertActivationSource,
    GradSource,
    NormSource,
    QKVGradSource,
    Source,
    TensorSource,
)

#: About how many elements of an operand are measured. Values that are computed again take 4 bytes each, a few times.
SAMPLED_ELEMENTS = 1 << 21


class CastProbe:
    """The place of one role of one layer for the statistics of its cast.

    Attributes:
        is_due: whether the next cast is measured. Whoever samples sets it; a measurement clears it.
        statistics: FP64 [`ops.NUM_STATISTICS`], see `ops.Statistic`; set before `is_due`.
    """

    __slots__ = ("is_due", "statistics")

    def __init__(self) -> None:
        self.is_due = False
        self.statistics: Tensor | None = None

    @torch.no_grad()
    def measure(self, value: Tensor, payload: Tensor, scales: Tensor) -> None:
        """Measure a cast, given as to `ops.measure_cast_`."""
        assert self.statistics is not None
        self.is_due = False
        value = value if value.stride(1) == 1 else value.contiguous()
        ops.measure_cast_(value, payload, scales, self.statistics)

    @torch.no_grad()
    def measure_source(self, source: Source[Any], cast: Any) -> None:
        """Measure the cast that a quantiser made of `source`, one of `sources`."""
        operand = cast if isinstance(cast, Quantized) else cast.operand
        if isinstance(source, QKVGradSource):
            self._measure_qkv(source, operand)
            return
        step = row_step(*operand.payload.shape)
        value = _rows(source, step, fused=operand.format.fuses)
        payload, scales = operand.payload[::step], operand.format.row_scales(operand, step)
        if isinstance(source, ExpertActivationSource | ExpertActivationGradSource):
            forward = source if isinstance(source, ExpertActivationSource) else source.forward
            self._measure_tokens(value, payload, scales, forward.probs[::step, None] != 0.0)
        else:
            self.measure(value, payload, scales)

    @torch.no_grad()
    def measure_weight(self, weight: Tensor, operand: Quantized) -> None:
        """Measure a weight [N, K] in 16 or 32 bits that was cast for a GEMM."""
        step = row_step(*weight.shape)
        self.measure(weight[::step], operand.payload[::step], operand.format.row_scales(operand, step))

    @torch.no_grad()
    def measure_stored(self, operand: Quantized) -> None:
        """Measure a weight [N, K] that exists in FP8 only. It has no errors and no underflow, because nothing is known
        of its values before the cast."""
        step = row_step(*operand.payload.shape)
        payload, scales = operand.payload[::step], operand.format.row_scales(operand, step)
        block = ops.measured_block(payload, scales)
        wide = scales.repeat_interleave(block, dim=1)[:, : payload.shape[1]]
        self.measure(ops.decode(payload, wide), payload, scales)

    @torch.no_grad()
    def measure_blocks(self, value: Tensor, payload: Tensor, scales: Tensor) -> None:
        """Measure a flat tensor [n] with a scale for each 128 elements. An incomplete last block is left out.

        Args:
            payload: FP8 [≥ n]; scales: FP32 [≥ n / 128].
        """
        blocks = value.numel() // GRAD_BLOCK
        if blocks == 0:
            self.is_due = False
            return
        step = row_step(blocks, GRAD_BLOCK)
        whole = blocks * GRAD_BLOCK
        self.measure(
            value[:whole].view(blocks, GRAD_BLOCK)[::step],
            payload[:whole].view(blocks, GRAD_BLOCK)[::step],
            scales[:blocks, None][::step],
        )

    def _measure_tokens(self, value: Tensor, payload: Tensor, scales: Tensor, has_token: Tensor) -> None:
        """Measure the rows of experts that have a token, bool [M, 1]. Of the others, which may not be written, nothing
        counts."""
        codes = torch.where(has_token, payload.view(torch.uint8), 0)
        scales = torch.where(has_token, scales, 1.0)
        self.measure(torch.where(has_token, value, 0.0), codes.view(payload.dtype), scales)
        assert self.statistics is not None
        self.statistics[ops.Statistic.COUNT] -= (~has_token).sum() * value.shape[1]

    def _measure_qkv(self, source: QKVGradSource, operand: Quantized) -> None:
        sequence = source.grads[0].shape[0]
        step = min(row_step(*operand.payload.shape), sequence)
        value = source.every(step).joined()
        columns = operand.payload.shape[1]
        payload = operand.payload.view(torch.uint8).view(sequence, -1, columns)[::step].reshape(-1, columns)
        scales = operand.format.row_scales(operand, 1)
        scales = scales.reshape(sequence, -1, scales.shape[1])[::step].reshape(-1, scales.shape[1])
        self.measure(value, payload.view(operand.payload.dtype), scales)


def row_step(rows: int, columns: int) -> int:
    """The distance between the rows that are measured."""
    return min(max(1, rows * columns // SAMPLED_ELEMENTS), rows)


def _rows(source: Source[Any], step: int, *, fused: bool) -> Tensor:
    """Every `step`-th row of the values that `source` casts.

    Args:
        fused: computed and cast in one pass, without rounding to 16 bits in between.
    """

    def rows(x: Tensor) -> Tensor:
        return x[::step].float() if fused else x[::step]

    if isinstance(source, TensorSource):
        return source.x[::step]
    if isinstance(source, GradSource):
        return source.g[::step]
    if isinstance(source, NormSource):
        return unfused.norm(rows(source.x), source.weight, source.bias, eps=source.eps, rms=source.rms)[0]
    if isinstance(source, ActivationSource):
        return unfused.activated(rows(source.z), source.activation)
    if isinstance(source, ExpertActivationSource):
        return source.probs[::step, None] * unfused.activated(rows(source.z), source.activation)
    if isinstance(source, ExpertActivationGradSource):
        z, probs, function = source.forward.z, source.forward.probs, source.forward.activation
        return unfused.activation_backward(rows(source.grad) * probs[::step, None], rows(z), function)
    assert isinstance(source, ActivationGradSource), source
    return unfused.activation_backward(rows(source.grad), rows(source.z), source.activation)
