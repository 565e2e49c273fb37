"""Optimizer state of one flat space: this rank's shard of masters and moments, each in its own dtype, and the weights.

One fused pass updates a space (FP8-LM, arXiv 2310.18313, section 2.2: gradients and first moment in FP8, second moment
and master weight in FP16 with scales, arithmetic in FP32).

The master weight is the truth. Initialisation, a checkpoint and a converted model all enter through `set_master`. The
weights of the layers are derived from it and from nothing else.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..device.group import max_over_group_
from ..device.memory import cpu_copy
from ..dtypes import E4M3, STATE_BLOCK, StorageDtype, StorageFormats
from ..kernels import ops
from ..quantization.scaled_tensor import ScaledTensor
from ..quantization.weight_views import CastScale
from ..sharding.gradient import GradBuffer
from ..sharding.partition import CHUNK, Fragment, ParamSpace, Slot, StorageClass
from ..sharding.released_grads import ReleasedGrad
from ..sharding.transport import SendMemory
from ..sharding.weight_gather import WeightGather
from .hyperparameters import AdamW

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


def hyperparameters(group: dict[str, Any], config: AdamW) -> ops.AdamHyper:
    """What the optimizer operators take, from a space's parameter group and the run's settings."""
    return ops.AdamHyper(
        lr=float(group["lr"]),
        beta1=config.beta1,
        beta2=config.beta2,
        eps=config.eps,
        weight_decay=float(group["weight_decay"]),
        decoupled=config.is_decoupled,
    )


def whole(slot: Slot) -> Fragment:
    """A parameter's place in a shard that is the whole space."""
    return Fragment(slot.offset, 0, slot.padded)


class SpaceState:
    """Master and moments of this rank's shard of one space, and all weights of the space.

    Every parameter of the space becomes a view of flat weight storage. With one replica the shard is the space. A
    weight that is its own master shares the master's storage.

    Attributes:
        gather: sends the shard's weights to the other replicas; None with one replica.
        chunk_amax: FP32 [shard_numel / CHUNK], the largest magnitude of each chunk of this shard's masters, of linear
            weights. The optimizer kernel writes it. Scales of casts to FP8 come from it.

    Args:
        has_moments: False: the space is evaluated and never updated; its moments have no elements.
    """

    def __init__(self, space: ParamSpace, formats: StorageFormats, *, has_moments: bool = True) -> None:
        self.space = space
        self.formats = formats
        n, device = space.shard_numel, space.device
        own, gathered = SendMemory(device), space.replicas.weight_memory
        self.derives_fp8 = formats.weight is StorageDtype.FP8
        self.weight_scales: Tensor | None = None
        #: FP32 [num_slots, 4]: of linear weights that layers cast at each use, the scales of these casts.
        self.cast_scales: Tensor | None = None
        self.chunk_amax: Tensor | None = None
        is_own_master = formats.master_weight is None
        if is_own_master:
            self.weight = StateTensor.zeros(space.numel, formats.weight, gathered)
        else:
            self.weight = StateTensor(gathered.zeros(space.numel, formats.weight.torch_dtype), None)
        if space.storage is StorageClass.LINEAR:
            # cuBLASLt refuses scale pointers that are not 16-byte aligned: one scale for every four floats.
            scales = torch.ones(len(space.slots), 4, device=device)
            if self.derives_fp8:
                self.weight_scales = scales
            else:
                self.cast_scales = scales
            self.chunk_amax = torch.zeros(n // CHUNK, device=device)
            self.chunk_slots = space.shard_chunk_slots()
        # Before state is allocated: this frees the storage that the model was built with.
        for index, slot in enumerate(space.slots):
            self._point_at_weight(slot, index)
        is_shared = is_own_master and space.num_shards == 1
        self.master = self.weight if is_shared else StateTensor.zeros(n, formats.master_weight or formats.weight, own)
        self.has_moments = has_moments
        num_moments = n if has_moments else 0
        self.exp_avg = StateTensor.zeros(num_moments, formats.exp_avg, own)
        self.exp_avg_sq = StateTensor.zeros(num_moments, formats.exp_avg_sq, own)
        stored = (formats.master_weight or formats.weight, formats.exp_avg, formats.exp_avg_sq)
        rounds = any(dtype is not StorageDtype.FP32 for dtype in stored)
        self.places = space.shard_places() if rounds else ops.Places()
        self.gather: WeightGather | None = None
        if space.num_shards > 1:
            storages = [(self.weight.payload, 1)]
            if self.weight.scales is not None:
                storages.append((self.weight.scales, STATE_BLOCK))
            self.gather = WeightGather(space, storages)

    def _point_at_weight(self, slot: Slot, index: int) -> None:
        payload = slot.slice(self.weight.payload)
        if not isinstance(slot.param, ScaledTensor):
            slot.param.data = payload
        elif self.weight_scales is not None:
            slot.param.set_storage(payload, self.weight_scales[index, :1])
        elif self.weight.scales is not None:
            assert slot.numel % STATE_BLOCK == 0, (slot.name, slot.numel)
            first = slot.offset // STATE_BLOCK
            slot.param.set_storage(payload, self.weight.scales[first : first + slot.numel // STATE_BLOCK])
        else:
            slot.param.set_storage(payload, torch.ones(1, device=self.space.device))
        if isinstance(slot.param, ScaledTensor) and self.cast_scales is not None:
            slot.param.cast_scale = CastScale(self.cast_scales[index, :1], slot.numel)

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
        """This rank's part of a parameter's state; `kind` is master, exp_avg or exp_avg_sq."""
        assert self.has_moments or kind == "master", f"{kind} of a model that was built for evaluation"
        stored: StateTensor = getattr(self, kind)
        return stored.part(fragment)

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
        """A CPU copy of this shard's masters and moments, after `before_copy`. Read it through `part`.

        On CUDA it is complete once the current stream is synchronised.
        """
        frozen = copy.copy(self)
        frozen.exp_avg, frozen.exp_avg_sq = self.exp_avg.on_cpu(), self.exp_avg_sq.on_cpu()
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

        FP8 weights are quantised from their masters with each tensor's scale taken from `chunk_amax`, over all ranks.
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
        group: dict[str, Any],
        config: AdamW,
        *,
        grad_factor: Tensor,
        step_count: Tensor,
    ) -> None:
        """One AdamW (or Adam) step of this rank's shard in one fused pass; sends the new weights.

        Args:
            buffer: the space's gradients, finished.
            group: the space's parameter group; `lr` and `weight_decay` are read.
            grad_factor: FP32 [1]; if it is not finite, nothing changes (`ops.adamw_step_`).
            step_count: FP32 [1], this step's number.
        """
        written = self._weights_to_write()
        shard = Fragment(0, 0, self.space.shard_numel)
        self._step(shard, buffer, written, hyperparameters(group, config), grad_factor, step_count)
        self._publish_weights(written)

    def update_parts(
        self,
        buffer: GradBuffer,
        parts: Sequence[tuple[int, int, Tensor]],
        hyper: ops.AdamHyper,
        grad_factor: Tensor,
    ) -> None:
        """`update` for parts of this rank's shard that lie on borders of fragments; the rest of it stays as it is.

        Args:
            parts: (start, stop, FP32 [1] number of this step of their parameters).
        """
        written = self._weights_to_write()
        for start, stop, step_count in parts:
            for first, last, grad in buffer.runs(start, stop):
                self._step(Fragment(first, 0, last - first), grad, written, hyper, grad_factor, step_count)
        self._publish_weights(written)

    def update_slot(
        self,
        grad: ReleasedGrad,
        group: dict[str, Any],
        config: AdamW,
        *,
        grad_factor: Tensor,
        step_count: Tensor,
    ) -> None:
        """Update one parameter during backward, for one replica; bitwise equal to `update`.

        Call `finish_update` after the last one of a step.
        """
        written = self._weights_to_write()
        self._step(whole(grad.slot), grad, written, hyperparameters(group, config), grad_factor, step_count)

    def finish_update(self) -> None:
        """Derive FP8 weights from the new masters, after all `update_slot` calls of a step."""
        self._publish_weights(self._weights_to_write())

    def _step(
        self,
        place: Fragment,
        grad: GradBuffer | ReleasedGrad | ops.FlatState,
        written: Tensor | None,
        hyper: ops.AdamHyper,
        grad_factor: Tensor,
        step_count: Tensor,
    ) -> None:
        """The fused pass over one part of the shard; `grad` is of that part, `written` of the shard."""
        start, stop = place.shard_start, place.shard_start + place.length
        ops.adamw_step_(
            ops.AdamState(
                grad=ops.FlatState(grad.payload, grad.scales),
                exp_avg=self.exp_avg.part(place),
                exp_avg_sq=self.exp_avg_sq.part(place),
                master=self.master.part(place),
                places=self.places_of(place),
            ),
            hyper,
            grad_factor=grad_factor,
            step=step_count,
            weight=None if written is None else written[start:stop],
            chunk_amax=None if self.chunk_amax is None else self.chunk_amax[start // CHUNK : stop // CHUNK],
        )

    def _derived_fp8_shard(self) -> Tensor:
        assert self.weight_scales is not None
        amax = self._tensor_amax()
        previous = self.weight_scales[:, 0]
        usable = torch.isfinite(amax) & (amax > 0)
        scale = torch.where(usable, ops.scale_from_amax(amax, E4M3, power_of_two=False), previous)
        previous.copy_(scale)
        if self.gather is None:
            shard = self.weight.payload
        else:
            shard = self.gather.room(self.space.shard_numel, E4M3)
        ops.derive_fp8_weights_(self.master.payload, self.master.scales, shard, scale, self.chunk_slots)
        return shard

    def _take_cast_scales(self, scales: Tensor) -> None:
        """Write the scales of the linear weights as they are stored, each from its own amax."""
        amax = self._amax_on_replicas()
        if self.formats.master_weight is not None:  # rounding keeps the order, so it commutes with the amax
            amax = amax.to(self.weight.payload.dtype).float()
        scales[:, 0] = ops.scale_from_amax(amax, E4M3, power_of_two=False)

    def _tensor_amax(self) -> Tensor:
        """FP32 [num_slots]: each tensor's amax over the shards of all ranks that share its scale."""
        amax = self._amax_on_replicas()
        max_over_group_(amax, self.space.sharing.scaled_with)
        return amax

    def _amax_on_replicas(self) -> Tensor:
        """FP32 [num_slots]: each tensor's amax over the shards of all replicas, from `chunk_amax`."""
        assert self.chunk_amax is not None
        amax = self.chunk_amax.new_zeros(len(self.space.slots))
        amax.scatter_reduce_(0, self.chunk_slots.long(), self.chunk_amax, "amax")
        max_over_group_(amax, self.space.replicas.group)
        return amax

    def byte_counts(self) -> dict[str, int]:
        """Bytes held, by kind: weight, master_weight, exp_avg and exp_avg_sq (payloads), and scales (with other small
        tensors).
        """
        shares_master = self.weight is self.master
        scales = self.exp_avg.scale_bytes + self.exp_avg_sq.scale_bytes + self.master.scale_bytes
        scales += 0 if shares_master else self.weight.scale_bytes
        for extra in (self.weight_scales, self.cast_scales, self.chunk_amax):
            scales += 0 if extra is None else extra.nbytes
        if self.chunk_amax is not None:
            scales += self.chunk_slots.nbytes
        if self.places.table is not None:
            scales += self.places.table.nbytes
        return {
            "weight": self.weight.payload_bytes,
            "master_weight": 0 if shares_master else self.master.payload_bytes,
            "exp_avg": self.exp_avg.payload_bytes,
            "exp_avg_sq": self.exp_avg_sq.payload_bytes,
            "scales": scales,
        }
