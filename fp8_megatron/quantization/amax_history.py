"""Delayed scaling: the amax histories of a rank's activations and output gradients, and the scales derived from them
(FP8 Formats for Deep Learning, arXiv 2209.05433, section 5; FP8-LM, arXiv 2310.18313, section 2.1).

One object per model chunk holds all slots in flat tensors. The end of a step therefore costs one all-reduce and a few
small kernels, for any number of layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from ..device.group import Group
from ..formats import MAX_FINITE
from ..kernels import ops

#: Written amaxes of a slot that one step keeps. With more micro-batches, the last ones count.
_WRITTEN_AMAXES = 8
#: FP32 values from one scale to the next: cuBLASLt needs 16-byte alignment.
_STRIDE = 4


class AmaxHistory:
    """Amaxes of the last `length` steps for a set of slots, and each slot's current scale.

    Slots are added while the model is built; `allocate` then makes the tensors. Within a step, `amax` collects the
    amaxes of all micro-batches and of recomputed forwards, so a recomputed forward sees the same scale. `update` closes
    the step. Before the first update, `is_warm` is False and quantisers use current scaling.
    """

    def __init__(self, length: int, algo: Literal["max", "most_recent"], *, power_of_two: bool) -> None:
        self.length = length
        self.algo = algo
        self.power_of_two = power_of_two
        self.is_warm = False
        self._keeps_addresses = False
        self._largest: list[float] = []
        self.amax: Tensor | None = None
        #: FP32 [num_slots], this step's scales (a view).
        self.scale: Tensor | None = None
        self.history: Tensor | None = None
        self._fp_max: Tensor | None = None
        self._amaxes: Sequence[Tensor] = ()
        self._scales: Sequence[Tensor] = ()
        self._inverses: Sequence[Tensor] = ()
        self._padded_scales = self._padded_inverses = torch.empty(0)
        self._written: Tensor | None = None
        self._written_amaxes: Sequence[Iterator[Tensor]] = ()

    def add_slot(self, dtype: torch.dtype, *, headroom: float = 1.0) -> int:
        """Reserve a slot for a tensor quantised to `dtype`; returns its index.

        Args:
            headroom: the format's largest value represents this many times the amax seen.
        """
        assert self.amax is None, "slots are added before allocate()"
        self._largest.append(MAX_FINITE[dtype] / headroom)
        return len(self._largest) - 1

    def allocate(self, device: torch.device) -> None:
        """Make the tensors: amax, scale, fp_max FP32 [num_slots], history FP32 [length, num_slots]."""
        num_slots = len(self._largest)
        self.amax = torch.zeros(num_slots, device=device)
        self._amaxes = self.amax.view(-1, 1).unbind()
        self._take_scales(*(torch.ones(num_slots, _STRIDE, device=device) for _ in range(2)))
        self.history = torch.zeros(self.length, num_slots, device=device)
        self._fp_max = torch.tensor(self._largest, device=device)
        self._written = torch.zeros(num_slots, _WRITTEN_AMAXES, _STRIDE, device=device)
        self._written_amaxes = [itertools.cycle(places[:, :1].unbind()) for places in self._written]

    def amax_of(self, slot: int) -> Tensor:
        """FP32 [1], where this step's amax of `slot` is recorded (a view)."""
        return self._amaxes[slot]

    def raise_amax(self, slot: int, amax: Tensor) -> None:
        """Record an amax of `slot` in this step, FP32 [1]."""
        recorded = self.amax_of(slot)
        torch.maximum(recorded, amax, out=recorded)

    def written_amax_of(self, slot: int) -> Tensor:
        """FP32 [1], where a GEMM writes an amax of `slot` instead of raising one; each call gives another place."""
        return next(self._written_amaxes[slot])

    def inverse_of(self, slot: int) -> Tensor:
        """FP32 [1], 1 / `scale_of`, with the same alignment."""
        return self._inverses[slot]

    def scale_of(self, slot: int) -> Tensor:
        """FP32 [1], the scale of `slot` in this step, 16-byte aligned for cuBLASLt.

        Each step has its scales in new memory, so a late backward still reads the scale of its forward. After
        `keep_addresses` the memory stays the same.
        """
        return self._scales[slot]

    def keep_addresses(self) -> None:
        """Keep the scales of all following steps in the same memory, for a recorded step. No backward may be late."""
        self._keeps_addresses = True

    def _take_scales(self, scales: Tensor, inverses: Tensor) -> None:
        """Scales for the next step and their reciprocals, FP32 [num_slots, _STRIDE] in column 0."""
        if self._keeps_addresses:
            self._padded_scales.copy_(scales)
            self._padded_inverses.copy_(inverses)
            return
        self._padded_scales, self._padded_inverses, self.scale = scales, inverses, scales[:, 0]
        self._scales, self._inverses = scales[:, :1].unbind(), inverses[:, :1].unbind()

    def update(self, group: Group | None) -> None:
        """Close a step: MAX of the amaxes over `group`, push them into the history, take the new scales.

        Args:
            group: the ranks that share these tensors or hold replicas of the layer: tensor × data parallel. It excludes
                the pipeline, because its stages hold other layers.
        """
        if self.amax is None or not self._largest:
            return
        assert self.history is not None and self._fp_max is not None and self._written is not None
        if group is not None and group.size() > 1:  # on one rank, the launch below merges the two kinds of amaxes
            torch.maximum(self.amax, self._written[:, :, 0].amax(dim=1), out=self.amax)
            torch.distributed.all_reduce(self.amax, op=torch.distributed.ReduceOp.MAX, group=group)
        scales = ops.update_amax_history_(
            self.amax,
            self._written,
            self.history,
            self._fp_max,
            self._padded_scales,
            keeps_largest=self.algo == "max",
            power_of_two=self.power_of_two,
        )
        self._take_scales(*scales)
        self.is_warm = True

    def discard_current_step(self) -> None:
        """Forget the amaxes seen since the last update (a validation pass)."""
        if self.amax is not None and self._written is not None:
            self.amax.zero_()
            self._written.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        """History and scales, for a checkpoint; empty without slots or before the first step."""
        if not self.is_warm or self.history is None or self.scale is None:
            return {}
        return {"history": self.history, "scale": self.scale.contiguous()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore the result of `state_dict`."""
        if not state:
            return
        assert self.history is not None and self.scale is not None
        self.history.copy_(state["history"])
        scale = state["scale"].to(self.scale)[:, None]
        self._take_scales(*(torch.nn.functional.pad(value, (0, _STRIDE - 1)) for value in (scale, scale.reciprocal())))
        self.is_warm = True
