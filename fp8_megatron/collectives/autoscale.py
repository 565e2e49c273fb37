"""Auto-scaling of gradients that are summed in FP8 (FP8-LM, arXiv 2310.18313, section 2.1).

A sum of N gradients at one scale may overflow, and a gradient divided by N beforehand may underflow. The paper sends
g' = μ·g and lets the data move μ between the two: it halves after a step in which more than 0.001% of a tensor's
elements were at E4M3's largest value. Otherwise it grows so that it doubles over 1,000 steps.

Here μ enters only the scale. With S = amax / 448 over all ranks, the common dequantising scale of
the payloads of μ·g is D = S/μ, rounded up to a power of two; each rank sends ``round(g / D)``, and the mean is
``D · sum / N``. The same D encodes and decodes: μ cannot enter the result twice or inverted, for any amax. A power of
two moves E4M3 blocks to the shared scale without rounding them again, as long as they do not
underflow.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..dtypes import E4M3, GRAD_BLOCK, MAX_FINITE
from ..kernels import ops

#: μ halves when more than this fraction of a tensor's elements is at the format's largest value.
SATURATION_THRESHOLD = 1e-5
#: Steps over which an unsaturated tensor's μ doubles.
STEPS_TO_DOUBLE = 1000

_MAX_CODE = 0x7E  # E4M3's 448, sign removed; 0x7F is NaN
_MAGNITUDE = 0x7F
#: Blocks requantised at a time, which bounds the FP32 copy (64 MiB).
_CHUNK_BLOCKS = 1 << 17
#: Marks a tensor without any observation: μ stays. It is below every fraction, so a MAX over ranks prefers fractions.
_UNSEEN = -1.0


class AutoScale:
    """μ of every tensor in one flat gradient, adjusted by saturation; the host never waits for the device.

    A reduction calls, in this order: `measure`, a MAX of its result over the ranks, `update`, `requantize_`, then the
    sum in FP8, then `note_sum`. One reduction of an object is in flight at a time. `begin_step` and `end_step` enclose
    the reductions of a step: one that is skipped leaves nothing. Every rank holds the same μ, because only values
    shared by all ranks change it.

    Args:
        num_tensors: T. block_tensor: integer [n / 128], the tensor that each block of 128 elements belongs to; padding
            may be assigned to any tensor.
        device: where the gradient is.
        initial_mu: μ before the first reduction. 1 is the paper's post-scaling, whose sum may overflow at first; 1/N
            its pre-scaling, which cannot.
        reductions_per_step: growth is per step, halving per reduction.

    Attributes:
        mu: FP32 [T].
        saturated_fraction: FP32 [T], the last reduction's largest fraction at ±448 on any rank, of the sent elements or
            of their sum, 0…1; −1 if the tensor was all zero. `update` sets it, so it is one reduction late.
        underflow_fraction: FP32 [T], the fraction of this rank's non-zero elements that the shared scale made zero.
        block_scales: FP32 [n / 128], D of the reduction in flight.
    """

    def __init__(
        self,
        num_tensors: int,
        block_tensor: Tensor,
        device: torch.device,
        *,
        initial_mu: float = 1.0,
        reductions_per_step: int = 1,
    ) -> None:
        self.num_tensors = num_tensors
        self.mu = torch.full((num_tensors,), initial_mu, dtype=torch.float32, device=device)
        self.saturated_fraction = torch.full_like(self.mu, _UNSEEN)
        self.underflow_fraction = torch.zeros_like(self.mu)
        self.block_scales = torch.ones(block_tensor.numel(), dtype=torch.float32, device=device)
        self._block_tensor = block_tensor.to(device=device, dtype=torch.int64)
        self._growth = 2.0 ** (1.0 / (STEPS_TO_DOUBLE * reductions_per_step))
        self._seen = torch.full_like(self.mu, _UNSEEN)
        #: FP32 [2, T], μ and the last saturated fractions before the step.
        self._before = torch.stack([self.mu, self._seen])

    def begin_step(self) -> None:
        """Remember what `end_step` may go back to."""
        torch.stack([self.mu, self._seen], out=self._before)

    def end_step(self, is_taken: Tensor) -> None:
        """Go back to before the step if it is skipped.

        Args:
            is_taken: bool [1] on the device, the same on all ranks; False: the step is skipped.
        """
        for value, before in zip((self.mu, self._seen), self._before, strict=True):
            torch.where(is_taken, value, before, out=value)

    def measure(self, payload: Tensor, scales: Tensor) -> Tensor:
        """FP32 [2, T]: each tensor's amax, and its last saturated fraction on this rank. `update` takes the MAX of both
        over the ranks. Blocks that are not finite are left out of the amax.

        Args:
            payload: E4M3 [n]. scales: FP32 [n / 128], dequantising.
        """
        largest = _magnitudes(payload).view(-1, GRAD_BLOCK).amax(dim=1).view(E4M3)
        block_amax = ops.decode(largest, scales)
        block_amax = torch.where(torch.isfinite(block_amax), block_amax, torch.zeros_like(block_amax))
        amax = torch.zeros_like(self.mu).scatter_reduce_(0, self._block_tensor, block_amax, "amax")
        return torch.stack([amax, self._seen])

    def update(self, shared: Tensor) -> None:
        """Adjust μ by the saturation of the last reduction, and compute the scales of this one.

        Args:
            shared: the MAX over the ranks of the result of `measure`.
        """
        amax, saturated = shared
        self.saturated_fraction.copy_(saturated)
        moved = torch.where(saturated > SATURATION_THRESHOLD, self.mu * 0.5, self.mu * self._growth)
        self.mu.copy_(torch.where(saturated >= 0.0, moved, self.mu))
        scale = ops.scale_from_amax(amax, E4M3, power_of_two=False)
        scale = ops.round_up_to_power_of_two(scale / self.mu)
        torch.index_select(scale, 0, self._block_tensor, out=self.block_scales)

    def requantize_(self, payload: Tensor, scales: Tensor, out: Tensor) -> None:
        """Move E4M3 blocks to the scales of their tensors: ``out = clamp(payload · scales / block_scales)``.

        A block whose scale is NaN becomes NaN. Counts saturated and underflowed elements.

        Args:
            payload, scales: as for `measure`. out: E4M3 [n], other memory; overwritten.
        """
        nonzero, at_max, lost = [], [], []
        limit = MAX_FINITE[E4M3]
        for first in range(0, scales.numel(), _CHUNK_BLOCKS):
            blocks = slice(first, first + _CHUNK_BLOCKS)
            elements = slice(first * GRAD_BLOCK, (first + _CHUNK_BLOCKS) * GRAD_BLOCK)
            value = ops.dequantize_blockwise(payload[elements], scales[blocks] / self.block_scales[blocks])
            out[elements].copy_(value.clamp_(-limit, limit))
            before, after = _magnitudes(payload[elements]), _magnitudes(out[elements])
            nonzero.append(_count_per_block(before != 0))
            at_max.append(_count_per_block(after == _MAX_CODE))
            lost.append(_count_per_block((after == 0) & (before != 0)))
        blocks = slice(0, scales.numel())
        num_nonzero = self._per_tensor(torch.cat(nonzero), blocks)
        self._seen.copy_(self._fraction_or_unseen(self._per_tensor(torch.cat(at_max), blocks), blocks, num_nonzero))
        self.underflow_fraction.copy_(self._per_tensor(torch.cat(lost), blocks) / num_nonzero.clamp_min(1))

    def note_sum(self, payload: Tensor, first_block: int) -> None:
        """Count saturated elements in this rank's shard of the sum.

        Args:
            payload: E4M3 [shard]. first_block: the place of its first block in the gradient.
        """
        blocks = slice(first_block, first_block + payload.numel() // GRAD_BLOCK)
        codes = _magnitudes(payload)
        at_max = self._per_tensor(_count_per_block(codes == _MAX_CODE), blocks)
        num_nonzero = self._per_tensor(_count_per_block(codes != 0), blocks)
        torch.maximum(self._seen, self._fraction_or_unseen(at_max, blocks, num_nonzero), out=self._seen)

    def state_dict(self) -> dict[str, Tensor]:
        """μ, and the saturated fractions of this rank since μ last moved, for a checkpoint."""
        return {"mu": self.mu, "seen": self._seen}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore `state_dict`."""
        self.mu.copy_(state["mu"])
        self._seen.copy_(state["seen"])

    def _per_tensor(self, block_counts: Tensor, blocks: slice) -> Tensor:
        """int64 counts of a run of blocks → int64 [T]."""
        totals = torch.zeros(self.num_tensors, dtype=torch.int64, device=self.mu.device)
        return totals.scatter_add_(0, self._block_tensor[blocks], block_counts)

    def _fraction_or_unseen(self, counts: Tensor, blocks: slice, num_nonzero: Tensor) -> Tensor:
        """`counts` over the tensors' elements in a run of blocks; −1 where all of these are zero."""
        num_blocks = self._per_tensor(torch.ones_like(self._block_tensor[blocks]), blocks)
        fraction = counts / (num_blocks * GRAD_BLOCK).clamp_min(1)
        return torch.where(num_nonzero > 0, fraction, torch.full_like(fraction, _UNSEEN))


def _magnitudes(payload: Tensor) -> Tensor:
    """E4M3 codes without their signs, uint8: they order as the magnitudes do, NaN above all."""
    return payload.view(torch.uint8).bitwise_and(_MAGNITUDE)


def _count_per_block(mask: Tensor) -> Tensor:
    return mask.view(-1, GRAD_BLOCK).sum(dim=1)
