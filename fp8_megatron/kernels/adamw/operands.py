"""The operands of the fused optimizer steps, in bundles: what is stored, and the step's numbers."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


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
    read."""

    grad: FlatState
    exp_avg: FlatState
    exp_avg_sq: FlatState
    master: FlatState


class SplitAdamState(NamedTuple):
    """`AdamState` with a split master (see `split_master`).

    Attributes:
        weight: flat E4M3 [n]. correction: flat int8 [n].
        weight_scales: FP32 [num_tensors], the scales of the stored `weight`; overwritten with `new_weight_scales`.
        new_weight_scales: FP32 [num_tensors], the scales that the step writes `weight` with; only read.
        chunk_tensor: int32 [n / chunk], the tensor of each chunk.
    """

    grad: FlatState
    exp_avg: FlatState
    exp_avg_sq: FlatState
    weight: Tensor
    correction: Tensor
    weight_scales: Tensor
    new_weight_scales: Tensor
    chunk_tensor: Tensor


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
