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
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from ..device.group import Group
from ..errors import UserError
from ..quantization.amax_history import AmaxHistory, SquareSum
from ..quantization.scaled_tensor import ScaledTensor
from ..quantization.weight_grad import GradPlace, WeightGrad
from ..sharding.data_parallel import Exchange, exchange_of
from ..sharding.gradient import Gradient
from ..sharding.partition import ParamSpace
from ..sharding.replicas import Replicas, Sharing
from ..sharding.sharded_grads import ShardedGradBuffer
from ..sharding.staging import StagingPools
from ..sharding.storage import ModelStorage
from ..sharding.whole_grads import WholeGradBuffer, multiply_
from .gradients import ParamGrad, ReadableGradBuffer
from .model_ranks import ModelRanks
from .param_state import LocalParam

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


class ModelHook:
    """A hook that knows the optimizer of a model, or its replicas. A copied or pickled model has none: there it becomes
    one that does nothing."""

    def __call__(self, *unused: Any) -> None:
        pass

    def __reduce__(self) -> tuple[type[ModelHook], tuple[()]]:
        return ModelHook, ()


class Replication(ModelRanks):
    """One model's replicas, and the gradients that they exchange.

    Args:
        group: the ranks that hold the model; each sees other data.

    Attributes:
        ddp_holds_back: the last forward was inside of ``no_sync`` of torch's DDP.
    """

    def __init__(self, group: Group, device: torch.device, exchange: Exchange | None = None) -> None:
        super().__init__(exchange)
        self.group: Group = group
        self._sharing = Sharing(Replicas.of(group, device))
        self.buffers: list[ReplicaGradBuffer] = []
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

    def sharing_of(self, one: LocalParam) -> Sharing:
        return self._sharing

    def grad_buffer(self, space: ParamSpace, storage: ModelStorage, num_gradients: int) -> ReplicaGradBuffer:
        if self._staging.has_buffers:  # a param group that is added later may have larger buckets
            self._staging = StagingPools()
        grads = [ParamGrad(slot) for slot in space.slots]
        self.buffers.append(ReplicaGradBuffer(space, grads, self, storage, self._staging))
        return self.buffers[-1]

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
        for buffer in self.buffers:
            buffer.finish()

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
            (index, own.num_sent)
            for index, own in enumerate(own for buffer in self.buffers for own in buffer.gradients)
            if own.param.grad is not None
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

    def sum_over_ranks_(self, square_sum: SquareSum, histories: Sequence[AmaxHistory]) -> None:
        self.sum_(square_sum)

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


class ReplicaGradBuffer(ReadableGradBuffer, ShardedGradBuffer):
    """The gradients of one space over replicas.

    Those that are held back, in ``no_sync`` and recorded steps, are added up on this rank, in `on_rank`. `finish` sends
    them, and so does the next backward outside.
    """

    def __init__(
        self,
        space: ParamSpace,
        grads: Sequence[ParamGrad],
        replication: Replication,
        storage: ModelStorage,
        staging: StagingPools,
    ) -> None:
        formats = storage.of_grads(space.storage, space.dtype)
        reducer, pool = exchange_of(space, formats, replication.exchange, staging)
        overlaps = replication.exchange.overlaps_reduce
        super().__init__(space, reducer, pool, dtype=formats.shard, overlap=overlaps, gradients=grads)
        self.replication = replication
        self._always_holds = formats.adds_locally
        #: `on_rank`, if there is any. Weights have it from the first gradient on that is held back.
        self._held: WholeGradBuffer | None = None
        if formats.adds_locally:
            self._held = WholeGradBuffer(space, formats.local, grads)
        self._is_dirty = False
        #: FP32 [num_slots], of the means; None if a mean has changed.
        self._squared_norms: Tensor | None = None
        self._index: dict[Gradient, int] = {own: index for index, own in enumerate(self.gradients)}

    def attach(self) -> None:
        super().attach()
        self.take_others()  # every reader of ``p.grad`` sees the mean

    @property
    def nbytes(self) -> int:
        return super().nbytes + (0 if self._held is None else self._held.nbytes)

    @property
    def on_rank(self) -> WholeGradBuffer:
        """Sums that are on this rank alone."""
        if self._held is None:  # FP8 would round the first of them
            self._held = WholeGradBuffer(self.space, None, self.gradients, num_gradients=2)
        return self._held

    @property
    def _holds_back(self) -> bool:
        """Whether gradients that are written now stay here."""
        return self._always_holds or self.replication.holds_back

    def place(self, gradient: Gradient, *, fp8: bool) -> GradPlace | None:
        if self._holds_back or gradient.count:
            return self.on_rank.place(gradient, fp8=fp8)
        return super().place(gradient, fp8=fp8)

    def written(self, gradient: Gradient, grad: Tensor | WeightGrad) -> None:
        self.note_write()
        if self._holds_back or gradient.count:
            self.on_rank.written(gradient, grad)
            self._send_held(gradient)
        else:
            self.replication.announce()
            super().written(gradient, grad)

    def add(self, gradient: Gradient, grad: Tensor) -> None:
        self.note_write()
        if self._holds_back or gradient.count:
            self.on_rank.add(gradient, grad)
            self._send_held(gradient)
        else:
            self.replication.announce()
            self._send(gradient, grad)

    def _send_held(self, gradient: Gradient) -> None:
        """Let the sum of what was held back leave, unless more is."""
        if not self._holds_back:
            self.replication.announce()
            self._send(gradient, self._taken(gradient))

    def _taken(self, gradient: Gradient) -> Tensor:
        """What is on this rank alone, until something else is."""
        self.on_rank.drop(gradient)
        return self.on_rank.flat(gradient)

    def note_write(self) -> None:
        """Something was written: `finish` has something to do."""
        self.replication.note_write()
        self._is_dirty = True
        self._squared_norms = None

    def finish(self) -> None:
        """Send what has not left yet, and wait for everything; called through `Replication.finish`."""
        for own in self.gradients:
            if own.count:
                held = self._taken(own)
                if own.param.grad is not None:
                    self._send(own, held)
        self._wait()

    def _wait(self) -> None:
        """Wait for what was sent."""
        if self._is_dirty:
            self._is_dirty = False
            super().finish()

    def drop(self, gradient: Gradient) -> None:
        if self._held is not None:
            self._held.drop(gradient)
        if not gradient.in_shard:
            return
        if any(self._is_in_use(own) for own in self.gradients if own.in_shard):
            self.zero_(gradient)
            return
        self._wait()  # what is on its way has to arrive
        self._is_dirty = True  # where nothing more arrives the shard becomes zero
        self.reset()

    @staticmethod
    def _is_in_use(own: ParamGrad) -> bool:
        """Whether ``p.grad`` is what is stored here, and not a tensor of DDP's or the user's."""
        return own.param.grad is not None and own.is_own(own.param.grad)

    def zero_(self, gradient: Gradient) -> None:
        if self._held is not None:
            self._held.drop(gradient)
        if not gradient.in_shard:
            return
        self.replication.finish()
        gradient.in_shard = False
        self._squared_norms = None
        for part in self.shard_parts(gradient):
            part.zero_()

    def values(self, gradient: Gradient) -> Tensor:
        self.replication.finish()
        return super().values(gradient)

    def squared_norm_of(self, gradient: Gradient) -> Tensor:
        self.replication.finish()
        if self._squared_norms is None:
            norms = torch.zeros(len(self.gradients), device=self.space.device)
            for own, index in self._index.items():
                for part in self.shard_parts(own):
                    norms[index] += part.float().square().sum()
            self._squared_norms = self.replication.sum_(norms)
        index = self._index[gradient]
        return self._squared_norms[index : index + 1].clone()

    def squared_norm(self) -> Tensor:
        self.replication.finish()
        return super().squared_norm()

    def scale_(self, factor: Tensor | float, gradients: Sequence[Gradient] | None = None) -> None:
        self.replication.finish()
        scaled = [own for own in self.gradients if own.in_shard] if gradients is None else gradients
        multiply_([part for own in scaled for part in self.shard_parts(own)], factor)
        if self._squared_norms is not None:
            numbers = [self._index[own] for own in gradients or ()]
            for index in [slice(own, own + 1) for own in numbers] or [slice(None)]:
                self._squared_norms[index] *= factor * factor
