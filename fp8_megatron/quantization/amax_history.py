"""Delayed scaling: the amax history of every activation and output gradient of a rank, and the scales it gives.

One object per model chunk holds all slots in flat tensors, so that the end of a step costs one all-reduce and a few
small kernels however many layers there are (FP8 Formats for Deep Learning, arXiv 2209.05433, section 5; FP8-LM,
arXiv 2310.18313, section 2.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from ..formats import MAX_FINITE
from .scale import updated_scale


class AmaxHistory:
    """Amaxes of the last `length` steps for a set of slots, and each slot's current scale.

    Slots are added while the model is built; `allocate` then makes the tensors. Within a step the amaxes of all
    micro-batches (and of recomputed forwards, which therefore see the same scale) go into `amax`; `update` closes the
    step. Before the first update `is_warm` is False and quantisers take current scaling.
    """

    def __init__(self, length: int, algo: Literal["max", "most_recent"], *, power_of_two: bool) -> None:
        self.length = length
        self.algo = algo
        self.power_of_two = power_of_two
        self.is_warm = False
        self._dtypes: list[torch.dtype] = []
        self.amax: Tensor | None = None
        self.scale: Tensor | None = None
        self.history: Tensor | None = None
        self._fp_max: Tensor | None = None
        self._amaxes: Sequence[Tensor] = ()
        self._scales: Sequence[Tensor] = ()

    def add_slot(self, dtype: torch.dtype) -> int:
        """Reserve a slot for a tensor quantised to `dtype`; returns its index."""
        assert self.amax is None, "slots are added before allocate()"
        self._dtypes.append(dtype)
        return len(self._dtypes) - 1

    def allocate(self, device: torch.device) -> None:
        """Make the tensors: amax, scale, fp_max FP32 [num_slots], history FP32 [length, num_slots]."""
        num_slots = len(self._dtypes)
        self.amax = torch.zeros(num_slots, device=device)
        self._amaxes = self.amax.view(-1, 1).unbind()
        self._take_scales(torch.ones(num_slots, device=device))
        self.history = torch.zeros(self.length, num_slots, device=device)
        self._fp_max = torch.tensor([MAX_FINITE[dtype] for dtype in self._dtypes], device=device)

    def amax_of(self, slot: int) -> Tensor:
        """FP32 [1], where this step's amax of `slot` is recorded (a view)."""
        return self._amaxes[slot]

    def scale_of(self, slot: int) -> Tensor:
        """FP32 [1], the scale of `slot` in this step; 16-byte aligned, as cuBLASLt wants it.

        A later step has other memory, so that a late backward still reads what its forward took.
        """
        return self._scales[slot]

    def _take_scales(self, scale: Tensor) -> None:
        """Scales for the next step, FP32 [num_slots]."""
        self.scale = scale
        self._scales = torch.nn.functional.pad(scale[:, None], (0, 3))[:, :1].unbind()

    def update(self, group: torch.distributed.ProcessGroup | None) -> None:
        """Close a step: MAX of the amaxes over `group`, push them into the history, take the new scales.

        Args:
            group: the ranks that share these tensors or hold replicas of the layer: tensor × data parallel. Not the
                pipeline, whose stages hold other layers.
        """
        if self.amax is None or not self._dtypes:
            return
        assert self.scale is not None and self.history is not None and self._fp_max is not None
        if group is not None and group.size() > 1:
            torch.distributed.all_reduce(self.amax, op=torch.distributed.ReduceOp.MAX, group=group)
        self.history.copy_(torch.roll(self.history, 1, dims=0))
        self.history[0].copy_(self.amax)
        if self.algo == "max":
            finite = torch.where(torch.isfinite(self.history), self.history, torch.zeros_like(self.history))
            amax = finite.amax(dim=0)
        else:
            amax = self.amax
        self._take_scales(updated_scale(amax, self.scale, self._fp_max, power_of_two=self.power_of_two))
        self.amax.zero_()
        self.is_warm = True

    def discard_current_step(self) -> None:
        """Forget the amaxes seen since the last update (a validation pass)."""
        if self.amax is not None:
            self.amax.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        """History and scales, for a checkpoint; empty without slots or before the first step."""
        if not self.is_warm or self.history is None or self.scale is None:
            return {}
        return {"history": self.history, "scale": self.scale}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore what `state_dict` gave."""
        if not state:
            return
        assert self.history is not None and self.scale is not None
        self.history.copy_(state["history"])
        self._take_scales(state["scale"].to(self.scale))
        self.is_warm = True
