"""Data parallelism over flat spaces for any module: gradients leave during backward, weights arrive during forward.

It needs torch alone. A one-rank run uses the same code with one replica.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..collectives.gradient_reduction import GradReducer, build_reducer
from ..dtypes import GradReduceMode, StorageDtype
from ..update_rules import Rate
from .gradient import GradBuffer
from .partition import ParamSpace, RowSplit, StorageClass, partition
from .region import Region
from .released_grads import ReleasedGradBuffer
from .replicas import Sharing
from .sharded_grads import ShardedGradBuffer
from .staging import StagingPool, StagingPools
from .storage import GradFormats, ModelStorage
from .weight_gather import WeightGather
from .whole_grads import WholeGradBuffer


@dataclass(frozen=True)
class Exchange:
    """How replicas exchange gradients and weights.

    Attributes:
        bucket_numel: elements that one reduction or gather carries.
        whole_linears: no linear weight lies in two buckets.
        reduction: how FP8 gradients are summed.
        wire_in_node: what they travel in inside a node under `GradReduceMode.HIERARCHICAL`, bf16 or fp8.
        overlaps_reduce: buckets are reduced during backward. False waits for each one, to measure what overlap hides.
        overlaps_gather: modules wait for their own weights. False waits for all weights, to measure what overlap hides.
    """

    bucket_numel: int = 40_000_000
    whole_linears: bool = False
    reduction: GradReduceMode = GradReduceMode.ALL_TO_ALL
    wire_in_node: StorageDtype = StorageDtype.BF16
    overlaps_reduce: bool = True
    overlaps_gather: bool = True


class DataParallelModule:
    """A module's parameters in flat spaces, with their gradient buffers and weight gathers.

    FP8 layers write the gradients of their weights, biases and norms to `main_grad` themselves. Embeddings
    and 16-bit layers get their gradients from autograd in ``.grad``; these are moved to `main_grad` immediately. The
    optimizer gives the parameters their storage and their values.

    Args:
        module: a submodule that reads other submodules' parameters lists them as `reads_weights_of`.
        named_params: its parameters, with the names for checkpoints and errors. None: torch's names.
        sharing_of: how ranks share a parameter; None: this rank alone holds all parameters.
        region_of: where a parameter's elements lie in the whole parameter; None: all parameters are whole.
        rate_of, is_matrix, row_split_of: see `partition.partition`.
        staging: send and receive buffers; the modules of a rank share them.
        on_reset: called when a step starts, for what layers keep of weights within a step.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        named_params: Mapping[str, torch.nn.Parameter] | None = None,
        *,
        sharing_of: Callable[[torch.nn.Parameter], Sharing] | None = None,
        region_of: Callable[[torch.nn.Parameter], Region] | None = None,
        rate_of: Callable[[str, torch.nn.Parameter], Rate] | None = None,
        is_matrix: Callable[[str, torch.nn.Parameter], bool] | None = None,
        row_split_of: Callable[[torch.nn.Parameter], RowSplit | None] | None = None,
        storage: ModelStorage | None = None,
        exchange: Exchange | None = None,
        staging: StagingPools | None = None,
        on_reset: Sequence[Callable[[], None]] = (),
    ) -> None:
        named_params = dict(module.named_parameters()) if named_params is None else named_params
        storage, exchange, staging = storage or ModelStorage(), exchange or Exchange(), staging or StagingPools()
        self.module = module
        spaces = partition(
            named_params.items(),
            sharing_of,
            region_of=region_of,
            rate_of=rate_of,
            is_matrix=is_matrix,
            row_split_of=row_split_of,
            bucket_numel=exchange.bucket_numel,
            whole_linears=exchange.whole_linears,
        )
        self.grad_buffers = [build_grad_buffer(space, storage, exchange, staging) for space in spaces]
        for buffer in self.grad_buffers:
            buffer.become_main_grad()
            if buffer.space.storage is not StorageClass.LINEAR:
                for slot in buffer.space.slots:
                    slot.param.register_post_accumulate_grad_hook(_move_grad_to_main_grad)
        self._on_reset = on_reset
        self._overlaps_gather = exchange.overlaps_gather
        self._gathers: list[WeightGather] = []

    def reset(self, *, measures_underflow: bool = False, num_micro_batches: int | None = None) -> None:
        """Start a step: the next gradients overwrite the last step's.

        Args:
            measures_underflow, num_micro_batches: see `GradBuffer.reset`.
        """
        for buffer in self.grad_buffers:
            buffer.reset(measures_underflow=measures_underflow, num_micro_batches=num_micro_batches)
        for forget in self._on_reset:
            forget()

    def finish_reductions(self) -> None:
        """After a step's last backward: each buffer gets this rank's shard of the mean over replicas."""
        for buffer in self.grad_buffers:
            buffer.finish()

    def receive_weights_through(self, gather: WeightGather) -> None:
        """Let every module wait for its own weights before its forward."""
        self._gathers.append(gather)
        if not self._overlaps_gather:
            self.module.register_forward_pre_hook(lambda *_: gather.wait())
            return
        buckets_of = {
            slot.param: [span.bucket.index for span in gather.space.spans(slot)] for slot in gather.space.slots
        }
        for module in self.module.modules():
            needed = sorted({index for param in _weights_read_by(module) for index in buckets_of.get(param, [])})
            if needed:
                module.register_forward_pre_hook(_Await(gather, needed))

    def before_recording(self) -> None:
        """The next forward and backward are recorded into a CUDA graph."""
        for gather in self._gathers:
            gather.before_recording()

    def wait_for_weights(self) -> None:
        """Wait for all weights. Code that reads weights outside a forward pass calls this first."""
        for gather in self._gathers:
            gather.wait()


def finish_gradients(modules: Sequence[DataParallelModule]) -> None:
    """Finish the means over replicas, then the sums over other groups; called by every rank after a step's backward.

    Parameters that are summed over a group form spaces of their own, laid out alike on all its ranks, so that each rank
    sums its shard.
    """
    for module in modules:
        module.finish_reductions()
    for module in modules:
        for buffer in module.grad_buffers:
            group = buffer.space.sharing.summed_over
            if group is not None and group.size() > 1:
                torch.distributed.all_reduce(buffer.payload, group=group)


def build_grad_buffer(
    space: ParamSpace, storage: ModelStorage, exchange: Exchange, staging: StagingPools
) -> GradBuffer:
    """The gradient buffer that a space's storage and replicas ask for."""
    formats = storage.of_grads(space.storage, space.dtype)
    if not storage.is_trained:  # nobody takes its gradients
        return ReleasedGradBuffer(space, formats.local)
    if space.replicas.size > 1:
        return _build_sharded(space, formats, exchange, staging, storage.num_micro_batches)
    if not formats.is_released:
        return WholeGradBuffer(space, formats.local)
    assert storage.num_micro_batches == 1, (
        f"{storage.num_micro_batches} micro-batches cannot be added to gradients that are released"
    )
    return ReleasedGradBuffer(space, formats.local)


def _build_sharded(
    space: ParamSpace, formats: GradFormats, exchange: Exchange, staging: StagingPools, num_micro_batches: int
) -> ShardedGradBuffer:
    assert not formats.is_released, "gradients of several replicas are not released"
    reducer, pool = exchange_of(space, formats, exchange, staging)
    return ShardedGradBuffer(
        space,
        reducer,
        pool,
        dtype=formats.shard,
        local=formats.local if formats.adds_locally else None,
        num_micro_batches=num_micro_batches,
        overlap=exchange.overlaps_reduce,
    )


def exchange_of(
    space: ParamSpace, formats: GradFormats, exchange: Exchange, staging: StagingPools
) -> tuple[GradReducer, StagingPool]:
    """How the gradients of a space over several replicas are reduced, and the buffers that they are sent from."""
    replicas = space.replicas
    assert replicas.group is not None, "several replicas need a process group"
    reducer = build_reducer(
        formats.wire, replicas.group, replicas.nodes, mode=exchange.reduction, intra=exchange.wire_in_node
    )
    wire = reducer.wire_dtype if formats.wire is StorageDtype.FP8 else formats.wire
    return reducer, staging.pool(wire, replicas.grad_memory)


def _weights_read_by(module: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """A module's own parameters, and those of modules that it reads without calling them (fused layers)."""
    yield from module.parameters(recurse=False)
    for other in getattr(module, "reads_weights_of", ()):
        yield from other.parameters(recurse=False)


class _Await:
    """Forward pre-hook: waits for some buckets of weights."""

    def __init__(self, gather: WeightGather, buckets: list[int]) -> None:
        self._gather = gather
        self._buckets = buckets

    def __call__(self, *unused: Any) -> None:
        for bucket in self._buckets:
            self._gather.wait_for(bucket)


def _move_grad_to_main_grad(param: torch.Tensor) -> None:
    if param.grad is None:
        return  # the layer wrote it to main_grad; autograd has none
    param.main_grad.accumulate_(param.grad)  # type: ignore[attr-defined]
    param.grad = None
