"""FP8 under torch's ``fully_shard`` (FSDP2): the optimizer of one rank's shards.

`replace_linears` puts a model's linear weights in FP8, ``fully_shard`` cuts and gathers them (`quantization.
weight_shards`), and `fp8_megatron.initialize` gives the shards FP8 state:

- Every rank runs the optimizer for its own rows. A rule of whole matrices swaps rows in BF16
  (`sharding.whole_matrices`). The rows of a weight lie on all ranks and have one scale: one all-reduce of amaxes a step
  and param group. Delayed scales are those of all ranks, too: a checkpoint has one of each.
- Gradients of FP8 weights cross ranks in FP8 (`fsdp_reduce`).
- Gradients at rest are torch's: ``p.grad`` is a ``DTensor`` of this rank's rows, so torch's clipping and accumulation
  work as they are. `DTensorGradBuffer` reads them where they lie.
- FSDP2 gathers from the optimizer's storage. A plain parameter with rows that the ranks do not share evenly is padded
  by FSDP2; it stays there, and takes its new value after each step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..device.group import Group
from ..dtypes import LEVELS, STATE_BLOCK, StorageDtype
from ..kernels import ops
from ..nn.scaled_module import ScaledModule
from ..optimizer.rules.rule import MatrixRule, UpdateRule
from ..quantization.amax_history import AmaxHistory, SquareSum
from ..quantization.scaled_tensor import ScaledTensor
from ..quantization.weight_shards import agree_on_scale_, stored_part
from ..sharding.gradient import Gradient
from ..sharding.partition import ParamSpace, Slot, storage_class
from ..sharding.replicas import Replicas, Sharing
from ..sharding.storage import ModelStorage
from .build import delayed_scales, layouts
from .fsdp_reduce import check_reshard, reduce_in_fp8
from .gradients import ParamGrad, ReadableGradBuffer
from .model_ranks import ModelRanks
from .optimizer import FP8Optimizer
from .param_state import Entry, LocalParam
from .sharded_param import ShardedParam
from .torch_optimizers import Given, OptimizerError, UserOptimizers


class _DTensorGrad(ParamGrad):
    """A gradient that torch's ``fully_shard`` leaves in the sharded parameter's ``grad``."""

    def __init__(self, slot: Slot, param: DTensor) -> None:
        super().__init__(slot)
        self.param = param

    def is_own(self, grad: Tensor) -> bool:
        """Any ``p.grad`` is."""
        return True

    @property
    def rows(self) -> Tensor | None:
        """This rank's rows, flat."""
        grad = self.param.grad
        if grad is None:
            return None
        assert isinstance(grad, DTensor)
        return grad.to_local().reshape(-1)


class DTensorGradBuffer(ReadableGradBuffer):
    """A space's gradients, each in its parameter's own ``grad``.

    FSDP2 lays the gradients of one reduction out in one tensor. Parameters that follow each other there and in the
    space are read as one run, so that a step takes one kernel for each FSDP module's linear weights. No gradient is
    kept here: FSDP2 writes them, and ``zero_grad`` frees them.

    Args:
        params: the sharded parameter of each slot.
    """

    def __init__(self, space: ParamSpace, params: Sequence[DTensor]) -> None:
        grads = [_DTensorGrad(slot, param) for slot, param in zip(space.slots, params, strict=True)]
        super().__init__(space, grads)
        self._grads = grads
        self.payload = torch.empty(0, device=space.device)

    def attach(self) -> None:
        """``p.grad`` is torch's."""
        for own in self._grads:
            own.buffer = self

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int, ops.FlatState]]:
        run: list[tuple[Slot, Tensor]] = []
        for slot, grad in self._present():
            if not start <= slot.offset < stop:
                continue
            if run and not _continues(run[-1], slot, grad):
                yield _together(run)
                run = []
            run.append((slot, grad))
        if run:
            yield _together(run)

    def squared_norm(self) -> Tensor:
        squares = [ops.squared_norm(run.payload, None) for _, _, run in self.runs(0, self.space.numel)]
        return torch.cat(squares).sum().reshape(1) if squares else torch.zeros(1, device=self.space.device)

    def add(self, gradient: Gradient, grad: Tensor) -> None:
        raise NotImplementedError("FSDP2 writes its gradients itself")

    def reset(self, *, measures_underflow: bool = False, num_micro_batches: int | None = None) -> None:
        raise NotImplementedError("FSDP2 drops its gradients itself")

    def finish(self) -> None:
        """Nothing: FSDP2 has reduced the gradients."""

    def zero_(self, gradient: Gradient) -> None:
        """Nothing: a gradient that is None is left out."""

    @property
    def nbytes(self) -> int:
        return sum(grad.nbytes for _, grad in self._present())

    def non_finite_slots(self) -> list[str]:
        return [slot.name for slot, grad in self._present() if not torch.isfinite(grad).all().item()]

    def _present(self) -> Iterator[tuple[Slot, Tensor]]:
        return ((own.slot, rows) for own in self._grads if (rows := own.rows) is not None)


def _continues(last: tuple[Slot, Tensor], slot: Slot, grad: Tensor) -> bool:
    """Whether a slot and its gradient follow right behind the last one's, both in the space and in memory."""
    before, grad_before = last
    is_next = before.numel == before.padded and before.offset + before.padded == slot.offset
    return (
        is_next
        and grad.dtype == grad_before.dtype
        and grad.untyped_storage().data_ptr() == grad_before.untyped_storage().data_ptr()
        and grad.storage_offset() == grad_before.storage_offset() + grad_before.numel()
    )


def _together(run: list[tuple[Slot, Tensor]]) -> tuple[int, int, ops.FlatState]:
    """The range of a run's slots, and their gradients as one tensor with the padding of the last slot."""
    (first, grad), (last, _) = run[0], run[-1]
    numel = last.offset + last.numel - first.offset
    flat = grad.as_strided((numel,), (1,), grad.storage_offset())
    if last.padded > last.numel:
        flat = torch.nn.functional.pad(flat, (0, last.padded - last.numel))
    return first.offset, last.offset + last.padded, ops.FlatState(flat, None)


class FullyShard(ModelRanks):
    """The parameters that ``fully_shard`` made: each rank has rows of them, and FSDP2 exchanges gradients.

    Args:
        storage: what is stored in which format.
    """

    def __init__(self, storage: ModelStorage) -> None:
        super().__init__()
        self._storage = storage
        self._params: list[ShardedParam] = []
        #: Along each dimension of the parameters' meshes: a rank meets all ranks of the model by meeting these in turn.
        self._mesh_groups: list[Group] = []

    def local_param(self, name: str, param: torch.nn.Parameter, rule: UpdateRule) -> ShardedParam:
        one = ShardedParam(name, param, rule)
        if param.requires_grad:
            self._params.append(one)
            self._mesh_groups += [group for group in one.mesh_groups if group not in self._mesh_groups]
            self._check_storage(one)
            if isinstance(rule, MatrixRule) and 0 in one.region.part_sizes:
                raise OptimizerError(
                    f"{name} {tuple(param.shape)} has fewer rows than there are ranks ({one.group.size()}), and each "
                    f"has a part of a matrix that is updated whole: give it to an AdamW"
                )
        return one

    def sharing_of(self, one: LocalParam) -> Sharing:
        assert isinstance(one, ShardedParam)
        return Sharing(Replicas.of(None, one.rows.device), scaled_with=one.group)

    def grad_buffer(self, space: ParamSpace, storage: ModelStorage, num_gradients: int) -> DTensorGradBuffer:
        sharded = {one.rows: one.param for one in self._params}
        return DTensorGradBuffer(space, [sharded[slot.param] for slot in space.slots])

    def unfrozen(self, params: Sequence[LocalParam]) -> Sequence[LocalParam]:
        """None: a shard is not given state later.

        Raises:
            OptimizerError: one has a gradient.
        """
        for one in params:
            if one.param.grad is not None:
                raise OptimizerError(
                    f"{one.name} was frozen when the optimizer was built and has a gradient now: set requires_grad "
                    f"before initialize, or do not unfreeze it"
                )
        return ()

    def sum_over_ranks_(self, square_sum: SquareSum, histories: Sequence[AmaxHistory]) -> None:
        for group in self._mesh_groups:
            torch.distributed.all_reduce(square_sum, group=group)
            for history in histories:
                history.share_amaxes(group)

    def finish_update(self) -> None:
        for one in self._params:
            if not isinstance(one.rows, ScaledTensor):
                one.see()

    def complete_(self, states: dict[LocalParam, Entry]) -> None:
        """A parameter of which this rank has no rows has an entry as on the others, for every rank's state dict has the
        same names. Its steps are those that ranks with rows have counted."""
        for group in dict.fromkeys(one.group for one in self._params):
            uneven = [one for one in self._params if one.is_copy and one.group == group]
            if not uneven:
                continue
            steps = [float(states[one]["step"]) if one in states else 0.0 for one in uneven]
            counted = torch.tensor(steps, device=uneven[0].rows.device)
            torch.distributed.all_reduce(counted, op=torch.distributed.ReduceOp.MAX, group=group)
            for one, step in zip(uneven, counted.cpu(), strict=True):
                if one not in states:
                    formats = self._storage.of_state(storage_class(one.rows), one.rows.dtype)  # type: ignore[arg-type]
                    states[one] = {"step": step.clone(), **one.empty_entry(formats)}

    def no_sync(self) -> AbstractContextManager[None]:
        """FSDP2 adds and exchanges gradients itself.

        Raises:
            OptimizerError: always, with what to call instead.
        """
        raise OptimizerError(
            "no_sync() of an optimizer over fully_shard: call model.set_requires_gradient_sync(False) before the "
            "micro-batches that add locally, and (True) before the last one"
        )

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


def build_sharded_optimizer(
    model: torch.nn.Module,
    optimizer: Given,
    opt_level: str,
) -> FP8Optimizer:
    """The FP8 optimizer of a model after ``fully_shard``, in place of the user's.

    Called by every rank. The masters start with the values of the weights as they are stored.

    Args:
        optimizer: one or several that `update_rules` knows, over the model's parameters, built after ``fully_shard``.

    Raises:
        OptimizerError: the optimizer or a parameter cannot be used, with the reason and the fix.
    """
    users = UserOptimizers.of(optimizer)
    if not any(isinstance(module, ScaledModule) for module in model.modules()):
        raise OptimizerError(
            "fully_shard has sharded the model, and no layer is in FP8: call fp8_megatron.replace_linears(model) "
            "before fully_shard"
        )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            check_reshard(module)
            module.reshard()
    names: Mapping[Any, str] = {param: name for name, param in model.named_parameters()}
    users.check_shares(names)
    for param, name in names.items():
        part = stored_part(param)
        if part is not None and part.owner is not None:
            raise OptimizerError(f"{name} has an FP8 optimizer already: initialize is called once")
    _agree_on_scales(list(names))
    storage = ModelStorage(LEVELS[opt_level], accumulator=StorageDtype.FP32)
    built = FP8Optimizer(
        users.param_groups,
        users.defaults,
        names=names,
        values={},
        storage=storage,
        ranks=FullyShard(storage),
        histories=delayed_scales(model, next(iter(names)).device),
        layouts=layouts(model),
        rules=users.rules,
    )
    users.give_place_to(built)
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
