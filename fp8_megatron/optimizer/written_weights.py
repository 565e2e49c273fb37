"""Values that somebody else writes into a parameter: they reach its master, and the weight is derived from it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..device.group import max_over_group_
from ..dtypes import CHUNK, E4M3, STATE_BLOCK
from ..kernels import ops
from ..quantization.scaled_tensor import ScaledTensor
from ..sharding.partition import Slot
from .state import SpaceState


class MasterWeight:
    """The master of one `ScaledTensor`: its `quantization.weight_views.WeightOwner`."""

    def __init__(self, state: SpaceState, slot: Slot) -> None:
        self._state = state
        self._slot = slot
        #: A copy of the whole master, in the parameter's shape, until it changes. `value_here` is this value.
        self.consolidated: Tensor | None = None
        #: Whether some replica has such a copy. State dicts then ask no other replica.
        self.is_consolidated = False

    def write(self, value: Tensor) -> None:
        """See `WeightOwner.write`."""
        self.consolidated, self.is_consolidated = None, False
        write_weight(self._state, self._slot, value)

    def value(self) -> Tensor:
        """See `WeightOwner.value`. In memory of its own: savers take a tensor's whole storage.

        Where the weight is its own master (O1, O2), each rank has it whole; otherwise every replica calls this.
        """
        param = self._slot.param
        if self._state.formats.master_weight is None and isinstance(param, ScaledTensor):
            return param.dequantize()
        value = self._state.get_master(self._slot)
        return value if value.untyped_storage().nbytes() == value.nbytes else value.clone()

    def value_here(self) -> Tensor:
        """See `WeightOwner.value_here`."""
        param = self._slot.param
        if self._state.space.num_shards == 1:
            return self.value()
        if self.consolidated is not None:
            return self.consolidated.to(param.device, torch.float32, copy=True)
        assert isinstance(param, ScaledTensor)
        return param.dequantize()

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A copied or pickled weight has no master: this becomes None."""
        return type(None), ()


def publish(state: SpaceState) -> None:
    """Derive all weights from new masters, on all replicas."""
    state.derive_weights()
    if state.gather is not None:
        state.gather.wait()


@torch.no_grad()
def write_weight(state: SpaceState, slot: Slot, value: Tensor) -> None:
    """Give a parameter a new value (any float dtype, its shape) and derive its weight; called by every replica.

    An element of the master that rounds to the element of `value` in the dtype of `value` keeps its bits. So a weight
    that was saved in 16 bits and comes back does not take precision from its master.

    Raises:
        ValueError: another shape, with both shapes.
    """
    if value.shape != slot.param.shape:
        raise ValueError(
            f"{slot.name}: the model's shape is {tuple(slot.param.shape)}, the value's {tuple(value.shape)}"
        )
    if state.gather is not None:
        state.gather.wait()
    flat = slot.flattened(value.detach()).to(state.space.device)
    for fragment in state.space.fragments(slot):
        given = flat[fragment.slot_start : fragment.slot_start + fragment.length]
        master = state.master.part(fragment)
        stored = master.load()
        present = stored[: given.numel()]
        present.copy_(torch.where(present.to(given.dtype) == given, present, given.float()))
        master.store_(stored)
    _derive_weight(state, slot)


def _derive_weight(state: SpaceState, slot: Slot) -> None:
    """Derive one parameter's weight from its new master, on every replica."""
    stored = torch.nn.functional.pad(slot.flattened(state.get_master(slot)), (0, slot.padded - slot.numel))
    weight = slot.padded_slice(state.weight.payload)
    if state.chunk_amax is not None:
        for fragment in state.space.fragments(slot):
            chunks = stored[fragment.slot_start : fragment.slot_start + fragment.length].abs().view(-1, CHUNK)
            first = fragment.shard_start // CHUNK
            state.chunk_amax[first : first + len(chunks)] = chunks.amax(dim=1)
    if state.weight_scales is not None:
        amax = _matrix_amax(slot, stored)
        max_over_group_(amax, state.space.sharing.scaled_with)
        present = slot.scales_in(state.weight_scales)
        usable = torch.isfinite(amax) & (amax > 0)
        scale = torch.where(usable, ops.scale_from_amax(amax, E4M3, power_of_two=False), present)
        present.copy_(scale)
        ops.derive_fp8_weights_(stored, None, weight, scale, slot.chunk_matrices(state.space.device))
    elif state.weight.scales is not None:
        ops.quantize_blockwise_(stored, weight, slot.padded_slice(state.weight.scales, STATE_BLOCK))
    else:
        weight.copy_(stored)
    if state.cast_scales is not None:
        values = weight if state.weight.scales is None else stored  # a rounded copy of the master, or the master
        amax = _matrix_amax(slot, values.float())
        slot.scales_in(state.cast_scales).copy_(ops.scale_from_amax(amax, E4M3, power_of_two=False))


def _matrix_amax(slot: Slot, values: Tensor) -> Tensor:
    """FP32 [matrices]: the largest magnitude of each of a parameter's matrices, of its elements [padded]."""
    return values.view(slot.num_matrices, -1).abs().amax(dim=1)
