"""Silent corruption: ranks that hold the same tensors compare hashes of their bits.

| compared | over |
| --- | --- |
| weights and their scales | the replicas |
| weights, masters and moments | other ranks that hold the same parameter (`Sharing.duplicates`) |
| amax histories | a pipeline stage |
| step count and loss scale | all ranks |

State that one rank alone holds has nothing to be compared with.

A tensor's hash is Σ wᵢ·mᵢ mod 2⁶⁴ over its 32-bit words w, with odd multipliers m that depend on the place i alone. A
changed word always changes the hash, because an odd multiplier has an inverse; swapped words do too, because
(wᵢ - wⱼ)·(mᵢ - mⱼ) is then not zero. Sums of integers have no order, so equal bits give equal hashes.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..device.group import Group
from ..device.memory import cpu_copy
from ..optimizer.distributed_optimizer import FP8DistributedOptimizer
from ..optimizer.split_state import SplitSpaceState
from ..optimizer.state import SpaceState, StateTensor
from ..quantization.amax_history import AmaxHistory
from ..sharding.partition import Slot
from ..sharding.sharded_grads import ShardedGradBuffer
from .restarts import Fault

#: 32-bit words that are hashed at a time; in flight they take 20 bytes each.
_PIECE = 1 << 20
#: 2⁶⁴ / golden ratio, as a signed number: multiplied by a place, it spreads over all bits.
_SPREAD = 0x9E3779B97F4A7C15 - (1 << 64)


class ReplicasDiffer(RuntimeError):
    """Ranks that hold the same tensor hold different bits.

    Attributes:
        hosts: rank → host of the ranks that differ.
    """

    fault = Fault.REPLICAS_DIFFER

    def __init__(self, text: str, hosts: dict[int, str]) -> None:
        super().__init__(text)
        self.hosts = hosts


def hash_bits(tensor: Tensor) -> Tensor:
    """int64 [1], the hash of a tensor's bits (the module's docstring). Does not wait for the device."""
    # Not view(-1): a single element counts as contiguous whatever its stride is, and then cannot be viewed as bytes.
    flat = tensor.detach().contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    words = flat.view(torch.int32) if flat.numel() % 4 == 0 and flat.storage_offset() % 4 == 0 else flat
    total = torch.zeros(1, dtype=torch.int64, device=tensor.device)
    for start in range(0, words.numel(), _PIECE):
        piece = words[start : start + _PIECE]
        total += (piece * _multipliers(start, piece.numel(), tensor.device)).sum()
    return total


def _multipliers(start: int, count: int, device: torch.device) -> Tensor:
    places = torch.arange(start + 1, start + count + 1, dtype=torch.int64, device=device)
    return places.mul_(_SPREAD).bitwise_or_(1)


@dataclass(frozen=True)
class _Replicated:
    """A tensor that all ranks of a group hold alike."""

    name: str
    tensor: Tensor


@dataclass(frozen=True)
class Hashes:
    """Hashes of one step.

    Attributes:
        table: int64 [world, columns] on the host, when the device has copied it: a row a rank, a column for each group
            that the rank compares with.
        names: by column, the tensors.
        details: by column, their hashes, int64 [tensors] on the device.
    """

    table: Tensor
    names: list[list[str]]
    details: list[Tensor]


class ReplicaCheck:
    """Compares what ranks hold alike. Every rank makes one, and makes the same calls in the same order.

    Args:
        stage_group: ranks that share amax histories: tensor × data parallel.
        world: all ranks.
    """

    def __init__(
        self,
        optimizer: FP8DistributedOptimizer,
        histories: Sequence[AmaxHistory | None],
        *,
        stage_group: Group,
        world: Group,
        device: torch.device,
    ) -> None:
        self._optimizer = optimizer
        self._histories = histories
        self._stage_group = stage_group
        self._world = world
        self._device = device
        self._ranks_of: dict[Group, tuple[int, ...]] = {}
        own = list(self._replicated())
        everyones: list[tuple[list[tuple[int, ...]], str]] = [([], "")] * world.size()
        torch.distributed.all_gather_object(everyones, (own, socket.gethostname()), group=world)
        #: By rank: the groups that its columns compare, and its host.
        self.layout = [groups for groups, _ in everyones]
        self.hosts = [host for _, host in everyones]
        self._num_columns = max(map(len, self.layout))

    def hashes(self) -> Hashes:
        """Hash everything, and send one number a group to every rank: world × groups × 8 bytes. Collective.

        Call it between the gradients of a step and its update: then the weights are those that the step computed with,
        before the next gather replaces them. Does not wait for the device.
        """
        names: list[list[str]] = []
        details: list[Tensor] = []
        columns = torch.zeros(self._num_columns, dtype=torch.int64, device=self._device)
        for column, tensors in enumerate(self._replicated().values()):
            hashes = torch.cat([hash_bits(item.tensor) for item in tensors])
            columns[column : column + 1] = hash_bits(hashes)
            names.append([item.name for item in tensors])
            details.append(hashes)
        table = torch.empty(self._world.size() * self._num_columns, dtype=torch.int64, device=self._device)
        torch.distributed.all_gather_into_tensor(table, columns, group=self._world)
        return Hashes(cpu_copy(table).view(-1, self._num_columns), names, details)

    def _ranks(self, group: Group) -> tuple[int, ...]:
        if group not in self._ranks_of:
            self._ranks_of[group] = tuple(torch.distributed.get_process_group_ranks(group))
        return self._ranks_of[group]

    def _replicated(self) -> dict[tuple[int, ...], list[_Replicated]]:
        """What this rank holds like other ranks, by the ranks of that group; they all have the same order."""
        found: dict[tuple[int, ...], list[_Replicated]] = {}
        for group, tensor in self._all_replicated():
            if group is not None and group.size() > 1:
                found.setdefault(self._ranks(group), []).append(tensor)
        return found

    def _all_replicated(self) -> Iterator[tuple[Group | None, _Replicated]]:
        for state in self._optimizer.states:
            sharing = state.space.sharing
            for own in _weights(state):
                yield sharing.replicas.group, own
                yield sharing.duplicates, own
            for own in _shard(state):
                yield sharing.duplicates, own
        for buffer in self._optimizer.buffers:
            if isinstance(buffer, ShardedGradBuffer):
                for name, autoscale, index in buffer.autoscaled_spans():
                    mu = autoscale.state_dict()["mu"][index]
                    yield buffer.space.replicas.group, _Replicated(f"auto-scaling of {name}", mu.view(-1))
        for index, history in enumerate(self._histories):
            if history is not None:
                for name, tensor in (("histories", history.history), ("scales", history.scale)):
                    if tensor is not None:
                        yield self._stage_group, _Replicated(f"amax {name} of model chunk {index}", tensor)
        yield self._world, _Replicated("step count", self._optimizer.step_count)
        if self._optimizer.loss_scale is not None:
            for name, tensor in self._optimizer.loss_scale.state_dict().items():
                yield self._world, _Replicated(f"loss scale: {name}", tensor)


class PendingCheck:
    """The comparison of one step: `start` within the step, `examine` when the host reads the step's results."""

    def __init__(self, check: ReplicaCheck) -> None:
        self._check = check
        self._hashes: Hashes | None = None

    def start(self) -> None:
        """See `ReplicaCheck.hashes`."""
        self._hashes = self._check.hashes()

    def examine(self) -> None:
        """Compare. The device must have reached the end of the step. Collective where hashes differ.

        Raises:
            ReplicasDiffer: on all ranks, with the ranks, their hosts and the tensor.
        """
        assert self._hashes is not None, "start() comes first"
        table: list[list[int]] = self._hashes.table.tolist()
        differing = _differing(self._check.layout, table)
        if not differing:
            return
        mine = {
            ranks: list(zip(names, hashes.tolist(), strict=True))
            for ranks, names, hashes in zip(self._own_groups(), self._hashes.names, self._hashes.details, strict=True)
            if ranks in differing
        }
        everyones: list[dict[tuple[int, ...], list[tuple[str, int]]]] = [{}] * len(table)
        torch.distributed.all_gather_object(everyones, mine, group=self._check._world)
        texts, suspects = [], set()
        for ranks in differing:
            tensors = [everyones[rank][ranks] for rank in ranks]
            values = zip(*tensors, strict=True)
            unequal = [column for column in values if len({hashed for _, hashed in column}) > 1]
            wrong, is_certain = _minority(ranks, [hashed for _, hashed in unequal[0]])
            suspects.update(wrong)
            texts.append(_describe(ranks, wrong, unequal[0][0][0], len(unequal), self._check.hosts, is_certain))
        raise ReplicasDiffer("; ".join(texts), {rank: self._check.hosts[rank] for rank in sorted(suspects)})

    def _own_groups(self) -> list[tuple[int, ...]]:
        return self._check.layout[torch.distributed.get_rank(self._check._world)]


def _differing(layout: list[list[tuple[int, ...]]], table: list[list[int]]) -> list[tuple[int, ...]]:
    """The groups whose ranks do not all have the same hash, by their ranks; the same on every rank."""
    found: dict[tuple[int, ...], set[int]] = {}
    for groups, row in zip(layout, table, strict=True):
        for ranks, hashed in zip(groups, row, strict=False):
            found.setdefault(ranks, set()).add(hashed)
    return sorted(ranks for ranks, hashes in found.items() if len(hashes) > 1)


def _minority(ranks: tuple[int, ...], hashes: Sequence[int]) -> tuple[list[int], bool]:
    """The ranks that differ from a majority, and True; all ranks, and False, if none of the values has a majority."""
    value, count = Counter(hashes).most_common(1)[0]
    if 2 * count <= len(ranks):
        return list(ranks), False
    return [rank for rank, hashed in zip(ranks, hashes, strict=True) if hashed != value], True


def _describe(
    ranks: tuple[int, ...], wrong: list[int], tensor: str, count: int, hosts: list[str], is_certain: bool
) -> str:
    named = ", ".join(f"{rank} (host {hosts[rank]})" for rank in wrong)
    more = f" and {count - 1} more tensors" if count > 1 else ""
    if is_certain:
        others = len(ranks) - len(wrong)
        return f"rank {named} holds other bits of {tensor}{more} than {others} ranks that agree"
    return f"ranks {named} hold different bits of {tensor}{more}; no majority tells which of them is wrong"


def _weights(state: SpaceState) -> Iterator[_Replicated]:
    """The weights of a space and their scales, parameter by parameter."""
    for slot in state.space.slots:
        yield from _parts(slot, "weight", state.weight)
        if state.weight_scales is not None:
            yield _Replicated(f"scale of {slot.name}", slot.scales_in(state.weight_scales))
    if isinstance(state, SplitSpaceState):
        yield _Replicated("predicted amaxes of split masters", state.matrix_amax)


def _parts(slot: Slot, what: str, stored: StateTensor) -> Iterator[_Replicated]:
    yield _Replicated(f"{what} {slot.name}", slot.padded_slice(stored.payload))
    if stored.scales is not None:
        block = stored.payload.numel() // stored.scales.numel()
        yield _Replicated(f"block scales of {what} {slot.name}", slot.padded_slice(stored.scales, block))


def _shard(state: SpaceState) -> Iterator[_Replicated]:
    """Masters and the rule's states of this rank's shard of a space."""
    about = f"of {state.space.slots[0].name} and {len(state.space.slots) - 1} more"
    for kind, stored in {"master": state.master, **state.states}.items():
        yield _Replicated(f"{kind} {about}", stored.payload)
        if stored.scales is not None:
            yield _Replicated(f"block scales of {kind} {about}", stored.scales)
