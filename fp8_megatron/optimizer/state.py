"""Optimizer state of one flat space: this rank's shard of masters and of what the rule stores, and the weights.

One pass of the update rule (`rules.rule.UpdateRule`) updates a space, in FP32 arithmetic over state in its storage
dtypes (FP8-LM, arXiv 2310.18313, section 2.2).

The master weight is the truth. Initialisation, a checkpoint and a converted model all enter through `set_master`. The
weights of the layers are derived from it and from nothing else.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..device.group import max_over_group_
from ..device.memory import cpu_copy
from ..dtypes import CHUNK, E4M3, STATE_BLOCK, StorageDtype, StorageFormats
from ..kernels import ops
from ..quantization.scaled_tensor import ScaledTensor
from ..quantization.weight_views import CastScale
from ..sharding.gradient import GradBuffer
from ..sharding.partition import Fragment, ParamSpace, Slot, StorageClass
from ..sharding.released_grads import ReleasedGrad
from ..sharding.transport import SendMemory
from ..sharding.weight_gather import WeightGather
from .rules.rule import UpdateRule

#: Elements whose FP32 values are held at a time where no fused kernel reads a state, a multiple of all blocks.
_PIECE = 1 << 26


class StateTensor(ops.FlatState):
    """Flat state [n] in one storage dtype; FP16 and FP8 have FP32 power-of-two scales [n / 256]."""

    __slots__ = ()

    @classmethod
    def zeros(cls, numel: int, dtype: StorageDtype, memory: SendMemory) -> StateTensor:
        """All zero."""
        payload = memory.zeros(numel, dtype.torch_dtype)
        return cls(payload, memory.zeros(numel // STATE_BLOCK, torch.float32).fill_(1.0) if dtype.is_scaled else None)

    def part(self, fragment: Fragment) -> StateTensor:
        """A parameter's part of this rank's shard (views)."""
        start, stop = fragment.shard_start, fragment.shard_start + fragment.length
        scales = None if self.scales is None else self.scales[start // STATE_BLOCK : stop // STATE_BLOCK]
        return StateTensor(self.payload[start:stop], scales)

    def load(self) -> Tensor:
        """FP32 [n]."""
        return ops.load_state(self.payload, self.scales)

    def store_(self, value: Tensor) -> None:
        """Store `value` [n], rounded to the storage dtype."""
        if self.scales is None:
            self.payload.copy_(value)
        else:
            ops.quantize_blockwise_(value.to(self.payload.device), self.payload, self.scales)

    def on_cpu(self) -> StateTensor:
        """A copy on the CPU; from CUDA into pinned memory, complete once the current stream is synchronised."""
        return StateTensor(cpu_copy(self.payload), None if self.scales is None else cpu_copy(self.scales))

    @property
    def payload_bytes(self) -> int:
        """Bytes of the payload."""
        return self.payload.nbytes

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales."""
        return 0 if self.scales is None else self.scales.nbytes


def whole(slot: Slot) -> Fragment:
    """A parameter's place in a shard that is the whole space."""
    return Fragment(slot.offset, 0, slot.padded)


class SpaceState:
    """Master and the rule's states of this rank's shard of one space, and all weights of the space.

    Every parameter of the space becomes a view of flat weight storage. With one replica the shard is the space. A
    weight that is its own master shares the master's storage.

    Attributes:
        gather: sends the shard's weights to the other replicas; None with one replica.
        chunk_amax: FP32 [shard_numel / CHUNK], the largest magnitude of each chunk of this shard's masters, of linear
            weights. The optimizer kernel writes it. Scales of casts to FP8 come from it.

        states: by name, what the rule stores for this shard.

    Args:
        is_trained: False: the space is evaluated and never updated; its states have no elements.
    """

    def __init__(
        self, space: ParamSpace, formats: StorageFormats, rule: UpdateRule, *, is_trained: bool = True
    ) -> None:
        self.space = space
        self.formats = formats
        self.rule = rule
        n, device = space.shard_numel, space.device
        own, gathered = SendMemory(device), space.replicas.weight_memory
        self.derives_fp8 = formats.weight is StorageDtype.FP8
        self.weight_scales: Tensor | None = None
        #: FP32 [num_matrices, 4]: of linear weights that layers cast at each use, the scales of these casts.
        self.cast_scales: Tensor | None = None
        self.chunk_amax: Tensor | None = None
        is_own_master = formats.master_weight is None
        if is_own_master:
            self.weight = StateTensor.zeros(space.numel, formats.weight, gathered)
        else:
            self.weight = StateTensor(gathered.zeros(space.numel, formats.weight.torch_dtype), None)
        if space.storage is StorageClass.LINEAR:
            # cuBLASLt refuses scale pointers that are not 16-byte aligned: one scale for every four floats.
            scales = torch.ones(space.num_matrices, 4, device=device)
            if self.derives_fp8:
                self.weight_scales = scales
            else:
                self.cast_scales = scales
            self.chunk_amax = torch.zeros(n // CHUNK, device=device)
            self.chunk_matrices = space.shard_chunk_matrices()
        # Before state is allocated: this frees the storage that the model was built with.
        for slot in space.slots:
            self._point_at_weight(slot)
        is_shared = is_own_master and space.num_shards == 1
        self.master = self.weight if is_shared else StateTensor.zeros(n, formats.master_weight or formats.weight, own)
        self.is_trained = is_trained
        dtypes = rule.dtypes(formats)
        self.states = {
            spec.name: StateTensor.zeros(n if is_trained else 0, dtype, own)
            for spec, dtype in zip(rule.states, dtypes, strict=True)
        }
        stored = (formats.master_weight or formats.weight, *dtypes)
        rounds = any(dtype is not StorageDtype.FP32 for dtype in stored)
        self.places = space.shard_places() if rounds else ops.Places()
        self.gather: WeightGather | None = None
        if space.num_shards > 1:
            storages = [(self.weight.payload, 1)]
            if self.weight.scales is not None:
                storages.append((self.weight.scales, STATE_BLOCK))
            self.gather = WeightGather(space, storages)

    def _point_at_weight(self, slot: Slot) -> None:
        payload = slot.slice(self.weight.payload)
        if not isinstance(slot.param, ScaledTensor):
            slot.param.data = payload
        elif self.weight_scales is not None:
            slot.param.set_storage(payload, slot.scales_in(self.weight_scales))
        elif self.weight.scales is not None:
            assert slot.numel % STATE_BLOCK == 0, (slot.name, slot.numel)
            first = slot.offset // STATE_BLOCK
            slot.param.set_storage(payload, self.weight.scales[first : first + slot.numel // STATE_BLOCK])
        else:
            slot.param.set_storage(payload, torch.ones(1, device=self.space.device))
        if isinstance(slot.param, ScaledTensor) and self.cast_scales is not None:
            slot.param.cast_scale = CastScale(slot.scales_in(self.cast_scales), slot.numel)

    def set_master(self, slot: Slot, value: Tensor) -> None:
        """Give a parameter a new value (any float dtype, its shape); `derive_weights` then updates the weights."""
        self._check_shape(slot, value)
        flat = slot.flattened(value)
        for fragment in self.space.fragments(slot):
            part = torch.zeros(fragment.length, device=self.space.device)
            values = flat[fragment.slot_start : fragment.slot_start + fragment.length]
            part[: values.numel()] = values
            self.master.part(fragment).store_(part)

    def get_master(self, slot: Slot) -> Tensor:
        """A parameter's value in FP32, whole; called by every data-parallel rank."""
        return self.space.assemble(slot, lambda fragment: self.part("master", slot, fragment).load())

    def part(self, kind: str, slot: Slot, fragment: Fragment) -> StateTensor:
        """This rank's part of a parameter's state; `kind` is "master" or the name of a state."""
        assert self.is_trained or kind == "master", f"{kind} of a model that was built for evaluation"
        stored = self.master if kind == "master" else self.states[kind]
        return stored.part(fragment)

    def holds(self, kind: str) -> bool:
        """Whether the rule stores `kind`, or it is "master"."""
        return kind == "master" or kind in self.states

    def squared_norm(self) -> Tensor:
        """Σ x² of this rank's shard of the masters, FP32 [1]."""
        return ops.squared_norm(*self.master)

    def places_of(self, place: Fragment) -> ops.Places:
        """Where the elements of a part of this rank's shard lie in the whole model."""
        table, unit = self.places.table, self.space.place_unit
        if table is None or place.length == self.space.shard_numel:
            return self.places
        first = place.shard_start // unit
        return self.places._replace(table=table[first : first + place.length // unit])

    def before_copy(self) -> None:
        """Make the current stream wait for what `on_cpu` copies."""

    def on_cpu(self) -> SpaceState:
        """A CPU copy of this shard's masters and states, after `before_copy`. Read it through `part`.

        On CUDA it is complete once the current stream is synchronised.
        """
        frozen = copy.copy(self)
        frozen.states = {name: stored.on_cpu() for name, stored in self.states.items()}
        frozen.master = self.master.on_cpu()
        return frozen

    def _check_shape(self, slot: Slot, value: Tensor) -> None:
        if value.shape != slot.param.shape:
            raise ValueError(
                f"{slot.name}: the model's shape is {tuple(slot.param.shape)}, the value's {tuple(value.shape)}"
            )

    def _weights_to_write(self) -> Tensor | None:
        """Where the optimizer kernel writes this shard's weights, [shard_numel]; None if they are derived or gathered.

        It holds the present weights, because a skipped step writes nothing.
        """
        return None if self.derives_fp8 or self.formats.master_weight is None else self._own_weights()

    def _own_weights(self) -> Tensor:
        """The weights that this rank updates, [shard_numel]: the storage itself with one replica, else a copy."""
        if self.gather is None:
            return self.weight.payload
        self.gather.wait()
        replicas = self.space.replicas
        mine = [
            bucket.of_space(self.weight.payload).view(torch.uint8).view(replicas.size, -1)[replicas.rank]
            for bucket in self.space.buckets
        ]
        own = self.gather.room(self.space.shard_numel, self.weight.payload.dtype)
        torch.cat(mine, out=own.view(torch.uint8))  # as bytes: a CPU does not concatenate FP8
        return own

    def derive_weights(self) -> None:
        """Derive the weights from masters that the optimizer kernel did not write."""
        written = self._weights_to_write()
        for piece in self._pieces():
            start, stop = piece.shard_start, piece.shard_start + piece.length
            master = self.master.part(piece).load()
            if self.chunk_amax is not None:
                self.chunk_amax[start // CHUNK : stop // CHUNK] = master.abs().view(-1, CHUNK).amax(dim=1)
            if written is not None:
                written[start:stop] = master
        self._publish_weights(written)
        for slot in self.space.slots:
            if isinstance(slot.param, ScaledTensor) and slot.param.cast_scale is not None:
                slot.param.cast_scale.is_current = True

    def _pieces(self) -> Iterator[Fragment]:
        """The shard in pieces whose FP32 copies fit beside it."""
        for start in range(0, self.space.shard_numel, _PIECE):
            yield Fragment(start, start, min(_PIECE, self.space.shard_numel - start))

    def _publish_weights(self, written: Tensor | None) -> None:
        """Send the weights of this shard's new masters to every replica, without waiting.

        FP8 weights are quantised from their masters with each matrix's scale taken from `chunk_amax`, over all ranks.
        Other linear weights only get the scale that a layer casts them with.

        Args:
            written: what `_weights_to_write` gave, with the new weights.
        """
        shard = self._derived_fp8_shard() if self.derives_fp8 else written
        if self.cast_scales is not None:
            self._take_cast_scales(self.cast_scales)
        if self.gather is None:
            return
        if shard is not None:
            self.gather.start([shard])
        else:  # the weight is its own master
            self.gather.start([part for part in (self.master.payload, self.master.scales) if part is not None])

    def update(
        self,
        buffer: GradBuffer,
        parts: Sequence[tuple[int, int, Tensor]],
        group: Mapping[str, Any],
        grad_factor: Tensor,
    ) -> None:
        """One step of the rule over parts of this rank's shard; sends the new weights. The rest of it stays as it is.

        Args:
            buffer: the space's gradients, finished.
            parts: (start, stop, FP32 [1] number of this step of their parameters); borders of fragments.
            group: the space's parameter group, whose numbers the rule reads.
            grad_factor: FP32 [1]; if it is not finite, nothing changes.
        """
        written = self._weights_to_write()
        for start, stop, step_count in parts:
            for first, last, grad in buffer.runs(start, stop):
                self._step(Fragment(first, 0, last - first), grad, written, group, grad_factor, step_count)
        self._publish_weights(written)

    def update_slot(
        self,
        grad: ReleasedGrad,
        group: Mapping[str, Any],
        *,
        grad_factor: Tensor,
        step_count: Tensor,
    ) -> None:
        """Update one parameter during backward, for one replica; bitwise equal to `update`.

        Call `finish_update` after the last one of a step.
        """
        written = self._weights_to_write()
        self._step(whole(grad.slot), grad, written, group, grad_factor, step_count)

    def finish_update(self) -> None:
        """Derive FP8 weights from the new masters, after all `update_slot` calls of a step."""
        self._publish_weights(self._weights_to_write())

    def _step(
        self,
        place: Fragment,
        grad: ReleasedGrad | ops.FlatState,
        written: Tensor | None,
        group: Mapping[str, Any],
        grad_factor: Tensor,
        step_count: Tensor,
    ) -> None:
        """The rule's step over one part of the shard; `grad` is of that part, `written` of the shard."""
        self.rule.step(self._operands(place, grad, written), group, grad_factor=grad_factor, step=step_count)

    def _operands(
        self, place: Fragment, grad: ReleasedGrad | ops.FlatState, written: Tensor | None
    ) -> ops.FlatOperands:
        start, stop = place.shard_start, place.shard_start + place.length
        return ops.FlatOperands(
            grad=ops.FlatState(grad.payload, grad.scales),
            states=self.states_of(place),
            master=self.master.part(place),
            places=self.places_of(place),
            weight=None if written is None else written[start:stop],
            chunk_amax=None if self.chunk_amax is None else self.chunk_amax[start // CHUNK : stop // CHUNK],
        )

    def states_of(self, place: Fragment) -> tuple[StateTensor, ...]:
        """The rule's states of one part of the shard (views)."""
        return tuple(stored.part(place) for stored in self.states.values())

    def _derived_fp8_shard(self) -> Tensor:
        assert self.weight_scales is not None
        amax = self._matrix_amax()
        previous = self.weight_scales[:, 0]
        usable = torch.isfinite(amax) & (amax > 0)
        scale = torch.where(usable, ops.scale_from_amax(amax, E4M3, power_of_two=False), previous)
        previous.copy_(scale)
        if self.gather is None:
            shard = self.weight.payload
        else:
            shard = self.gather.room(self.space.shard_numel, E4M3)
        ops.derive_fp8_weights_(self.master.payload, self.master.scales, shard, scale, self.chunk_matrices)
        return shard

    def _take_cast_scales(self, scales: Tensor) -> None:
        """Write the scales of the linear weights as they are stored, each from its own amax."""
        amax = self._amax_on_replicas()
        if self.formats.master_weight is not None:  # rounding keeps the order, so it commutes with the amax
            amax = amax.to(self.weight.payload.dtype).float()
        scales[:, 0] = ops.scale_from_amax(amax, E4M3, power_of_two=False)

    def _matrix_amax(self) -> Tensor:
        """FP32 [num_matrices]: each matrix's amax over the shards of all ranks that share its scale."""
        amax = self._amax_on_replicas()
        max_over_group_(amax, self.space.sharing.scaled_with)
        return amax

    def _amax_on_replicas(self) -> Tensor:
        """FP32 [num_matrices]: each matrix's amax over the shards of all replicas, from `chunk_amax`."""
        assert self.chunk_amax is not None
        amax = self.chunk_amax.new_zeros(self.space.num_matrices)
        amax.scatter_reduce_(0, self.chunk_matrices.long(), self.chunk_amax, "amax")
        max_over_group_(amax, self.space.replicas.group)
        return amax

    def byte_counts(self) -> dict[str, int]:
        """Bytes held, by kind: weight, master_weight and each of the rule's states (payloads), and scales (with other
        small tensors).
        """
        shares_master = self.weight is self.master
        scales = sum(stored.scale_bytes for stored in self.states.values()) + self.master.scale_bytes
        scales += 0 if shares_master else self.weight.scale_bytes
        for extra in (self.weight_scales, self.cast_scales, self.chunk_amax):
            scales += 0 if extra is None else extra.nbytes
        if self.chunk_amax is not None:
            scales += self.chunk_matrices.nbytes
        if self.places.table is not None:
            scales += self.places.table.nbytes
        return {
            "weight": self.weight.payload_bytes,
            "master_weight": 0 if shares_master else self.master.payload_bytes,
            **{name: stored.payload_bytes for name, stored in self.states.items()},
            "scales": scales,
        }
