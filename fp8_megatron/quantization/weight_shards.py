"""Weights in parts: what torch's ``fully_shard`` gathers of a `ScaledTensor`, and the scale that all parts share.

``fully_shard`` cuts a weight by rows and gathers it before each use. It asks the part what to send
(``fsdp_pre_all_gather``) and to make the weight of what arrived (``fsdp_post_all_gather``). An E4M3 weight sends one
byte an element. Its one scale is the same on all ranks, so it does not travel. The matrices of a weight [M, N, K] are
whole on a rank, and their scales travel with them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..dtypes import FP8_DTYPES
from ..errors import UserError
from .weight_views import is_scaled

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from .scaled_tensor import ScaledTensor


class Gathered(NamedTuple):
    """What a gathered weight is.

    Attributes:
        size: of the whole weight.
        dtype: of its payload.
        scale: its scales; None: they were gathered too.
    """

    size: torch.Size
    dtype: torch.dtype
    scale: Tensor | None

    def whole(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Payload [*size], in the memory of the first output, and scales."""
        payload = outputs[0].view(-1).view(self.dtype)[: self.size.numel()].view(self.size)
        return payload, outputs[-1].view(-1) if self.scale is None else self.scale


def gather_inputs(shard: ScaledTensor, mesh: DeviceMesh, outer_size: torch.Size) -> tuple[tuple[Tensor, ...], Gathered]:
    """What to gather of a shard: its payload, padded to as many rows as other ranks have; scales of blocks behind it.

    Called by every rank of `mesh`.

    Args:
        mesh: the ranks that hold the shards, one-dimensional.
        outer_size: of the whole weight.

    Returns:
        (payload [rows, …] as bytes or FP16, scales FP32 if they differ between ranks), and what `Gathered.whole` needs.

    Raises:
        UserError: the ranks do not share the matrices of a weight [M, N, K] evenly.
    """
    agree_on_scale_(shard, mesh.get_group())
    payload, ranks = shard.payload, mesh.size()
    num_rows = -(-outer_size[0] // ranks)
    if len(outer_size) == 3 and outer_size[0] % ranks:
        raise UserError(
            f"{shard.layer_name} has {outer_size[0]} matrices, which {ranks} ranks do not share evenly: use a number "
            f"of ranks that divides it, or keep the layer out of replace_linears with its filter"
        )
    if payload.shape[1:] == outer_size[1:] and payload.shape[0] < num_rows:
        payload = payload.new_zeros(num_rows, *outer_size[1:])
        payload[: shard.shape[0]].copy_(shard.payload)
    # Bytes: gloo takes no float8.
    sent = payload.view(torch.uint8) if payload.dtype in FP8_DTYPES else payload
    if (shard.scale.numel() == 1 and len(outer_size) == 2) or ranks == 1:
        return (sent,), Gathered(outer_size, payload.dtype, shard.scale)
    return (sent, shard.scale.contiguous()), Gathered(outer_size, payload.dtype, None)


def agree_on_scale_(shard: ScaledTensor, group: torch.distributed.ProcessGroup) -> None:
    """Bring the shards of an FP8 weight to one scale, if plain values were written to them; else do nothing. Each of
    several matrices keeps its own.

    Called by every rank of `group`. The largest scale is taken. All of them are powers of two, so a value changes only
    where it becomes subnormal.
    """
    part = shard.part
    if part is None or not part.scales_alone or shard.dim() == 3:
        return
    part.scales_alone = False
    tiny = torch.finfo(torch.float32).tiny
    holds_values = (part.root.view(torch.uint8) & 0x7F).bool().any()
    shared = torch.where(holds_values, shard.scale, tiny)  # zeros fit any scale
    torch.distributed.all_reduce(shared, op=torch.distributed.ReduceOp.MAX, group=group)
    shared = torch.where(shared > tiny, shared, 1.0)
    moved = part.root.float() * torch.where(holds_values, shard.scale / shared, 1.0)
    part.root.copy_(moved.to(part.root.dtype))
    shard.scale.copy_(shared)


def stored_part(weight: Tensor) -> ScaledTensor | None:
    """The `ScaledTensor` that this rank stores of a weight: the weight, or what a ``DTensor`` has of it; else None."""
    local: Any = getattr(weight, "_local_tensor", weight)
    return local if is_scaled(local) else None


def plain_copy(weight: Tensor, dtype: torch.dtype, *, here: bool = False) -> Tensor:
    """A weight's values as a plain tensor of `dtype`; a ``DTensor`` of such tensors, if the weight is one.

    Args:
        here: no other rank is asked (`WeightOwner.value_here`), nor is one while the value is consolidated.
    """
    part = stored_part(weight)
    assert part is not None
    here = here or (part.owner is not None and part.owner.is_consolidated)
    plain = (part.value_here() if here else part.master_value()).to(dtype)
    if part is weight:
        return plain
    from torch.distributed.tensor import DTensor

    assert isinstance(weight, DTensor)
    return DTensor.from_local(
        plain, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )
