"""One rank's rows of a parameter that torch's ``fully_shard`` made, and its state for torch.distributed.checkpoint."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..device.group import Group
from ..dtypes import STATE_BLOCK, StorageFormats
from ..optimizer.rules.rule import UpdateRule
from ..optimizer.state import SpaceState, StateTensor
from ..quantization.scaled_tensor import ScaledTensor
from ..sharding.partition import Slot, alone
from ..sharding.region import Region
from .param_state import GRADIENTS, MASTER, PAYLOAD, SCALE, Entry, LocalParam, has_master, state_keys
from .torch_optimizers import OptimizerError


class ShardedParam(LocalParam):
    """This rank's rows of one parameter, and its entry in a state dict: each tensor is sharded as the parameter is.

    Scales of blocks are sharded beside their payload where the parameter's rows of one rank are whole blocks. Where
    they are not, the entry holds the values in FP32 instead. Scales are powers of two, so both ways are exact.

    Attributes:
        rows: what the optimizer updates: the local tensor, or a copy of it where FSDP2 pads.
        is_copy: whether `rows` is a copy.
        group: the ranks that hold the other rows.
    """

    param: DTensor  # type: ignore[assignment]

    def __init__(self, name: str, param: torch.nn.Parameter, rule: UpdateRule) -> None:
        """This rank's part of `param`.

        Raises:
            OptimizerError: it is sharded in a way that the optimizer does not know.
        """
        super().__init__(name, param, rule)
        if param.is_complex():
            raise OptimizerError(
                f"{name} is {param.dtype}: complex parameters have no shards here; share the model over ranks with "
                f"initialize alone, or keep it as view_as_real, an FP32 parameter"
            )
        if not isinstance(param, DTensor):
            raise OptimizerError(f"{name} is not sharded and other parameters are: call fully_shard(model) on the root")
        placements = param.placements
        sharded = [dim for dim, placement in enumerate(placements) if type(placement) is Shard]
        if len(sharded) != 1 or any(type(p) not in (Shard, Replicate) for p in placements):
            raise OptimizerError(
                f"{name} is placed as {placements}: FP8 state takes parameters that fully_shard alone has sharded, "
                f"over one dimension of the mesh, with or without replicas (HSDP)"
            )
        mesh_dim = sharded[0]
        axis = placements[mesh_dim].dim  # type: ignore[attr-defined]
        ranks, rank = param.device_mesh.size(mesh_dim), param.device_mesh.get_local_rank(mesh_dim)
        local = param._local_tensor  # `to_local` gives a view, which FSDP2 does not gather from
        is_even = param.shape[axis] % ranks == 0
        if isinstance(local, ScaledTensor) and not is_even:
            raise OptimizerError(
                f"{name} has {param.shape[axis]} rows, which {ranks} ranks do not share evenly: use a number of ranks "
                f"that divides it, or keep the layer out of replace_linears with its filter"
            )
        self.rows = local if is_even else local.detach().clone()
        self.is_copy = not is_even
        self.group: Group = param.device_mesh.get_group(mesh_dim)
        self.region = Region(tuple(self.rows.shape), axis, rank=rank, size=ranks, axis_size=param.shape[axis])

    @property
    def mesh_groups(self) -> list[Group]:
        """Of each dimension of its mesh with several ranks, this rank's group."""
        mesh = self.param.device_mesh
        return [mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1]

    @property
    def local(self) -> Tensor:
        """The rows that FSDP2 gathers from."""
        return self.param._local_tensor

    @property
    def is_written(self) -> bool:
        # Views of a ``DTensor``, as torch.distributed.checkpoint loads into, count no versions. Where FSDP2's rows are
        # not the master's memory, their values are read at each step.
        return self.is_copy or self._mark() != self._seen

    def see(self) -> None:
        """FSDP2's own rows get the values of their copy."""
        if self.is_copy:
            self.local.copy_(self.rows)
        self._seen = self._mark()

    def _mark(self) -> tuple[int, ...]:
        local = self.local
        return local.data_ptr(), local._version, self.param._version

    def written_value(self, state: SpaceState, slot: Slot) -> Tensor:
        """See `LocalParam.written_value`.

        Raises:
            OptimizerError: the rows have other memory.
        """
        if not self.is_copy and self.local.data_ptr() != self.rows.data_ptr():
            raise OptimizerError(f"{self.name} has other memory than before: move the model before initialize")
        return self.local.detach()

    def to_global(self, entry: Entry) -> Entry:
        """See `LocalParam.to_global`. It has no number of gradients a step: torch adds them, in storage of its own."""
        param, keys, has_whole_blocks = self.param, state_keys(self.rule), self._has_whole_blocks
        sharded: Entry = {}
        for key, value in entry.items():
            if key not in keys:
                if key != GRADIENTS:
                    sharded[key] = value
                continue
            name = key.removesuffix(PAYLOAD)
            scales = None if name == key else entry[f"{name}{SCALE}"]
            if key.endswith(SCALE):
                if has_whole_blocks:
                    sharded[key] = _dtensor(value, param, (param.numel() // STATE_BLOCK,))
            elif scales is None or has_whole_blocks:
                sharded[key] = _dtensor(value, param, param.shape)
            else:
                sharded[name] = _dtensor(_decoded(value, scales), param, param.shape)
        return super().to_global(sharded)

    def to_local(self, entry: Entry) -> Entry:
        """See `LocalParam.to_local`: the tensors are sharded as the parameter is, otherwise, or whole."""
        keys = state_keys(self.rule)
        return {
            key: self._local_part(key, value, is_state=key in keys) for key, value in super().to_local(entry).items()
        }

    def empty_entry(self, formats: StorageFormats) -> Entry:
        """What `param_state.param_state` is for no rows, in the dtypes of other ranks' `to_global`.

        Their rows are no whole blocks, so what has scales is FP32.
        """
        dtypes = {spec.name: spec.dtype(formats) for spec in self.rule.states}
        if has_master(formats):
            dtypes[MASTER] = formats.master_weight or formats.weight
        wide = torch.float32
        return {
            name: torch.empty(
                self.rows.shape, dtype=wide if dtype.is_scaled else dtype.torch_dtype, device=self.rows.device
            )
            for name, dtype in dtypes.items()
        }

    def _local_part(self, key: str, value: Any, *, is_state: bool) -> Any:
        param, region = self.param, self.region
        if isinstance(value, DTensor):
            if value.placements != param.placements or value.device_mesh != param.device_mesh:
                value = value.redistribute(param.device_mesh, param.placements)
            return value.to_local()
        if not isinstance(value, Tensor) or not is_state:
            return value
        if value.shape == region.whole_shape:
            return region.part_of(value)
        if key.endswith(SCALE) and region.size > 1:
            if value.numel() != param.numel() // STATE_BLOCK or not self._has_whole_blocks:
                raise ValueError(
                    f"{key}: {value.numel()} scales of a parameter {region.whole_shape} do not fall into whole blocks "
                    f"on {region.size} ranks; load the state from a checkpoint of torch.distributed.checkpoint"
                )
            return value.chunk(region.size)[region.rank]
        return value

    @property
    def _has_whole_blocks(self) -> bool:
        """Whether every rank's rows lie together in the parameter, and are whole blocks."""
        region = self.region
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
