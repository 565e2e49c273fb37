"""Picks how gradients are reduced, by mode and dtype."""

from __future__ import annotations

from ..device.group import Group
from ..dtypes import GradReduceMode, StorageDtype
from .autoscale import AutoScale
from .hierarchical import NodeGroups, hierarchical_reduce_scatter_mean
from .native_sum import check_native_sum, native_reduce_scatter_mean
from .reduce_scatter import ReduceScatterWork, reduce_scatter_mean
from .wire import WireTensor


class GradReducer:
    """Reduces gradients over `group` in one mode; every rank of it holds an equal one.

    Args:
        mode: see `GradReduceMode`.
        group: the data-parallel group.
        node_groups: the same ranks as nodes; mode hierarchical needs it.
        intra: mode hierarchical: what travels inside a node, bf16 or fp8.
        inter: mode hierarchical: what travels across nodes; bf16 (with intra bf16) for gradients that are never to be
            rounded to E4M3.

    Raises:
        ValueError: hierarchical without `node_groups`, with node groups of other ranks than `group`, or with a dtype
            that it cannot send; nccl with an NCCL that lacks the FP8 sum.
    """

    def __init__(
        self,
        mode: GradReduceMode,
        group: Group,
        node_groups: NodeGroups | None = None,
        intra: StorageDtype = StorageDtype.BF16,
        inter: StorageDtype = StorageDtype.FP8,
    ) -> None:
        if mode is GradReduceMode.HIERARCHICAL:
            if node_groups is None:
                raise ValueError("mode hierarchical needs node_groups: see collectives.hierarchical.new_node_groups")
            if node_groups.num_ranks != group.size():
                raise ValueError(
                    f"ranks_per_node({node_groups.intra.size()}) × nodes({node_groups.inter.size()}) is not the "
                    f"data-parallel size ({group.size()})"
                )
            if (intra, inter) not in _WIRES:
                raise ValueError(
                    f"mode hierarchical sends bf16 or fp8 inside a node, then fp8, or bf16 in both; not {intra.value} "
                    f"and {inter.value}"
                )
        if mode is GradReduceMode.NCCL:
            check_native_sum(group)
        self.mode = mode
        self.group = group
        self._node_groups = node_groups
        self._intra = intra
        self._inter = inter

    @property
    def wire_dtype(self) -> StorageDtype:
        """Dtype that `start` expects: fp8, or mode hierarchical's `intra`."""
        return self._intra if self.mode is GradReduceMode.HIERARCHICAL else StorageDtype.FP8

    @property
    def needs_autoscale(self) -> bool:
        """Whether `start` needs an `AutoScale` for tensors in `wire_dtype`."""
        return self.mode is GradReduceMode.NCCL

    def start(self, sent: WireTensor, received: WireTensor, autoscale: AutoScale | None = None) -> ReduceScatterWork:
        """Start the mean of `sent` over the group; the handle gives this rank's shard of it in FP32.

        Called by every rank in the same order. A tensor that is not in `wire_dtype` (the 16-bit rest of a model) goes
        through a plain all-to-all in its own dtype. Mode hierarchical with intra bf16 cannot tell the rest from other
        gradients by its dtype: give the rest a reducer of its own, with inter bf16.

        Args:
            sent: [n], n = d · shard, shard a multiple of 128. Its content after the wait is undefined.
            received: [n] of the same dtype; overwritten. Both belong to this reduction until the handle was waited for.
            autoscale: mode nccl: that of the tensors in `sent`.
        """
        if sent.dtype is not self.wire_dtype or self.mode is GradReduceMode.ALL_TO_ALL:
            return reduce_scatter_mean(sent, received, self.group)
        if self.mode is GradReduceMode.HIERARCHICAL:
            assert self._node_groups is not None
            return hierarchical_reduce_scatter_mean(
                sent, received, self._node_groups, intra=self._intra, inter=self._inter
            )
        assert autoscale is not None, "mode nccl reduces FP8 gradients with an AutoScale"
        return native_reduce_scatter_mean(sent, received, self.group, autoscale)


def build_reducer(
    wire: StorageDtype, group: Group, nodes: NodeGroups | None, *, mode: GradReduceMode, intra: StorageDtype
) -> GradReducer:
    """The reducer of gradients that travel in `wire`.

    FP8 is reduced as `mode` says. Wider gradients are never rounded to E4M3: BF16 takes two stages if `nodes` is given;
    other dtypes take one all-to-all in their own dtype.

    Args:
        nodes: the ranks of `group` by node, or None.
        intra: see `GradReducer`.

    Raises:
        ValueError: as `GradReducer`.
    """
    if wire is StorageDtype.FP8:
        return GradReducer(mode, group, nodes, intra)
    if wire is StorageDtype.BF16 and nodes is not None:
        return GradReducer(GradReduceMode.HIERARCHICAL, group, nodes, inter=wire)
    return GradReducer(GradReduceMode.ALL_TO_ALL, group)


_WIRES = (
    (StorageDtype.BF16, StorageDtype.FP8),
    (StorageDtype.FP8, StorageDtype.FP8),
    (StorageDtype.BF16, StorageDtype.BF16),
)
