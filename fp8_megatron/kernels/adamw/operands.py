"""The operands of the fused optimizer steps, in bundles: what is stored, and the step's numbers."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from ..rounding import Places


class FlatState(NamedTuple):
    """A flat tensor as it is stored.

    Attributes:
        payload: [n], in any storage dtype.
        scales: FP32 [n / block], the block scales; None for a dtype without scales.
    """

    payload: Tensor
    scales: Tensor | None = None


class AdamState(NamedTuple):
    """The state that a step of Adam reads and updates, flat [n] each, in its own storage dtype. The gradient is only
    read.

    Attributes:
        places: where the elements lie in the whole model, for stochastic rounding; only read.
    """

    grad: FlatState
    exp_avg: FlatState
    exp_avg_sq: FlatState
    master: FlatState
    places: Places = Places()


class SplitAdamState(NamedTuple):
    """`AdamState` with a split master (see `split_master`).

    Attributes:
        weight: flat E4M3 [n]. correction: flat int8 [n].
        weight_scales: FP32 [num_tensors], the scales of the stored `weight`; overwritten with `new_weight_scales`.
        new_weight_scales: FP32 [num_tensors], the scales that the step writes `weight` with; only read.
        chunk_tensor: int32 [n / chunk], the tensor of each chunk.
        places: as in `AdamState`.
    """

    grad: FlatState
    exp_avg: FlatState
    exp_avg_sq: FlatState
    weight: Tensor
    correction: Tensor
    weight_scales: Tensor
    new_weight_scales: Tensor
    chunk_tensor: Tensor
    places: Places = Places()


class AdamHyper(NamedTuple):
    """The numbers of a step.

    Attributes:
        decoupled: weight decay is separate from the gradient (AdamW); otherwise it is the gradient's L2 term (Adam).
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool

    @property
    def update_bound(self) -> float:
        """The largest update of Adam with exact moments, in learning rates, whatever the gradients.

        ``(1-β₁) / √((1-β₂)(1-β₁²/β₂))``, by Cauchy-Schwarz on the two sums over past gradients: 1.17 at (0.9, 0.95),
        7.3 at (0.9, 0.999). Infinite if β₁² ≥ β₂.
        """
        if self.beta1 == 0.0:
            return max(1.0, 1.0 / math.sqrt(1.0 - self.beta2))
        if self.beta1 * self.beta1 >= self.beta2:
            return math.inf
        return max(
            1.0, (1.0 - self.beta1) / math.sqrt((1.0 - self.beta2) * (1.0 - self.beta1 * self.beta1 / self.beta2))
        )

    @property
    def largest_change(self) -> float:
        """The largest update beside rounded moments."""
        return self.lr * self.update_bound if self.update_bound < math.inf else math.inf
