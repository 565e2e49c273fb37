"""FP8 under torch's ``fully_shard`` (FSDP2): the optimizer of one rank's shards.

`replace_linears` puts a model's linear weights in FP8, ``fully_shard`` cuts and gathers them (`quantization.
weight_shards`), and `fp8_megatron.initialize` gives the shards FP8 state:

- Every rank runs the optimizer for its own rows. The rows of a weight lie on all ranks and have one scale: one
  all-reduce of amaxes a step and param group. Delayed scales are those of all ranks, too: a checkpoint has one of each.
- Gradients of FP8 weights cross ranks in FP8 (`fsdp_reduce`).
- Gradients at rest are torch's: ``p.grad`` is a ``DTensor`` of this rank's rows, so torch's clipping and accumulation
  work as they are. `dtensor_grads` reads them where they lie.
- FSDP2 gathers from the optimizer's storage. A plain parameter with rows that the ranks do not share evenly is padded
  by FSDP2; it stays there, and takes its new value after each step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..device.group import Group
from ..dtypes import LEVELS, STATE_BLOCK, StorageDtype
from ..nn.module import FP8Linear
from ..optimizer.rules.rule import build_rule
from ..optimizer.written_weights import write_weight
from ..quantization.amax_history import SquareSum
from ..quantization.scaled_tensor import ScaledTensor
from ..quantization.weight_shards import agree_on_scale_, stored_part
from ..sharding.partition import ParamSpace, Slot, StorageClass, partition
from ..sharding.replicas import Replicas, Sharing
from ..sharding.storage import ModelStorage
from .build import delayed_scales, transposed_weights
from .dtensor_grads import DTensorGradBuffer
from .fsdp_reduce import check_reshard, reduce_in_fp8
from .gradients import SpaceGrads
from .optimizer import FP8Optimizer
from .shard_states import ShardedState
from .sharded_param import ShardedParam
from .space import ModelSpace
from .torch_optimizers import OptimizerError, check_optimizer, take_place_of


class FSDPOptimizer(FP8Optimizer):
    """`FP8Optimizer` for the parameters that ``fully_shard`` made; `build_sharded_optimizer` makes it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._sharded: dict[int, ShardedParam] = {}
        self._groups: list[Group] = []
        #: Along each dimension of the parameters' meshes: a rank meets all ranks of the model by meeting these in turn.
        self._mesh_groups: list[Group] = []
        #: By name, the `ShardedParam.mark` of a plain parameter when its values were last the master's.
        self._marks: dict[str, tuple[int, int, int]] = {}
        super().__init__(*args, **kwargs)

    def _whole_state(self, transposed: Iterable[Tensor]) -> ShardedState:
        parts = (self._spaces, self._numbers, self._skipped.num, self._histories)
        return ShardedState(
            *parts,
            rules=self._rules,
            transposed=transposed,
            sharded=self._sharded.values(),
            storage=self._storage,
            groups=self._groups,
        )

    @torch.no_grad()
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See `FP8Optimizer.add_param_group`."""
        self._join(param_group)
        sharded = [ShardedParam.of(self._names[param], param) for param in param_group["params"]]
        self._frozen += [param for param in param_group["params"] if not param.requires_grad]
        trained = [one for one in sharded if one.param.requires_grad]
        for one in trained:
            self._sharded[id(one.rows)] = one
            if one.group not in self._groups:
                self._groups.append(one.group)
            self._mesh_groups += [group for group in one.mesh_groups if group not in self._mesh_groups]
            self._check_storage(one)
        rule = build_rule(self._rule, param_group)
        self._name_state({one.param: rule for one in trained})
        spaces = partition(
            [(one.name, one.rows) for one in trained if one.rows.numel()],  # type: ignore[misc]
            self._sharing_of,
            region_of=lambda rows: self._sharded[id(rows)].region,
            keeps_dtype=True,
        )
        for space in spaces:
            self._spaces.append(self._build(space, param_group))

    def take_unfrozen(self) -> None:
        """A shard is not given state later.

        Raises:
            OptimizerError: a parameter that was frozen when it was added has a gradient.
        """
        for param in self._frozen:
            if param.grad is not None:
                raise OptimizerError(
                    f"{self._names[param]} was frozen when the optimizer was built and has a gradient now: set "
                    f"requires_grad before initialize, or do not unfreeze it"
                )

    def no_sync(self) -> AbstractContextManager[None]:
        """FSDP2 adds and exchanges gradients itself.

        Raises:
            OptimizerError: always, with what to call instead.
        """
        raise OptimizerError(
            "no_sync() of an optimizer over fully_shard: call model.set_requires_gradient_sync(False) before the "
            "micro-batches that add locally, and (True) before the last one"
        )

    def _sharing_of(self, rows: Tensor) -> Sharing:
        return Sharing(Replicas.of(None, rows.device), scaled_with=self._sharded[id(rows)].group)

    def _check_storage(self, one: ShardedParam) -> None:
        """Check that a weight is stored as the level says, or in more bits than FP8, and in whole blocks."""
        weight = self._storage.formats.weight
        wanted = weight.torch_dtype
        if isinstance(one.rows, ScaledTensor) and one.rows.payload.dtype not in (wanted, torch.float16):
            raise OptimizerError(
                f"{one.name} is stored in {one.rows.payload.dtype}, and this opt_level stores weights in {wanted}: "
                f"choose the storage before fully_shard, replace_linears(model, weight=…)"
            )
        if isinstance(one.rows, ScaledTensor) and weight.is_scaled and one.rows.numel() % STATE_BLOCK:
            raise OptimizerError(
                f"{one.name} {tuple(one.param.shape)} over {one.group.size()} ranks leaves {one.rows.numel()} elements "
                f"for each, no whole blocks of {STATE_BLOCK} as this opt_level stores: use O3 or fewer ranks, or keep "
                f"the layer out of replace_linears with its filter"
            )

    def _param_of(self, slot: Slot) -> Tensor:
        return self._sharded_of(slot).param

    def _build_grads(self, space: ParamSpace) -> SpaceGrads:
        buffer = DTensorGradBuffer(space, [self._sharded_of(slot).param for slot in space.slots])
        return SpaceGrads(buffer, buffer.grads)

    def _sharded_of(self, slot: Slot) -> ShardedParam:
        return self._sharded[id(slot.param)]

    @torch.no_grad()
    def _update(self) -> None:
        super()._update()
        for space in self._plain_spaces():
            self._copy_out(space)

    def _sum_over_ranks_(self, square_sum: SquareSum) -> None:
        """See `FP8Optimizer`. Delayed scales become those of all ranks, too."""
        for group in self._mesh_groups:
            torch.distributed.all_reduce(square_sum, group=group)
            for history in self._histories:
                history.share_amaxes(group)

    def take_written_values(self) -> None:
        """See `FP8Optimizer.take_written_values`."""
        for space in self._plain_spaces():
            for slot in space.space.slots:
                one = self._sharded_of(slot)
                # Views of a ``DTensor``, as torch.distributed.checkpoint loads into, count no versions. Where FSDP2's
                # rows are not the master's memory, their values are read at each step.
                if not one.is_copy and one.mark == self._marks.get(one.name):
                    continue
                if not one.is_copy and one.local.data_ptr() != one.rows.data_ptr():
                    raise OptimizerError(f"{one.name} has other memory than before: move the model before initialize")
                write_weight(space.state, slot, one.local.detach())
            self._copy_out(space)

    def _see(self, space: ModelSpace) -> None:
        if space.space.storage is not StorageClass.LINEAR:
            self._copy_out(space)

    def _plain_spaces(self) -> list[ModelSpace]:
        return [space for space in self._spaces if space.space.storage is not StorageClass.LINEAR]

    def _copy_out(self, space: ModelSpace) -> None:
        """Give FSDP2's own rows the values of their copies. All rows have the masters' values now."""
        for slot in space.space.slots:
            one = self._sharded_of(slot)
            if one.is_copy:
                one.local.copy_(one.rows)
            self._marks[one.name] = one.mark


def build_sharded_optimizer(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    opt_level: str,
) -> FSDPOptimizer:
    """The FP8 optimizer of a model after ``fully_shard``, in place of the user's.

    Called by every rank. The masters start with the values of the weights as they are stored.

    Args:
        optimizer: one that `update_rules` knows, over the model's parameters, built after ``fully_shard``.

    Raises:
        OptimizerError: the optimizer or a parameter cannot be used, with the reason and the fix.
    """
    rule = check_optimizer(optimizer)
    if not any(isinstance(module, FP8Linear) for module in model.modules()):
        raise OptimizerError(
            "fully_shard has sharded the model, and no layer is in FP8: call fp8_megatron.replace_linears(model) "
            "before fully_shard"
        )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            check_reshard(module)
            module.reshard()
    names: Mapping[Any, str] = {param: name for name, param in model.named_parameters()}
    for param, name in names.items():
        part = stored_part(param)
        if part is not None and part.owner is not None:
            raise OptimizerError(f"{name} has an FP8 optimizer already: initialize is called once")
    _agree_on_scales(list(names))
    built = FSDPOptimizer(
        optimizer.param_groups,
        dict(optimizer.defaults),
        names=names,
        values={},
        storage=ModelStorage(LEVELS[opt_level], accumulator=StorageDtype.FP32),
        histories=delayed_scales(model, next(iter(names)).device),
        transposed=transposed_weights(model),
        rule=rule,
    )
    take_place_of(optimizer, built)
    # FSDP2 looks at its parameters' memory again after a load.
    torch.nn.Module.load_state_dict(model, {}, strict=False)
    reduce_in_fp8(model)
    return built


@torch.no_grad()
def _agree_on_scales(params: Sequence[Tensor]) -> None:
    """One scale for all rows of each weight that was given values after ``fully_shard``."""
    for param in params:
        part = stored_part(param)
        if part is not None and isinstance(param, DTensor):
            agree_on_scale_(part, param.device_mesh.get_group(param.device_mesh.ndim - 1))
