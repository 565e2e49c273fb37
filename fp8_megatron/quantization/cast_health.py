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
from .sources import Source

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
    def measure(self, value: Tensor, payload: Tensor, scales: Tensor, counts: Tensor | None = None) -> None:
        """Measure a cast, given as to `ops.measure_cast_`; with `counts` as in `Sample`."""
        assert self.statistics is not None
        self.is_due = False
        if counts is not None:
            codes = torch.where(counts, payload.view(torch.uint8), 0)
            scales = torch.where(counts, scales, 1.0)
            value, payload = torch.where(counts, value, 0.0), codes.view(payload.dtype)
        value = value if value.stride(1) == 1 else value.contiguous()
        ops.measure_cast_(value, payload, scales, self.statistics)
        if counts is not None:
            self.statistics[ops.Statistic.COUNT] -= (~counts).sum() * value.shape[1]

    @torch.no_grad()
    def measure_source(self, source: Source[Any], cast: Any) -> None:
        """Measure the cast that a quantiser made of `source`, one of `sources`."""
        operand = cast if isinstance(cast, Quantized) else cast.operand
        self.measure(*source.sample(operand, row_step(*operand.payload.shape)))

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


def row_step(rows: int, columns: int) -> int:
    """The distance between the rows that are measured."""
    return min(max(1, rows * columns // SAMPLED_ELEMENTS), rows)
