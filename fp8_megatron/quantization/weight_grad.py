"""A weight's gradient as the operands of its GEMM. Its place decides what the GEMM writes.

In 16 or 32 bits the GEMM adds to the storage itself: one rounding, and no pass over the sum. With a delayed scale it
writes FP8 into a send buffer: the gradient never exists in 16 bits, and no kernel casts it. (FP8-LM, arXiv 2310.18313,
section 2.1, also has one scale per tensor, from the gradient's own amax.)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..dtypes import CLAMPED_ABOVE, E4M3, FP8_GEMM_MULTIPLE, GRAD_BLOCK
from ..formats.format import Quantized
from ..kernels import ops
from .amax_history import AmaxHistory


class DelayedGradScale(NamedTuple):
    """The amax-history slot that gives a weight gradient's scale. The scale is known after the first step that has
    seen one."""

    history: AmaxHistory
    slot: int


class GradPlace(NamedTuple):
    """Where a weight's gradient is written.

    Attributes:
        payload: FP8, flat and with padding; or [N, K] in 16 or 32 bits.
        scales: of the FP8 payload, one for each `GRAD_BLOCK` elements; None for a wide payload.
        adds: the wide payload holds the sum of earlier gradients, to which this one is added.
    """

    payload: Tensor
    scales: Tensor | None
    adds: bool = False


class WeightGrad(NamedTuple):
    """grad_weight [N, K] = gᵀ·x of one micro-batch, or [G, N, K] of groups, computed on demand. Compute it only once.

    Attributes:
        g_t: the output gradient's transpose [N, T]. x_t: the input's [K, T].
        dtype: the dtype of `wide`.
        scale: the delayed scale. If it is None, an FP8 gradient is cast from `wide`, with a scale for each block.
        total: FP32 [N, K], the gradient itself if it was added up over chunks of tokens (`WeightGradSum`). There are no
            operands then.
        offsets: int32 [G + 1] of groups of tokens (`ops.routed_rows`), each with a matrix of its own. None: the weight
            is one matrix.
    """

    g_t: Quantized
    x_t: Quantized
    dtype: torch.dtype
    scale: DelayedGradScale | None = None
    total: Tensor | None = None
    offsets: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """[N, K] or [G, N, K]."""
        if self.total is not None:
            return self.total.shape
        matrix = (self.g_t.payload.shape[0], self.x_t.payload.shape[0])
        return torch.Size(matrix if self.offsets is None else (len(self.offsets) - 1, *matrix))

    def wide(self) -> Tensor:
        """The gradient in `dtype`; in FP32 if it was added up."""
        if self.offsets is not None:
            grad = torch.empty(self.shape, dtype=self.dtype, device=self.g_t.payload.device)
            self.g_t.write_wgrad_of_groups_(grad, self.x_t, self.offsets)
            return grad
        grad = self.g_t.multiply(self.x_t, self.dtype) if self.total is None else self.total
        if self.scale is not None and not self.writes_fp8:  # the scale waits for its first amax
            self.scale.history.raise_amax(self.scale.slot, ops.amax(grad))
        return grad

    def write_(self, place: GradPlace) -> None:
        """Write the gradient to its place or add it. A place in FP8 needs `writes_fp8`."""
        out = place.payload
        if place.scales is not None:
            self.write_fp8_(out, place.scales)
        elif self.offsets is not None:
            self.g_t.write_wgrad_of_groups_(out, self.x_t, self.offsets, adds=place.adds)
        elif self.total is None and (self.scale is None or self.writes_fp8):
            self.g_t.multiply_into_(out, self.x_t, addend=out if place.adds else None)
        elif place.adds:
            out.add_(self.wide())
        else:
            out.copy_(self.wide())

    @property
    def writes_fp8(self) -> bool:
        """Whether it can be written in FP8."""
        if self.offsets is not None:
            return self.shape[-1] % GRAD_BLOCK == 0
        return self.scale is not None and self.scale.history.knows(self.scale.slot)

    def sample(self, payload: Tensor, wide: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """An even sample of rows, and what was written of them to FP8 `payload`; both [n, K].

        It has every 16th row, or at least 16 rows; all rows below 2²⁰ elements. It takes a second GEMM, of these rows,
        or of all groups' rows.

        Args:
            wide: the gradient, if it is known: then there is no GEMM.
        """
        numel = self.shape.numel()
        count = numel // self.shape[-1]
        if wide is None and self.offsets is not None:
            wide = self.wide()
        step = 1 if numel < ops.SAMPLED_FROM else max(1, min(ops.SAMPLE_EVERY, count // FP8_GEMM_MULTIPLE))
        # The rows of some GEMMs are multiples of that.
        whole = count if step == 1 else count // (step * FP8_GEMM_MULTIPLE) * (step * FP8_GEMM_MULTIPLE)
        rows = slice(0, whole, step)
        wide = self.total if wide is None else wide.view(count, -1)
        if wide is None:
            g_t = self.g_t.rows(rows)
            g_t.payload = g_t.payload.contiguous()
            chosen = g_t.multiply(self.x_t, self.dtype)
        else:
            chosen = wide[rows].contiguous()
        return chosen, payload[:numel].view(count, -1)[rows].contiguous()

    def count_clamped(self, wide: Tensor) -> Tensor:
        """How many of some elements the delayed scale clamps: int64 [2], their number and that of the clamped ones. No
        host sync. Groups' gradients have scales of their own values, which clamp none.

        Args:
            wide: elements of this gradient in 16 or 32 bits, any shape.
        """
        if self.offsets is not None:
            clamped = torch.zeros((), dtype=torch.int64, device=wide.device)
        else:
            assert self.scale is not None
            limit = self.scale.history.scale_of(self.scale.slot) * CLAMPED_ABOVE[E4M3]
            clamped = (wide.abs() > limit).sum()
        return torch.stack([torch.full_like(clamped, wide.numel()), clamped])

    def write_fp8_(self, payload: Tensor, scales: Tensor) -> None:
        """Write the gradient to flat E4M3 `payload` [≥ N·K], zeros behind it, and its scale to all of `scales`; of
        groups the scale of each block."""
        numel = self.shape.numel()
        out = payload[:numel].view(self.shape)
        if self.offsets is not None:
            self.g_t.write_wgrad_of_groups_(out, self.x_t, self.offsets, scales=scales)
            return
        assert self.scale is not None
        history, slot = self.scale
        if self.total is None:
            assert self.g_t.format.takes_scale, self.g_t.format
            ops.scaled_mm_to_fp8_(
                out,
                history.written_amax_of(slot),
                self.g_t.payload,
                self.x_t.payload,
                self.g_t.scale,
                self.x_t.scale,
                history.inverse_of(slot),
            )
        else:
            amax = history.amax_of(slot)
            cast, _ = ops.quantize_with_scale(self.total, history.scale_of(slot), E4M3, amax_out=amax)
            out.copy_(cast)
        if numel < payload.numel():
            payload[numel:].view(torch.uint8).zero_()
        scales.copy_(history.scale_of(slot).expand_as(scales))


class WeightGradSum:
    """grad_weight [N, K], added up in FP32 over chunks of tokens by the GEMM itself.

    Args:
        scale: as `WeightGrad.scale`.
    """

    __slots__ = ("_dtype", "_scale", "_total")

    def __init__(self, dtype: torch.dtype, scale: DelayedGradScale | None) -> None:
        self._dtype, self._scale = dtype, scale
        self._total: Tensor | None = None

    def add(self, g_t: Quantized, x_t: Quantized) -> None:
        """Add a chunk's gradient, from its `WeightGrad.g_t` and `x_t`."""
        if self._total is None:
            self._total = g_t.multiply(x_t, torch.float32)
        else:
            g_t.multiply_into_(self._total, x_t, addend=self._total)

    def take(self) -> WeightGrad:
        """Return and drop the sum. At least one chunk was added."""
        total, self._total = self._total, None
        assert total is not None
        return WeightGrad(None, None, self._dtype, self._scale, total)  # type: ignore[arg-type]
