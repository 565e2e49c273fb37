"""Replicas of a model: gradients are averaged over a process group, and each rank keeps its shard of means and state.

Weight gradients leave in FP8 during backward, bucket by bucket, after every backward pass. Gradients of plain
parameters are added on their rank and leave once a step. So do those of weights inside of ``no_sync``
(`Replication.holds_back`): the next backward outside of it sends their sum.

What reads a gradient (a norm, a clip, the optimizer) first waits for all of it: `Replication.finish`. So ``p.grad`` is
the mean over replicas, as after torch's DDP.

All replicas call what reads or writes gradients in the same order, and use the same parameters in a step.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from ..device.group import Group
from ..errors import UserError
from ..quantization.scaled_tensor import ScaledTensor
from ..quantization.weight_grad import WeightGrad
from ..sharding.data_parallel import Exchange, build_sharded
from ..sharding.grad_buffer import LocalGradBuffer, ShardedGradBuffer
from ..sharding.growing_grads import GrowingGradBuffer, multiply_
from ..sharding.partition import ParamSpace, Slot
from ..sharding.replicas import Replicas, Sharing
from ..sharding.staging import StagingPools
from ..sharding.storage import ModelStorage
from .grad_tensor import GradTensor
from .gradients import ParamGrad, RecordableGrads

logger = logging.getLogger(__name__)

#: Steps in which the host waits to see that replicas use the same parameters; later, only where a rank's use changes.
_WATCHED_STEPS = 3
#: How long replicas wait for each other where one may have come alone; NCCL's collectives wait as long by default.
_PATIENCE = timedelta(minutes=10)
#: How long they wait without a word.
_SILENCE = timedelta(seconds=5)


class ReplicaError(UserError):
    """Replicas do not do the same."""


def _not_together(what: str, why: str) -> str:
    """What `ReplicaError` says where `what` is not called by all replicas."""
    return (
        f"{what} gathers what the replicas hold, and {why}: call it on every rank, or call "
        f"optimizer.consolidate_state_dict() on every rank before one rank saves"
    )


def _ends(work: torch.distributed.Work, time: timedelta) -> bool:
    """Whether `work` ends in time.

    Raises:
        RuntimeError: it has failed.
    """
    try:
        work.wait(time)
    except RuntimeError:
        if work.is_completed():
            raise
        return False
    return True


class NoHook:
    """A hook that does nothing: what a pickled model has in place of hooks that know replicas."""

    def __call__(self, *unused: Any) -> None:
        pass


class Replication:
    """One model's replicas, and the gradients that they exchange.

    Args:
        group: the ranks that hold the model; each sees other data.

    Attributes:
        ddp_holds_back: the last forward was inside of ``no_sync`` of torch's DDP.
    """

    def __init__(self, group: Group, device: torch.device, exchange: Exchange | None = None) -> None:
        self.group = group
        self.sharing = Sharing(Replicas.of(group, device))
        self.exchange = exchange or Exchange()
        self.spaces: list[ShardedGrads] = []
        # What ranks agree on is sent beside the gradients, between hosts: it arrives whatever the devices wait for.
        ranks = torch.distributed.get_process_group_ranks(group)
        self._control = torch.distributed.new_group(ranks, backend="gloo", use_local_synchronization=True)
        self._staging = StagingPools()
        self.ddp_holds_back = False
        self._num_no_syncs = self._num_recorded = 0
        self._is_finished = True
        self._has_checked = False
        self._num_checked = self._num_steps = 0
        self._last_use: tuple[tuple[int, int], ...] = ()
        #: Comparisons of this rank with the others, whose answer nobody has read.
        self._compared: list[tuple[torch.distributed.Work, Tensor]] = []
        #: On the CPU the exchange of a gradient blocks the host.
        self._announces = device.type == "cpu"
        self._has_announced = False

    def add_space(self, space: ParamSpace, storage: ModelStorage) -> ShardedGrads:
        """Gradients of one more space."""
        if self._staging.has_buffers:  # a param group that is added later may have larger buckets
            self._staging = StagingPools()
        grads = ShardedGrads(space, self, storage, self._staging)
        self.spaces.append(grads)
        return grads

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of the block stay on their rank."""
        self._num_no_syncs += 1
        try:
            yield
        finally:
            self._num_no_syncs -= 1

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """The block is a step that may be recorded: its gradients stay on their rank, and `finish` sends them."""
        self._num_recorded += 1
        try:
            with self.no_sync():
                yield
        finally:
            self._num_recorded -= 1

    @property
    def is_recorded(self) -> bool:
        """Whether this is inside of `recorded`."""
        return self._num_recorded > 0

    @property
    def holds_back(self) -> bool:
        """Whether gradients that are written now stay on their rank."""
        return self._num_no_syncs > 0 or self.ddp_holds_back

    def note_write(self) -> None:
        """A gradient was written: `finish` has something to do."""
        self._is_finished = False

    def announce(self) -> None:
        """The first gradient since `finish` is about to leave: a replica that gathers state instead hears of it, where
        the exchange would wait for it."""
        if self._announces and not self._has_announced:
            self._has_announced = True
            self._compare(self._num_steps, gathers=False)

    def finish(self) -> None:
        """Wait until every shard holds the mean of all gradients written so far; called by every replica.

        Raises:
            ReplicaError: a parameter has a gradient on some replicas alone.
        """
        if self._is_finished:
            return
        self._is_finished, self._has_announced = True, False
        self._check_use()
        for space in self.spaces:
            space.reduce()

    def finish_step(self) -> None:
        """`finish` in a step of the optimizer: replicas meet also where this one has no gradient.

        Raises:
            ReplicaError: see `finish`.
        """
        if not self._has_checked:
            self._is_finished = False
        self.finish()
        self._has_checked = False
        self._num_steps += 1

    def _check_use(self) -> None:
        """Replicas agree on the number of steps, on which parameters have gradients, and on how many of each have left.

        The answer is read one step later, unless this rank has other gradients than in the last step.
        """
        self._read_compared()
        self._has_checked = True
        use = tuple(
            (index, space.num_sent.get(grad.slot.offset, 0))
            for index, (space, grad) in enumerate((space, grad) for space in self.spaces for grad in space.grads)
            if grad.param.grad is not None
        )
        self._compare((self._num_steps, use), gathers=False)
        is_watched = self._num_checked < _WATCHED_STEPS or use != self._last_use
        self._num_checked += 1
        self._last_use = use
        if is_watched:
            self._read_compared()

    def _compare(self, value: object, *, gathers: bool) -> None:
        """Begin to compare a value with those of the other replicas, which call this too: Σ h and Σ h² of a hash h tell
        whether all are equal. A replica that gathers state (`meet`) so meets those that take a step.
        """
        hashed = zlib.crc32(repr(value).encode()) & 0xFFFF
        sums = torch.tensor([hashed, hashed**2, int(gathers)], dtype=torch.int64, device="cpu")
        options = torch.distributed.distributed_c10d.AllreduceOptions()
        if gathers:  # the process cannot end before its collectives do
            options.timeout = _PATIENCE
        self._compared.append((self._control.allreduce([sums], options), sums))

    def _are_equal(self, sums: Tensor, what: str) -> bool:
        """Whether all replicas gave `_compare` the same value.

        Raises:
            ReplicaError: some of them alone gather state, with `what`.
        """
        total, squares, num_gathering = sums.tolist()
        if 0 < num_gathering < self.group.size():
            count = f"{num_gathering} of {self.group.size()} called it while the others took a step"
            raise ReplicaError(_not_together(what, count))
        return bool(self.group.size() * squares == total * total)

    def _read_compared(self) -> None:
        compared, self._compared = self._compared, []
        for work, sums in compared:
            work.wait()
            if not self._are_equal(sums, "state_dict() of the optimizer or the model"):
                raise ReplicaError(
                    f"replicas have gradients of different parameters, or numbers of them; rank {self.group.rank()} "
                    f"has {len(self._last_use)}, {sum(number for _, number in self._last_use)} times: let every rank "
                    f"use the same parameters in a step, and call backward as often outside of no_sync()"
                )

    def meet(self, what: str) -> None:
        """Wait for the other replicas, which call this too. Where that takes long, a warning says so.

        Raises:
            ReplicaError: some replica does not come in time, or takes a step; `what` is in the text.
        """
        self._compare(what, gathers=True)
        work, sums = self._compared.pop()
        minutes = f"{_PATIENCE.total_seconds() / 60:g} minutes"
        try:
            if not _ends(work, _SILENCE):
                waited = f"has waited {_SILENCE.total_seconds():g} s for the others; it ends after {minutes}"
                logger.warning("%s", _not_together(what, waited))
                work.wait()
        except RuntimeError as error:
            raise ReplicaError(_not_together(what, f"not all of them called it within {minutes}")) from error
        if not self._are_equal(sums, what):
            raise ReplicaError(_not_together(what, "others call something else"))

    def sum_(self, value: Tensor) -> Tensor:
        """Replace a tensor (any shape and dtype) by its sum over the replicas, and return it; called by all of them."""
        torch.distributed.all_reduce(value, group=self.group)
        return value

    @torch.no_grad()
    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Give every replica the first one's values, in place; called by every replica.

        Args:
            tensors: of any shapes and dtypes. `ScaledTensor`s get payload and scales.
        """
        source = torch.distributed.get_global_rank(self.group, 0)
        for tensor in tensors:
            parts = [tensor.payload, tensor.scale] if isinstance(tensor, ScaledTensor) else [tensor.detach()]
            for part in parts:
                sent = (torch.view_as_real(part) if part.is_complex() else part).contiguous()
                bits = sent.view(torch.uint8) if sent.dim() and sent.numel() else sent
                torch.distributed.broadcast(bits, source, group=self.group)
                if sent.data_ptr() != part.data_ptr():
                    part.copy_(torch.view_as_complex(sent) if part.is_complex() else sent)


class ShardedGrads(RecordableGrads):
    """The gradients of one space over replicas; ``p.grad`` is a `GradTensor` of the mean.

    Attributes:
        num_sent: by slot, its gradients since the last reduction that left one by one, during backward.
    """

    buffer: ShardedGradBuffer

    def __init__(
        self, space: ParamSpace, replication: Replication, storage: ModelStorage, staging: StagingPools
    ) -> None:
        super().__init__(space)
        formats = storage.of_grads(space.storage, space.dtype)
        self.buffer = build_sharded(space, formats, replication.exchange, staging)
        self._replication = replication
        self._always_holds = formats.adds_locally
        #: `written`, if there is any. Weights have it inside of ``no_sync`` and recorded steps, from the first on.
        #: It is no part of `buffer`, because what is held is dropped without the other ranks.
        self._held: LocalGradBuffer | None = LocalGradBuffer(space, formats.local) if formats.adds_locally else None
        #: Offsets of the slots that may hold something else than zeros in the shards, or are on their way there.
        self._live: set[int] = set()
        self.num_sent: dict[int, int] = {}
        self._is_dirty = False
        #: FP32 [num_slots], of the means; None if a mean has changed.
        self._squared_norms: Tensor | None = None
        self._index = {slot.offset: index for index, slot in enumerate(space.slots)}
        for grad in self.grads:
            grad.tensor = GradTensor(grad, grad.param)
        self._attach()

    @property
    def nbytes(self) -> int:
        return self.buffer.nbytes + (0 if self._held is None else self._held.nbytes)

    def add_(self, slot: Slot, grad: Tensor | WeightGrad) -> None:
        self._note_write()
        if self._always_holds or self._replication.holds_back:
            self.written.accumulate_(slot, grad)
            return
        if self._is_held(slot):
            assert self._held is not None
            self._held.accumulate_(slot, grad)
            grad = self._no_longer_held(slot)
        self._replication.announce()
        self.num_sent[slot.offset] = self.num_sent.get(slot.offset, 0) + 1
        self._send(slot, grad)

    @property
    def written(self) -> LocalGradBuffer:
        """Sums that are on this rank alone."""
        if self._held is None:
            self._held = GrowingGradBuffer(self.space, num_gradients=2)  # FP8 would round the first of them
        return self._held

    def held(self) -> AbstractContextManager[None]:
        return self._replication.recorded()

    def prepare(self) -> None:
        for own in self.grads:
            if own.param.grad is None:
                self.forget(own.slot)

    def mark(self, slot: Slot, count: int) -> None:
        super().mark(slot, count)
        if count:
            self._note_write()

    def _note_write(self) -> None:
        self._replication.note_write()
        self._is_dirty = True
        self._squared_norms = None

    def _is_held(self, slot: Slot) -> bool:
        return self._held is not None and self._held.is_written(slot)

    def _no_longer_held(self, slot: Slot) -> Tensor:
        """What is held of `slot`, until something else is."""
        assert self._held is not None
        self._held.forget(slot)
        return slot.shaped(self._held.flat(slot))

    def _send(self, slot: Slot, grad: Tensor | WeightGrad) -> None:
        self._live.add(slot.offset)
        self.buffer.accumulate_(slot, grad)

    def reduce(self) -> None:
        """Send what has not left yet, and wait for everything; called through `Replication.finish`."""
        for own in self.grads:
            if self._is_held(own.slot):
                held = self._no_longer_held(own.slot)
                if own.param.grad is not None:
                    self._send(own.slot, held)
        self._wait()

    def _wait(self) -> None:
        """Wait for what was sent."""
        if self._is_dirty:
            self._is_dirty = False
            self.num_sent.clear()
            self.buffer.finish()

    def forget(self, slot: Slot) -> None:
        if self._held is not None:
            self._held.forget(slot)
        if slot.offset not in self._live:
            return
        if any(self._is_in_use(own) for own in self.grads if own.slot.offset in self._live):
            self.zero_(slot)
            return
        self._wait()  # what is on its way has to arrive
        self._is_dirty = True  # where nothing more arrives the shard becomes zero
        self.buffer.reset()
        self._live.clear()

    @staticmethod
    def _is_in_use(own: ParamGrad) -> bool:
        """Whether ``p.grad`` is what is stored here, and not a tensor of DDP's or the user's."""
        return own.param.grad is not None and own.is_own(own.param.grad)

    def zero_(self, slot: Slot) -> None:
        if self._held is not None:
            self._held.forget(slot)
        if slot.offset not in self._live:
            return
        self._replication.finish()
        self._live.discard(slot.offset)
        self._squared_norms = None
        for part in self._parts(slot):
            part.zero_()

    def values(self, slot: Slot) -> Tensor:
        self._replication.finish()
        return self.space.assemble(
            slot, lambda own: self.buffer.payload[own.shard_start : own.shard_start + own.length].float()
        )

    def squared_norm(self, slot: Slot) -> Tensor:
        self._replication.finish()
        if self._squared_norms is None:
            norms = torch.zeros(len(self.space.slots), device=self.space.device)
            for index, other in enumerate(self.space.slots):
                for part in self._parts(other):
                    norms[index] += part.float().square().sum()
            self._squared_norms = self._replication.sum_(norms)
        index = self._index[slot.offset]
        return self._squared_norms[index : index + 1].clone()

    def partial_squared_norm(self) -> Tensor:
        self._replication.finish()
        return self.buffer.squared_norm()

    def scale_(self, factor: Tensor | float, slot: Slot | None = None) -> None:
        self._replication.finish()
        live = [own.slot for own in self.grads if own.slot.offset in self._live]
        multiply_([part for own in (live if slot is None else [slot]) for part in self._parts(own)], factor)
        if self._squared_norms is not None:
            index = slice(None) if slot is None else slice(self._index[slot.offset], self._index[slot.offset] + 1)
            self._squared_norms[index] *= factor * factor

    def _parts(self, slot: Slot) -> Sequence[Tensor]:
        """This rank's parts of a mean (views)."""
        return [
            self.buffer.payload[own.shard_start : own.shard_start + own.length] for own in self.space.fragments(slot)
        ]
