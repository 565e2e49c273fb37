"""How a model lies on ranks: what an `FP8Optimizer` asks of one rank, of replicas and of ``fully_shard``'s shards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from ..device.group import Group
from ..optimizer.rules.rule import MatrixRule, UpdateRule
from ..optimizer.space_optimizer import OptimizedSpace
from ..quantization.amax_history import AmaxHistory, SquareSum
from ..sharding.data_parallel import Exchange
from ..sharding.partition import ParamSpace, StorageClass, partition
from ..sharding.replicas import Replicas, Sharing
from ..sharding.storage import ModelStorage
from .gradients import ParamGrad, PlainGradBuffer, ReadableGradBuffer, WeightGradBuffer
from .param_state import Entry, LocalParam


@dataclass
class ModelSpace(OptimizedSpace):
    """One space of a param group of the user.

    Attributes:
        params: of its slots, in order.
    """

    buffer: ReadableGradBuffer
    params: Sequence[LocalParam]

    @property
    def is_plain(self) -> bool:
        """Whether users write to the memory of the parameters, which are not FP8 weights."""
        return self.space.storage is not StorageClass.LINEAR

    def see(self) -> None:
        """The values that plain parameters have are their masters'."""
        if self.is_plain:
            for one in self.params:
                one.see()


class ModelRanks:
    """One rank has the whole model. `data_parallel.Replication` and `fsdp.FullyShard` are the other cases.

    Attributes:
        group: the replicas that share gradients; None: there is one.
        exchange: how they exchange gradients and weights.
    """

    group: Group | None = None

    def __init__(self, exchange: Exchange | None = None) -> None:
        self.exchange = exchange or Exchange()

    def local_param(self, name: str, param: torch.nn.Parameter, rule: UpdateRule) -> LocalParam:
        """What this rank has of a parameter."""
        return LocalParam(name, param, rule)

    def sharing_of(self, one: LocalParam) -> Sharing:
        """How ranks share a parameter."""
        return Sharing(Replicas.of(None, one.rows.device))

    def spaces(self, params: Sequence[LocalParam]) -> list[ParamSpace]:
        """The spaces of some parameters."""
        of_rows = {one.rows: one for one in params}
        return partition(
            [(one.name, one.rows) for one in params],  # type: ignore[misc]
            lambda rows: self.sharing_of(of_rows[rows]),
            region_of=lambda rows: of_rows[rows].region,
            is_matrix=lambda _, rows: isinstance(of_rows[rows].rule, MatrixRule),
            bucket_numel=self.exchange.bucket_numel,
            keeps_dtype=True,
        )

    def grad_buffer(self, space: ParamSpace, storage: ModelStorage, num_gradients: int) -> ReadableGradBuffer:
        """Storage for the gradients of a space.

        Args:
            num_gradients: that each parameter is expected to receive per step.
        """
        grads = [ParamGrad(slot) for slot in space.slots]
        if space.storage is StorageClass.LINEAR:
            return WeightGradBuffer(space, None, grads, num_gradients=num_gradients)
        return PlainGradBuffer(space, storage.of_grads(space.storage, space.dtype).local, grads)

    def unfrozen(self, params: Sequence[LocalParam]) -> Sequence[LocalParam]:
        """Of parameters that were frozen and are trained now, those that are given state."""
        return params

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Give every replica the first one's values, in place; called by every replica."""

    def meet(self, what: str) -> None:
        """Wait for the other replicas, which call this too, for `what`."""

    def finish(self) -> None:
        """Wait until ``p.grad`` is the mean over replicas; called by every replica."""

    def finish_step(self) -> None:
        """`finish` in a step of the optimizer."""

    def sum_over_ranks_(self, square_sum: SquareSum, histories: Sequence[AmaxHistory]) -> None:
        """Sum over the ranks that step together, in place, and let them share delayed scales."""

    def finish_update(self) -> None:
        """The optimizer has updated all parameters."""

    def complete_(self, states: dict[LocalParam, Entry]) -> None:
        """Add entries that a state dict must have on this rank; called by every rank."""

    def no_sync(self) -> AbstractContextManager[None]:
        """See `FP8Optimizer.no_sync`."""
        return nullcontext()
