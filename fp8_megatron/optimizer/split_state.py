"""State of a space whose master is split: the FP8 weight and one byte of correction (`kernels.split_master`).

The stored weight is the upper half of its master; there is no other copy. Together they take 2 bytes instead of level
O3's 3. Each matrix's scale is predicted from its amax over all ranks after the previous step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..device.memory import cpu_copy
from ..dtypes import CHUNK, StorageDtype, StorageFormats
from ..kernels import ops
from ..sharding.gradient import GradBuffer
from ..sharding.partition import Fragment, ParamSpace, Slot
from ..sharding.released_grads import ReleasedGrad
from .rules.rule import UpdateRule
from .rules.split_adamw import SplitAdamW
from .state import SpaceState, StateTensor, whole


class SplitSpaceState(SpaceState):
    """`SpaceState` with `master` holding the corrections alone, int8 [shard_numel].

    Attributes:
        matrix_amax: FP32 [num_matrices], the largest magnitude of each matrix's master over all ranks.
    """

    def __init__(
        self, space: ParamSpace, formats: StorageFormats, rule: UpdateRule, *, is_trained: bool = True
    ) -> None:
        assert formats.weight is StorageDtype.FP8 and formats.master_weight is StorageDtype.SPLIT, formats
        super().__init__(space, formats, rule, is_trained=is_trained)
        self.matrix_amax = torch.zeros(space.num_matrices, device=space.device)
        #: FP32 [num_matrices] between a step's first `update_slot` and `finish_update`.
        self._next_scales: Tensor | None = None

    @property
    def _adamw(self) -> SplitAdamW:
        assert isinstance(self.rule, SplitAdamW), self.rule
        return self.rule

    @property
    def scales(self) -> Tensor:
        """FP32 [num_matrices], the power-of-two scales of the weights (a view)."""
        assert self.weight_scales is not None
        return self.weight_scales[:, 0]

    def part(self, kind: str, slot: Slot, fragment: Fragment) -> StateTensor:
        if kind != "master":
            return super().part(kind, slot, fragment)
        start, stop = fragment.slot_start, fragment.slot_start + fragment.length
        matrices = slot.chunk_matrices(self.space.device)[start // CHUNK : stop // CHUNK]
        weight, correction, _ = self.split_part(slot, fragment)
        scales = self.scale_of(slot)[matrices.long(), None]
        return StateTensor(ops.join_master(weight.view(-1, CHUNK), correction.view(-1, CHUNK), scales).view(-1), None)

    def split_part(self, slot: Slot, fragment: Fragment) -> tuple[Tensor, Tensor, Tensor]:
        """E4M3 weight and int8 correction, both [length], of this rank's part, and the FP32 scale [1] of the matrix
        that it begins in (views)."""
        start = fragment.slot_start
        payload = slot.padded_slice(self.weight.payload)[start : start + fragment.length]
        first = start // slot.padded_matrix
        return payload, self.master.part(fragment).payload, self.scale_of(slot)[first : first + 1]

    def squared_norm(self) -> Tensor:
        total = torch.zeros(1, device=self.space.device)
        for slot in self.space.slots:
            for fragment in self.space.fragments(slot):
                total += ops.squared_norm(*self.part("master", slot, fragment))
        return total

    def before_copy(self) -> None:
        if self.gather is not None:
            self.gather.wait()

    def on_cpu(self) -> SplitSpaceState:
        assert self.weight_scales is not None
        frozen = super().on_cpu()
        assert isinstance(frozen, SplitSpaceState)
        frozen.weight, frozen.weight_scales = self.weight.on_cpu(), cpu_copy(self.weight_scales)
        return frozen

    def set_master(self, slot: Slot, value: Tensor, scale: Tensor | None = None) -> None:
        """As `SpaceState.set_master`. Every rank writes the whole weight, so no gather is needed.

        Args:
            scale: FP32, one a matrix, that the value was stored with; None takes them from the amaxes.
        """
        self._check_shape(slot, value)
        flat = torch.zeros(slot.padded, device=self.space.device)
        flat[: slot.numel] = value.reshape(-1)
        if scale is None:
            amax = flat.view(slot.num_matrices, -1).abs().amax(dim=1)
            scale = ops.next_weight_scales(amax, lr=0.0, beta1=0.0, beta2=0.0)
        self.scale_of(slot).copy_(scale)
        split = ops.split_master(flat.view(slot.num_matrices, -1), self.scale_of(slot)[:, None])
        payload, correction = (part.view(-1) for part in split)
        slot.padded_slice(self.weight.payload).copy_(payload)
        for fragment in self.space.fragments(slot):
            start = fragment.slot_start
            self.master.part(fragment).payload.copy_(correction[start : start + fragment.length])

    def derive_weights(self) -> None:
        """Take the amaxes of masters that the optimizer kernel did not write. Their weights are already in place."""
        assert self.chunk_amax is not None
        shard, scales = self._own_weights(), self.scales[self.chunk_matrices.long()]
        for piece in self._pieces():
            start, stop = piece.shard_start, piece.shard_start + piece.length
            weight, correction = (flat[start:stop].view(-1, CHUNK) for flat in (shard, self.master.payload))
            chunks = slice(start // CHUNK, stop // CHUNK)
            self.chunk_amax[chunks] = ops.join_master(weight, correction, scales[chunks, None]).abs().amax(dim=1)
        self.matrix_amax.copy_(self._matrix_amax())

    def _weights_to_write(self) -> Tensor:
        return self._own_weights()

    def _publish_weights(self, written: Tensor | None) -> None:
        """Send the weights, which the step has written itself, and take the amaxes of their masters."""
        if self.gather is not None:
            assert written is not None
            self.gather.start([written])
        self.matrix_amax.copy_(self._matrix_amax())

    def update(
        self,
        buffer: GradBuffer,
        parts: Sequence[tuple[int, int, Tensor]],
        group: Mapping[str, Any],
        grad_factor: Tensor,
    ) -> None:
        ((start, stop, step_count),) = parts
        assert (start, stop) == (0, self.space.shard_numel), "a split master is updated whole"
        shard = self._weights_to_write()
        scales = self.scales.contiguous()  # a kernel indexes by matrix; each scale takes four floats
        self._split_step(
            Fragment(0, 0, stop),
            buffer,
            shard,
            (scales, self._adamw.next_scales(self.matrix_amax, group, self.scales), self.chunk_matrices),
            group,
            grad_factor,
            step_count,
        )
        self.scales.copy_(scales)
        self._publish_weights(shard)

    def update_slot(
        self,
        grad: ReleasedGrad,
        group: Mapping[str, Any],
        *,
        grad_factor: Tensor,
        step_count: Tensor,
    ) -> None:
        """As `SpaceState.update_slot`. The weight and its scale are updated when this returns."""
        if self._next_scales is None:
            self._next_scales = self._adamw.next_scales(self.matrix_amax, group, self.scales)
        slot = grad.slot
        own = self.scale_of(slot)
        scales = own.contiguous()
        self._split_step(
            whole(slot),
            grad,
            slot.padded_slice(self.weight.payload),
            (scales, self._next_scales[slot.matrices], slot.chunk_matrices(self.space.device)),
            group,
            grad_factor,
            step_count,
        )
        own.copy_(scales)

    def _split_step(
        self,
        place: Fragment,
        grad: GradBuffer | ReleasedGrad,
        weight: Tensor,
        scales: tuple[Tensor, Tensor, Tensor],
        group: Mapping[str, Any],
        grad_factor: Tensor,
        step_count: Tensor,
    ) -> None:
        """The fused pass over one part of the shard; `grad`, `weight` and `scales` are of that part.

        Args:
            scales: of its matrices before the step and after it, FP32 [matrices], and the matrix of each chunk, int32.
        """
        assert self.chunk_amax is not None
        start, stop = place.shard_start, place.shard_start + place.length
        before, after, chunk_matrix = scales
        exp_avg, exp_avg_sq = self.states_of(place)
        self._adamw.split_step(
            ops.SplitAdamState(
                grad=ops.FlatState(grad.payload, grad.scales),
                exp_avg=exp_avg,
                exp_avg_sq=exp_avg_sq,
                weight=weight,
                correction=self.master.part(place).payload,
                weight_scales=before,
                new_weight_scales=after,
                chunk_tensor=chunk_matrix,
                places=self.places_of(place),
            ),
            group,
            grad_factor=grad_factor,
            step=step_count,
            chunk_amax=self.chunk_amax[start // CHUNK : stop // CHUNK],
        )

    def finish_update(self) -> None:
        self._next_scales = None
        self._publish_weights(self._weights_to_write())

    def byte_counts(self) -> dict[str, int]:
        counts = super().byte_counts()
        counts["scales"] += self.matrix_amax.nbytes
        return counts

    def scale_of(self, slot: Slot) -> Tensor:
        """FP32, the scale of each matrix of a parameter's weight (a view)."""
        return self.scales[slot.matrices]
