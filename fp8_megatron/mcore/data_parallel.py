"""Data parallelism over flat gradient spaces: gradients leave during backward, weights arrive during forward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.transformer.transformer_config import TransformerConfig

from ..collectives.gradient_reduction import GradReducer
from ..config.schema import ParallelConfig, PrecisionConfig
from ..formats import GradReduceMode, StorageDtype
from ..sharding.grad_buffer import GradBuffer, LocalGradBuffer, ShardedGradBuffer
from ..sharding.partition import ParamSpace, StorageClass, partition
from ..sharding.released_grads import ReleasedGradBuffer
from ..sharding.staging import StagingPools
from ..sharding.weight_gather import WeightGather
from .topology import Topology


class FP8DataParallel(_BaseDataParallel):
    """A model chunk with its gradient buffers.

    FP8 layers write the gradients of their weights, biases and norms themselves (`main_grad.accumulate_`); what
    autograd leaves in ``.grad`` (of embeddings, and of layers in 16 bits) is moved to `main_grad` as soon as it is
    there.

    Args:
        named_params: the chunk's parameters with their names in the whole model (see `models.initialization`).
        staging: the rank's send and receive buffers, shared by its model chunks.
        num_micro_batches: gradients each parameter will receive per step.
    """

    def __init__(
        self,
        config: TransformerConfig,
        module: torch.nn.Module,
        *,
        named_params: dict[str, torch.nn.Parameter],
        precision: PrecisionConfig,
        parallel: ParallelConfig,
        topology: Topology,
        staging: StagingPools,
        num_micro_batches: int,
    ) -> None:
        super().__init__(config=config, module=module)
        self.topology = topology
        spaces = partition(
            named_params.items(),
            tensor_parallel_rank=topology.tp.rank(),
            num_shards=topology.dp.size(),
            shard_index=topology.dp.rank(),
            bucket_numel=parallel.ddp_bucket_size,
            whole_linears=precision.fp8_weight_grad_scaling == "delayed",
        )
        self.grad_buffers: list[GradBuffer] = [
            _make_local(space, precision, num_micro_batches)
            if topology.dp.size() == 1
            else _make_sharded(space, precision, parallel, topology, staging, num_micro_batches)
            for space in spaces
        ]
        for buffer in self.grad_buffers:
            buffer.become_main_grad()
            if buffer.space.storage is not StorageClass.LINEAR:
                for slot in buffer.space.slots:
                    slot.param.register_post_accumulate_grad_hook(_move_grad_to_main_grad)
        self._kept_transposes = [
            param.kept_transpose for param in named_params.values() if hasattr(param, "kept_transpose")
        ]
        self._overlaps_gather = parallel.overlap_param_gather
        self._gathers: list[WeightGather] = []

    def zero_grad_buffer(self, *, measures_underflow: bool = False) -> None:
        """Start a step: the next gradients overwrite the last step's."""
        for buffer in self.grad_buffers:
            buffer.reset(measures_underflow=measures_underflow)
        for kept in self._kept_transposes:
            kept.forget()

    def finish_grad_sync(self, *unused: Any, **unused_kwargs: Any) -> None:
        """After the last backward of a step: each buffer ends with this rank's shard of the mean over replicas."""
        for buffer in self.grad_buffers:
            buffer.finish()

    def receive_weights_through(self, gather: WeightGather) -> None:
        """Let every module wait for its own weights before its forward."""
        self._gathers.append(gather)
        if not self._overlaps_gather:
            self.register_forward_pre_hook(lambda *_: gather.wait())
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
        """Wait for all weights, for whoever reads them outside a forward pass."""
        for gather in self._gathers:
            gather.wait()


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


def _make_local(space: ParamSpace, precision: PrecisionConfig, num_micro_batches: int) -> GradBuffer:
    """Gradients of a model that no other rank has a replica of."""
    dtype = local_grad_dtype(space.storage, precision, num_micro_batches)
    if not releases_gradients(space.storage, precision):
        return LocalGradBuffer(space, dtype)
    assert num_micro_batches == 1, f"{num_micro_batches} micro-batches cannot be added to gradients that are released"
    return ReleasedGradBuffer(space, dtype)


def _make_sharded(
    space: ParamSpace,
    precision: PrecisionConfig,
    parallel: ParallelConfig,
    topology: Topology,
    staging: StagingPools,
    num_micro_batches: int,
) -> ShardedGradBuffer:
    """Gradients of a model that other ranks have replicas of."""
    assert not precision.release_gradients, "gradients of several replicas are not released"
    wire_dtype = _wire_dtype(space.storage, precision)
    if wire_dtype is StorageDtype.FP8:
        mode, intra = parallel.fp8_grad_reduce, StorageDtype(parallel.fp8_wire_intra)
        reducer = GradReducer(mode, topology.dp, topology.dp_nodes, intra)
        wire_dtype = reducer.wire_dtype
    elif wire_dtype is StorageDtype.BF16 and topology.dp_nodes is not None:
        reducer = GradReducer(GradReduceMode.HIERARCHICAL, topology.dp, topology.dp_nodes, inter=wire_dtype)
    else:
        reducer = GradReducer(GradReduceMode.ALL_TO_ALL, topology.dp)
    local = None
    if accumulates_locally(space.storage, precision, num_micro_batches):
        dtype = local_grad_dtype(space.storage, precision, num_micro_batches, topology.dp.size())
        local = LocalGradBuffer(space, dtype)
    return ShardedGradBuffer(
        space,
        reducer,
        staging[wire_dtype],
        dtype=shard_grad_dtype(space.storage, precision),
        local=local,
        num_micro_batches=num_micro_batches,
        overlap=parallel.overlap_grad_reduce,
    )


def releases_gradients(storage: StorageClass, precision: PrecisionConfig) -> bool:
    """Whether gradients go into the optimizer as soon as they are written (`ReleasedGradBuffer`)."""
    return precision.release_gradients and storage is StorageClass.LINEAR


def accumulates_locally(storage: StorageClass, precision: PrecisionConfig, num_micro_batches: int) -> bool:
    """Whether several replicas add a space's micro-batches up before one reduction a step.

    The 16-bit rest always does: its gradients are small beside the linear weights', and those of an embedding come when
    a backward ends, with nothing left to hide their reduction.
    """
    if precision.precision != "fp8":
        return True
    is_rest = storage is not StorageClass.LINEAR
    return num_micro_batches > 1 and (is_rest or precision.grad_accumulation == "local")


def _wire_dtype(storage: StorageClass, precision: PrecisionConfig) -> StorageDtype:
    """What gradients travel in."""
    if precision.precision != "fp8":
        return StorageDtype.FP32
    return precision.formats.main_grad if storage is StorageClass.LINEAR else StorageDtype.BF16


def shard_grad_dtype(storage: StorageClass, precision: PrecisionConfig) -> StorageDtype:
    """Storage of one rank's shard of a space's gradients: FP32 unless linear weights' were asked for in less."""
    if storage is not StorageClass.LINEAR or precision.grad_accumulation_dtype is None:
        return StorageDtype.FP32
    return StorageDtype(precision.grad_accumulation_dtype)


def local_grad_dtype(
    storage: StorageClass, precision: PrecisionConfig, num_micro_batches: int, num_replicas: int = 1
) -> StorageDtype:
    """Storage of one space's gradients on the rank that computes them."""
    main_grad = precision.formats.main_grad
    if storage is StorageClass.VECTOR or precision.precision != "fp8":
        return StorageDtype.FP32
    in_shards = num_replicas > 1 and precision.grad_accumulation == "sharded"
    accumulator = StorageDtype(
        precision.grad_accumulation_dtype or (StorageDtype.FP32 if in_shards else StorageDtype.BF16)
    )
    if storage is StorageClass.MATRIX:
        return StorageDtype.BF16 if num_micro_batches == 1 else accumulator
    if main_grad is StorageDtype.FP8 and num_micro_batches > 1:
        return accumulator
    return main_grad


def _move_grad_to_main_grad(param: torch.Tensor) -> None:
    if param.grad is None:
        return  # the layer gave it to main_grad itself, and autograd nothing
    param.main_grad.accumulate_(param.grad)  # type: ignore[attr-defined]
    param.grad = None
