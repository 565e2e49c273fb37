"""One parameter: what this rank has of it, and its entry in the optimizer's state dict.

An entry has the ``step``, the states of the update rule by their names, and ``master_weight``, in their storage dtypes
and the parameter's shape, which is the transpose for GPT-2's ``Conv1D``. A dtype with scales has
``…_payload`` and ``…_scale`` (FP32, one for each `STATE_BLOCK` elements) in their place, so that torch's own optimizers
do not take payloads for values. The master is left out where the parameter itself holds it (FP32). Over replicas every
rank has a part of each entry, and the parts are gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..dtypes import STATE_BLOCK, StorageDtype, StorageFormats
from ..nn.scaled_module import Layout
from ..optimizer.rules.rule import UpdateRule
from ..optimizer.state import SpaceState, StateTensor
from ..quantization.scaled_tensor import ScaledTensor
from ..sharding.partition import Slot, alone
from ..sharding.region import Region
from .gradients import check_shape
from .torch_optimizers import OptimizerError

#: What follows a name where the value is `payload` · `scale`.
PAYLOAD, SCALE = "_payload", "_scale"
MASTER = "master_weight"
#: In the first entry: how many gradients of a step the storage of each space has room for.
GRADIENTS = "gradients_per_step"

#: What a state dict has of one parameter.
Entry = dict[str, Any]


class LocalParam:
    """What this rank has of a parameter: all of it. `sharded_param.ShardedParam` is a part.

    Attributes:
        name: in the model.
        param: the user's parameter.
        rule: how it is updated.
        rows: what the optimizer updates.
        region: where they lie in the parameter.
        layout: how it lies, if the user's model has it in another shape (GPT-2's ``Conv1D``).
    """

    layout: Layout | None = None

    def __init__(self, name: str, param: torch.nn.Parameter, rule: UpdateRule) -> None:
        self.name, self.param, self.rule = name, param, rule
        self.rows: Tensor = param
        self.region = Region(tuple(param.shape))
        self._shape = param.shape
        self._seen: tuple[int, ...] = ()

    @property
    def value(self) -> Tensor:
        """The rows as they are stored, in their shape: FP32 of a `ScaledTensor`, otherwise their own dtype."""
        return self.rows.dequantize() if isinstance(self.rows, ScaledTensor) else self.rows.detach()

    @property
    def is_written(self) -> bool:
        """Whether somebody may have written to it since `see`, or given it other memory."""
        return (self.param.data_ptr(), self.param._version) != self._seen

    def see(self) -> None:
        """The values that it has are its master's."""
        self._seen = (self.param.data_ptr(), self.param._version)

    def written_value(self, state: SpaceState, slot: Slot) -> Tensor:
        """The value that was written, of a plain parameter, which has its memory of the space again.

        Raises:
            UserError: it was converted, moved or resized.
        """
        param, space = self.param, state.space
        if param.dtype.to_real() != space.dtype or param.device != space.device:
            raise OptimizerError(
                f"{self.name} was {space.dtype} on {space.device} when the optimizer was built and is {param.dtype} on "
                f"{param.device}: convert or move the model before initialize"
            )
        check_shape(self.name, param.shape, self._shape)
        value = param.detach()
        if param.data_ptr() != self._seen[0]:
            param.data = alone(slot.slice(state.weight.payload))
        return value

    def to_global(self, entry: Entry) -> Entry:
        """This rank's entry as state dicts have it."""
        return self._turned(entry, None if self.layout is None else self.layout.to_plain)

    def to_local(self, entry: Entry) -> Entry:
        """This rank's part of an entry of a state dict."""
        return self._turned(entry, None if self.layout is None else self.layout.to_stored)

    def _turned(self, entry: Entry, turn: Callable[[Tensor], Tensor] | None) -> Entry:
        """The entry with its values in another layout. Payloads stay: their scales are for blocks of the weight as it
        is stored.
        """
        if turn is None:
            return entry
        names = state_names(self.rule)
        return {
            key: turn(value) if key in names and isinstance(value, Tensor) else value for key, value in entry.items()
        }


def state_keys(rule: UpdateRule) -> frozenset[str]:
    """The keys of an entry that are parts of its parameter's state; others are numbers, or belong to the whole run."""
    return frozenset(f"{name}{part}" for name in state_names(rule) for part in ("", PAYLOAD, SCALE))


def state_names(rule: UpdateRule) -> list[str]:
    """What an entry may hold of a parameter's state."""
    return [MASTER, *(spec.name for spec in type(rule).states)]


class StateNames(dict[str, None]):
    """A parameter's entry in ``optimizer.state``: the names of what a state dict may have, without values, which many
    parameters store together. torch's tools look for names alone."""

    def __getitem__(self, name: str) -> None:
        if name in self:
            raise _no_values(name)
        raise KeyError(name)

    def __setitem__(self, name: str, value: object) -> None:
        if value is not None:  # Lightning writes what `items` gives, moved to a device
            raise _no_values(name)
        super().__setitem__(name, value)


def _no_values(name: str) -> OptimizerError:
    return OptimizerError(
        f"optimizer.state[…] has names without values, so {name!r} is not read or set there: read "
        f"optimizer.state_dict(), set with load_state_dict, and start anew with optimizer.state.clear()"
    )


def stored_state(state: SpaceState) -> dict[str, StateTensor]:
    """What a space stores beside its weights, by the names of the entries."""
    return {**state.states, MASTER: state.master} if has_master(state.formats) else state.states


def has_master(formats: StorageFormats) -> bool:
    """Whether entries have a master: in FP32 the parameter itself holds it."""
    return formats.master_weight is not None or formats.weight is not StorageDtype.FP32


def param_state(state: SpaceState, slot: Slot) -> dict[str, Tensor]:
    """A parameter's entry without its step. Called by every replica.

    One replica gets views of the state, as torch's optimizers give; several get copies on the CPU. Values and payloads
    have the parameter's shape and their storage dtypes, scales are FP32 [⌈numel / `STATE_BLOCK`⌉].
    """
    if state.space.num_shards > 1:
        return _gathered(state, slot)
    return {
        key: tensor
        for name, stored in stored_state(state).items()
        for key, tensor in _entry(name, slot, stored.payload, stored.scales, slot.offset).items()
    }


def _entry(name: str, slot: Slot, payload: Tensor, scales: Tensor | None, offset: int) -> dict[str, Tensor]:
    shaped = slot.shaped(payload[offset : offset + slot.numel])
    if scales is None:
        return {name: shaped}
    first = offset // STATE_BLOCK
    return {f"{name}{PAYLOAD}": shaped, f"{name}{SCALE}": scales[first : first - (-slot.numel // STATE_BLOCK)]}


def _gathered(state: SpaceState, slot: Slot) -> dict[str, Tensor]:
    """A parameter's entry from the fragments of all replicas: one sum of bytes, of which all but one are zero."""
    stored = stored_state(state)
    whole = {
        name: StateTensor(
            torch.zeros(slot.padded, dtype=own.payload.dtype, device=own.payload.device),
            None if own.scales is None else own.scales.new_zeros(slot.padded // STATE_BLOCK),
        )
        for name, own in stored.items()
    }
    for name, own in stored.items():
        for fragment in state.space.fragments(slot):
            start, stop = fragment.slot_start, fragment.slot_start + fragment.length
            whole[name].payload[start:stop] = own.part(fragment).payload
            scales, part_scales = whole[name].scales, own.part(fragment).scales
            if scales is not None and part_scales is not None:
                scales[start // STATE_BLOCK : stop // STATE_BLOCK] = part_scales
    tensors = [tensor for one in whole.values() for tensor in one if tensor is not None]
    flat = torch.cat([tensor.view(torch.uint8) for tensor in tensors])
    torch.distributed.all_reduce(flat, group=state.space.replicas.group)
    parts = iter(flat.cpu().split([tensor.nbytes for tensor in tensors]))
    entry: dict[str, Tensor] = {}
    for name, one in whole.items():
        payload = next(parts).view(one.payload.dtype)
        scales = None if one.scales is None else next(parts).clone().view(torch.float32)
        entry |= {key: tensor.clone() for key, tensor in _entry(name, slot, payload, scales, 0).items()}
    return entry


def check_param_state(rule: UpdateRule, slot: Slot, entry: Mapping[str, Any]) -> None:
    """Check that a parameter's entry can be taken on, before anything is changed. It waits for the device.

    Raises:
        ValueError: another shape, with both shapes; the entry of another optimizer, which has not the rule's states; a
            part is missing, or holds what no step gives.
    """
    if not entry:
        return
    for spec in rule.states:
        _check_has(slot, entry, spec.name)
        _check_values(slot, entry, spec.name, least=0.0 if spec.holds_squares else -math.inf)
    _check_values(slot, entry, MASTER)
    _check_has(slot, entry, "step")
    try:
        step = float(entry["step"])
    except (TypeError, ValueError, RuntimeError):
        step = math.nan
    if not (math.isfinite(step) and step >= 0.0):
        raise ValueError(f"{slot.name}: step is {entry['step']!r}, not a number of steps: {_DAMAGED}")


#: What to do with a damaged state.
_DAMAGED = "load another checkpoint, or leave this entry out of the state, and it starts anew"


def _check_has(slot: Slot, entry: Mapping[str, Any], name: str) -> None:
    if _saved(entry, name)[0] is None:
        raise ValueError(
            f"{slot.name}: the saved state has {', '.join(map(str, entry))} and no {name}: it is another optimizer's"
        )


def _check_values(slot: Slot, entry: Mapping[str, Any], name: str, *, least: float = -math.inf) -> None:
    value, scales = _saved(entry, name)
    if value is None:
        return
    if not isinstance(value, Tensor):
        raise ValueError(f"{slot.name}: {name} is a {type(value).__name__}, not a tensor: {_DAMAGED}")
    if value.shape != slot.param.shape:
        raise ValueError(f"{slot.name}: {name} has the shape {tuple(value.shape)}, not {tuple(slot.param.shape)}")
    num_scales = -(-slot.numel // STATE_BLOCK)
    if f"{name}{PAYLOAD}" in entry and (not isinstance(scales, Tensor) or scales.numel() != num_scales):
        has = f"{scales.numel()} elements" if isinstance(scales, Tensor) else f"{scales!r}"
        raise ValueError(f"{slot.name}: {name}{SCALE} has {has}, not {num_scales}: {_DAMAGED}")
    loaded = StateTensor(*_padded_entry(slot, slot.param.device, value, scales)).load()
    if not (torch.isfinite(loaded) & (loaded >= least)).all():
        wrong = "NaN, inf or a negative value" if least == 0.0 else "NaN or inf"
        raise ValueError(f"{slot.name}: {name} has {wrong}, which no step gives: {_DAMAGED}")


def _saved(entry: Mapping[str, Any], name: str) -> tuple[Any, Any]:
    """The value or the payload, and the payload's scales; None: it has none."""
    payload = entry.get(f"{name}{PAYLOAD}")
    return (entry.get(name), None) if payload is None else (payload, entry.get(f"{name}{SCALE}"))


def load_param_state(state: SpaceState, slot: Slot, entry: Mapping[str, Any]) -> None:
    """Take on a parameter's entry, whole on every rank; each rank keeps its part. What is missing becomes zero, a
    missing master stays as it is. Call `SpaceState.derive_weights` when all parameters are loaded.

    Entries of other formats, of torch's optimizers too, are rounded to this one's. `check_param_state` has seen them.
    """
    for name, stored in stored_state(state).items():
        value, given_scales = _saved(entry, name)
        if value is None and name == MASTER:
            continue
        payload, scales = _padded_entry(slot, stored.payload.device, value, given_scales)
        for fragment in state.space.fragments(slot):
            start, stop = fragment.slot_start, fragment.slot_start + fragment.length
            part = stored.part(fragment)
            own_scales = None if scales is None else scales[start // STATE_BLOCK : stop // STATE_BLOCK]
            if part.payload.dtype == payload.dtype and (part.scales is None) == (scales is None):
                part.payload.copy_(payload[start:stop])
                if part.scales is not None and own_scales is not None:
                    part.scales.copy_(own_scales)
            else:
                part.store_(StateTensor(payload[start:stop], own_scales).load())


def _padded_entry(
    slot: Slot, device: torch.device, value: Tensor | None, scales: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Payload [slot.padded] and scales [slot.padded / 256] of one entry, on `device`."""
    if value is None:
        return torch.zeros(slot.padded, device=device), None
    flat = slot.flattened(value)
    payload = torch.zeros(slot.padded, dtype=flat.dtype, device=device)
    payload[: slot.numel] = flat.to(device)
    if scales is None:
        return payload, None
    padded = torch.ones(slot.padded // STATE_BLOCK, device=device)
    padded[: scales.numel()] = scales.to(device)
    return payload, padded
