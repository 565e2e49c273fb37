"""The reduce-scatter in two stages, for several nodes: inside each node over the fast links, then across nodes.

A flat all-to-all sends every rank's version of a shard across the network. Here a node adds its ranks' versions first,
and 1/ranks_per_node of the bytes cross, each between ranks of one local index (one rail). The node's sum is rounded a
second time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor

from ..device.group import Group
from ..dtypes import StorageDtype
from .reduce_scatter import CollectiveWork, ReduceScatterWork, check_buffers, reduce_scatter_mean, start_all_to_all
from .transport.stream_ops import side_stream
from .wire import WireTensor, accumulate_rows_


@dataclass(frozen=True)
class NodeGroups:
    """A data-parallel group seen as nodes: its rank r is rank r % ranks_per_node of node r // ranks_per_node.

    Attributes:
        intra: the ranks of this rank's node; its size is ranks_per_node.
        inter: the ranks with this rank's place in each node; its rank is the node.
    """

    intra: Group
    inter: Group

    @property
    def num_ranks(self) -> int:
        """Size of the data-parallel group."""
        return self.intra.size() * self.inter.size()


def new_node_groups(
    dp_groups: Sequence[Sequence[int]], ranks_per_node: int, *, timeout: timedelta | None = None
) -> NodeGroups:
    """Make the node groups of every data-parallel group; returns this rank's.

    Called by every rank of the world with the same arguments, because making a group is collective.

    Args:
        dp_groups: the global ranks of each data-parallel group, in the group's order; together they hold this rank.
        ranks_per_node: ranks of one data-parallel group on a node (with tensor parallelism, fewer than the node's
            devices); they are consecutive in the group.

    Raises:
        ValueError: a group is not a whole number of nodes.
    """
    own = None
    this_rank = torch.distributed.get_rank()
    for ranks in dp_groups:
        if ranks_per_node < 1 or len(ranks) % ranks_per_node:
            raise ValueError(
                f"ranks_per_node({ranks_per_node}) does not divide the data-parallel size ({len(ranks)}): hierarchical "
                "reduction needs the same number of its ranks on every node"
            )
        nodes = [list(ranks[start : start + ranks_per_node]) for start in range(0, len(ranks), ranks_per_node)]
        rails = [list(ranks[local::ranks_per_node]) for local in range(ranks_per_node)]
        intra = [torch.distributed.new_group(node, timeout=timeout, group_desc="dp_intra_node") for node in nodes]
        inter = [torch.distributed.new_group(rail, timeout=timeout, group_desc="dp_inter_node") for rail in rails]
        if this_rank in ranks:
            place = list(ranks).index(this_rank)
            own = NodeGroups(intra[place // ranks_per_node], inter[place % ranks_per_node])
    assert own is not None, f"rank {this_rank} is in none of {dp_groups}"
    return own


def hierarchical_reduce_scatter_mean(
    sent: WireTensor,
    received: WireTensor,
    groups: NodeGroups,
    *,
    intra: StorageDtype,
    inter: StorageDtype = StorageDtype.FP8,
) -> ReduceScatterWork:
    """Start the mean of `sent` over a data-parallel group, inside its nodes first. Shards are placed as in
    `reduce_scatter_mean`.

    Called by every rank of the group; handles are waited for in the order of the starts. Both sums are FP32 and in
    rank order; between them the node's sum is rounded to `inter`. A NaN or inf in a block of 128 makes that block of
    the result NaN.

    On CUDA the stages run on a side stream and the current stream only waits for the last; on a CPU the second stage
    runs when the handle is waited for. No more than one FP32 row is allocated at a time. The second stage uses the
    memory of `sent` and `received`, which also keeps concurrent calls apart.

    Args:
        sent: [n] in `intra`, n = d · shard, shard a multiple of 128; **overwritten**.
        received: [n] in `intra`; overwritten.
        intra: fp8 (1.03 bytes an element inside the node, rounded twice in all) or bf16 (2 bytes, rounded to E4M3
            once).
        inter: dtype across nodes; bf16 for gradients that must never be rounded to E4M3.

    Returns:
        A handle whose `wait` gives this rank's elements [rank · shard, (rank + 1) · shard) of the mean.

    Raises:
        ValueError: `sent` is not in `intra`, or that is fp32.
    """
    if sent.dtype is not intra or intra is StorageDtype.FP32:
        raise ValueError(f"a tensor in {sent.dtype.value} cannot start a hierarchical reduction in {intra.value}")
    shard = check_buffers(sent, received, groups.num_ranks)
    if groups.inter.size() == 1:
        return reduce_scatter_mean(sent, received, groups.intra)
    stages = _TwoStages(sent, received, groups, shard, inter)
    device = sent.payload.device
    if device.type == "cuda":
        with side_stream(device):
            second = stages.start_inter(stages.start_intra())
        return ReduceScatterWork(shard, device, second, stages.finish)
    first = stages.start_intra()

    def finish(accumulator: Tensor, add: bool) -> None:
        for work in stages.start_inter(first):
            work.wait()
        stages.finish(accumulator, add)

    return ReduceScatterWork(shard, device, [], finish)


@dataclass(frozen=True, eq=False)
class _TwoStages:
    """One call in flight, between two nodes or more.

    The first stage leaves its rows in one of the two buffers. Their sums go into the other buffer. The second stage
    receives over the rows.
    """

    sent: WireTensor
    received: WireTensor
    groups: NodeGroups
    shard: int
    inter: StorageDtype

    @property
    def _ranks_per_node(self) -> int:
        return self.groups.intra.size()

    @property
    def _num_nodes(self) -> int:
        return self.groups.inter.size()

    @property
    def _rows(self) -> WireTensor:
        return self.received if self._ranks_per_node > 1 else self.sent

    @property
    def _spare(self) -> WireTensor:
        return self.sent if self._ranks_per_node > 1 else self.received

    def _second_stage(self, memory: WireTensor) -> WireTensor:
        """Memory for one shard per node, [num_nodes · shard]."""
        return memory.carve(self._num_nodes * self.shard, self.inter)

    def _of_node(self, tensor: WireTensor, node: int) -> WireTensor:
        """The shards that ranks of `node` will own, or the node's versions of one: [ranks_per_node · shard]."""
        size = self._ranks_per_node * self.shard
        return tensor.slice(node * size, (node + 1) * size)

    def start_intra(self) -> list[CollectiveWork]:
        """Local rank l receives its node's versions of the shards that rank l of every node will own.

        One all-to-all per node of final owners: its shards are contiguous in `sent`, so nothing is repacked.
        """
        works = []
        for node in range(self._num_nodes if self._ranks_per_node > 1 else 0):
            sent, received = self._of_node(self.sent, node), self._of_node(self.received, node)
            works += start_all_to_all(sent, received, self.groups.intra)
        return works

    def start_inter(self, first: list[CollectiveWork]) -> list[CollectiveWork]:
        """Wait for the first stage, sum it for each node of final owners, and start the second."""
        for work in first:
            work.wait()
        partial = self._second_stage(self._spare)
        total = torch.empty(self.shard, dtype=torch.float32, device=self.sent.payload.device)
        for node in range(self._num_nodes):
            accumulate_rows_(self._of_node(self._rows, node), self._ranks_per_node, total, factor=1.0, add=False)
            partial.slice(node * self.shard, (node + 1) * self.shard).store_(total)
        incoming = self._second_stage(self._rows)
        return start_all_to_all(partial, incoming, self.groups.inter)

    def finish(self, accumulator: Tensor, add: bool) -> None:
        """Sum the nodes."""
        rows = self._second_stage(self._rows)
        accumulate_rows_(rows, self._num_nodes, accumulator, factor=1.0 / self.groups.num_ranks, add=add)
