"""One rank's rows of a parameter that torch's ``fully_shard`` made."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..device.group import Group
from ..quantization.scaled_tensor import ScaledTensor
from ..sharding.region import Region
from .torch_optimizers import OptimizerError


@dataclass(frozen=True)
class ShardedParam:
    """This rank's rows of one parameter.

    Attributes:
        name: in the model.
        param: the parameter that ``fully_shard`` made.
        rows: what the optimizer updates: the local tensor, or a copy of it where FSDP2 pads.
        is_copy: whether `rows` is a copy.
        group: the ranks that hold the other rows.
        region: where the rows lie in the parameter.
    """

    name: str
    param: DTensor
    rows: Tensor
    is_copy: bool
    group: Group
    region: Region

    @classmethod
    def of(cls, name: str, param: torch.nn.Parameter) -> ShardedParam:
        """This rank's part of `param`.

        Raises:
            OptimizerError: it is sharded in a way that the optimizer does not know.
        """
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
        rows = local if is_even else local.detach().clone()
        region = Region(tuple(rows.shape), axis, rank=rank, size=ranks, axis_size=param.shape[axis])
        return cls(name, param, rows, not is_even, param.device_mesh.get_group(mesh_dim), region)

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
    def mark(self) -> tuple[int, int, int]:
        """Changes when somebody writes to the parameter or to its rows, or gives them other memory."""
        local = self.local
        return local.data_ptr(), local._version, self.param._version
