"""AdamW over a split master: FP8 weights with a byte of correction (`kernels.split_master`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...kernels import ops
from .adamw import AdamW


class SplitAdamW(AdamW):
    """`AdamW` that moves the weights themselves. Their scales after a step are predicted from a bound of its update."""

    def next_scales(self, amax: Tensor, group: Mapping[str, Any], previous: Tensor) -> Tensor:
        """FP32 [tensors], the scales that this step writes the weights with.

        Args:
            amax: FP32 [tensors], the largest magnitude of each master. previous: their scales.
        """
        hyper = self.hyper(group)
        return ops.next_weight_scales(amax, lr=hyper.lr, beta1=hyper.beta1, beta2=hyper.beta2, previous=previous)

    def split_step(
        self,
        operands: ops.SplitAdamState,
        group: Mapping[str, Any],
        *,
        grad_factor: Tensor,
        step: Tensor,
        chunk_amax: Tensor,
    ) -> None:
        """As `UpdateRule.step`."""
        ops.adamw_split_step_(operands, self.hyper(group), grad_factor=grad_factor, step=step, chunk_amax=chunk_amax)
