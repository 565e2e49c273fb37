"""The optimizer's state under ``fully_shard`` as ``DTensor``s, for ``torch.distributed.checkpoint``, and back.

An entry holds what `state_dicts` says, each tensor sharded as its parameter is. Scales of blocks are sharded beside
their payload: the parameter's rows of one rank are whole blocks. Where they are not, the entry holds the values in FP32
instead. Scales are powers of two, so both ways are exact.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..device.group import Group
from ..dtypes import STATE_BLOCK, StorageFormats
from ..optimizer.rules.rule import UpdateRule
from ..optimizer.state import StateTensor
from ..sharding.partition import alone, storage_class
from ..sharding.region import Region
from ..sharding.storage import ModelStorage
from .sharded_param import ShardedParam
from .state_dicts import MASTER, PAYLOAD, SCALE, has_master, state_keys
from .whole_state import Entries, Groups, WholeState, numbers_of


class ShardedState(WholeState):
    """`WholeState` with ``DTensor``s, for ``torch.distributed.checkpoint`` and its ``get_optimizer_state_dict``.
    Every rank calls what writes or reads it.

    Args:
        args, kwargs: of `WholeState`.
        sharded: the parameters with state. The optimizer may add to them, and to `groups`.
        storage: what is stored in which format.
        groups: the groups of ranks that hold rows of one parameter.
    """

    def __init__(
        self,
        *args: Any,
        sharded: Collection[ShardedParam],
        storage: ModelStorage,
        groups: Sequence[Group],
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._sharded = sharded
        self._storage = storage
        self._groups = groups

    def _collect(self, groups: Groups) -> Entries:
        params = {number: one for one, number in self._numbered(groups)}
        return {
            number: sharded_entry(params[number], entry, self._keys(params[number].param))
            for number, entry in super()._collect(groups).items()
        }

    def _entries(self, groups: Groups) -> Entries:
        """A parameter of which this rank has no rows has an entry as on the others, for every rank's state dict has the
        same names. Its steps are those that ranks with rows have counted."""
        entries = super()._entries(groups)
        for group in self._groups:
            uneven = [(one, number) for one, number in self._numbered(groups) if one.is_copy and one.group == group]
            if not uneven:
                continue
            steps = [float(entries[number]["step"]) if number in entries else 0.0 for _, number in uneven]
            counted = torch.tensor(steps, device=uneven[0][0].rows.device)
            torch.distributed.all_reduce(counted, op=torch.distributed.ReduceOp.MAX, group=group)
            for (one, number), step in zip(uneven, counted.cpu(), strict=True):
                if number not in entries:
                    formats = self._storage.of_state(storage_class(one.rows), one.rows.dtype)  # type: ignore[arg-type]
                    entries[number] = {"step": step.clone(), **empty_state(self._rules[one.param], formats, one.rows)}
        return entries

    def _run_state(self) -> dict[str, Tensor]:
        """Without the number of gradients a step: torch adds them, in storage of its own."""
        return {key: value for key, value in super()._run_state().items() if key != "gradients_per_step"}

    def _own_part(self, saved_states: Entries, groups: Groups, saved_groups: Groups) -> Entries:
        """This rank's rows of tensors that are ``DTensor``s or whole."""
        params = {number: one for one, number in self._numbered(groups)}
        return {
            theirs: local_entry(params[ours], saved_states[theirs], self._keys(params[ours].param))
            for ours, theirs in zip(numbers_of(self._packed(groups)), numbers_of(saved_groups), strict=False)
            if ours in params and theirs in saved_states
        }

    def _keys(self, param: Tensor) -> Collection[str]:
        return state_keys(self._rules[param])

    def _numbered(self, groups: Groups) -> list[tuple[ShardedParam, int]]:
        """The parameters with state, and their numbers in a state dict."""
        indices = super()._indices(groups)
        return [(one, indices[one.param]) for one in self._sharded]

    def _indices(self, groups: Groups) -> dict[Tensor, int]:
        return {**super()._indices(groups), **{one.rows: number for one, number in self._numbered(groups)}}


def sharded_entry(one: ShardedParam, entry: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """`state_dicts.param_state` of one rank's rows of a parameter, as ``DTensor``s of the whole parameter.

    Args:
        keys: of `state_dicts.state_keys`.
    """
    param, has_whole_blocks = one.param, _has_whole_blocks(one.region)
    sharded: dict[str, Any] = {}
    for key, value in entry.items():
        if key not in keys:
            sharded[key] = value
            continue
        name = key.removesuffix(PAYLOAD)
        scales = None if name == key else entry[f"{name}{SCALE}"]
        if key.endswith(SCALE):
            if has_whole_blocks:
                size = (param.numel() // STATE_BLOCK,)
                sharded[key] = _dtensor(value, param, size)
        elif scales is None or has_whole_blocks:
            sharded[key] = _dtensor(value, param, param.shape)
        else:
            sharded[name] = _dtensor(_decoded(value, scales), param, param.shape)
    return sharded


def empty_state(rule: UpdateRule, formats: StorageFormats, rows: Tensor) -> dict[str, Tensor]:
    """What `state_dicts.param_state` is for no rows, in the dtypes of other ranks' `sharded_entry`.

    Their rows are no whole blocks, so what has scales is FP32.
    """
    dtypes = {spec.name: spec.dtype(formats) for spec in rule.states}
    if has_master(formats):
        dtypes[MASTER] = formats.master_weight or formats.weight
    return {
        name: torch.empty(rows.shape, dtype=torch.float32 if dtype.is_scaled else dtype.torch_dtype, device=rows.device)
        for name, dtype in dtypes.items()
    }


def local_entry(one: ShardedParam, entry: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """This rank's rows of an entry, whose tensors are sharded as the parameter is, or whole."""
    return {key: _local(one, key, value, is_state=key in keys) for key, value in entry.items()}


def _local(one: ShardedParam, key: str, value: Any, *, is_state: bool) -> Any:
    param, region = one.param, one.region
    if isinstance(value, DTensor):
        if value.placements != param.placements or value.device_mesh != param.device_mesh:
            value = value.redistribute(param.device_mesh, param.placements)
        return value.to_local()
    if not isinstance(value, Tensor) or not is_state:
        return value
    if value.shape == region.whole_shape:
        return region.part_of(value)
    if key.endswith(SCALE) and region.size > 1:
        if value.numel() != param.numel() // STATE_BLOCK or not _has_whole_blocks(region):
            raise ValueError(
                f"{key}: {value.numel()} scales of a parameter {region.whole_shape} do not fall into whole blocks on "
                f"{region.size} ranks; load the state from a checkpoint of torch.distributed.checkpoint"
            )
        return value.chunk(region.size)[region.rank]
    return value


def _has_whole_blocks(region: Region) -> bool:
    """Whether every rank's rows lie together in the parameter, and are whole blocks."""
    return region.axis == 0 and region.is_even and math.prod(region.shape) % STATE_BLOCK == 0


def _decoded(payload: Tensor, scales: Tensor) -> Tensor:
    """FP32 values; the last block may be cut."""
    flat = payload.reshape(-1)
    padded = torch.nn.functional.pad(flat.view(torch.uint8), (0, scales.numel() * STATE_BLOCK * flat.itemsize))
    whole = padded[: scales.numel() * STATE_BLOCK * flat.itemsize].view(flat.dtype)
    return StateTensor(whole, scales).load()[: flat.numel()].view(payload.shape)


def _dtensor(local: Tensor, param: DTensor, size: tuple[int, ...]) -> DTensor:
    if local.storage_offset():  # torch's stager (async_save) takes a DTensor with an offset for one with memory
        local = alone(local.view(torch.uint8)).view(local.dtype)
    stride = torch.empty(size, device="meta").stride()
    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=torch.Size(size), stride=stride
    )
