"""Builds what a run trains: model chunks, data parallelism, optimizer and schedule, with weights in place."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from ..config.schema import Config
from ..mcore.data_parallel import FP8DataParallel
from ..mcore.finalize import finalize_model_grads
from ..mcore.gpt import ModelChunk, build_model
from ..mcore.initialization import initial_values, named_parameters_of_model
from ..mcore.topology import Topology
from ..optimizer.distributed_optimizer import FP8DistributedOptimizer
from ..quantization.amax_history import AmaxHistory
from ..reporting.memory_report import MemoryByKind, StorageBytes
from ..sharding.partition import StorageClass
from ..sharding.staging import StagingPools
from .schedule import build_scheduler


@dataclass(frozen=True)
class TrainingState:
    """What a rank trains."""

    config: Config
    topology: Topology
    device: torch.device
    model: list[FP8DataParallel]
    staging: StagingPools
    histories: list[AmaxHistory | None]
    optimizer: FP8DistributedOptimizer
    scheduler: OptimizerParamScheduler
    num_micro_batches: int
    vocab_size: int


@dataclass(frozen=True)
class TrainableModel:
    """This rank's model chunks, wrapped for data parallelism, and the optimizer that holds their weights."""

    chunks: list[ModelChunk]
    model: list[FP8DataParallel]
    staging: StagingPools
    optimizer: FP8DistributedOptimizer


def build_trainable_model(
    config: Config, vocab_size: int, topology: Topology, device: torch.device, num_micro_batches: int
) -> TrainableModel:
    """Build and initialise the model and its optimizer on this rank, inside `runtime`.

    Args:
        vocab_size: padded vocabulary.
        num_micro_batches: gradients each parameter will receive per step.
    """
    chunks = build_model(config, vocab_size, topology, device)
    staging = StagingPools(topology.grad_memory)
    named = [named_parameters_of_model(chunk.module) for chunk in chunks]
    model = [
        FP8DataParallel(
            chunk.module.config,
            chunk.module,
            named_params=params,
            precision=config.precision,
            parallel=config.parallel,
            topology=topology,
            staging=staging,
            num_micro_batches=num_micro_batches,
        )
        for chunk, params in zip(chunks, named, strict=True)
    ]
    chunks[0].module.config.finalize_model_grads_func = partial(_finalize, topology=topology)
    optimizer = FP8DistributedOptimizer(model, config.optimizer, config.precision, topology, device)
    if optimizer.loss_scale is not None:
        for chunk in chunks:
            chunk.module.config.grad_scale_func = optimizer.loss_scale.scale_loss
    values = (
        initial_values(
            params,
            config.model,
            seed=config.training.seed,
            tensor_parallel_rank=topology.tp.rank(),
            tensor_parallel_size=topology.tp.size(),
        )
        for params in named
    )
    optimizer.load_weights(chain.from_iterable(values))
    return TrainableModel(chunks, model, staging, optimizer)


def build_training_state(config: Config, vocab_size: int, topology: Topology, device: torch.device) -> TrainingState:
    """Build and initialise everything on this rank.

    Args:
        vocab_size: padded vocabulary.
    """
    num_micro_batches = config.num_micro_batches(topology.world_size)
    built = build_trainable_model(config, vocab_size, topology, device, num_micro_batches)
    return TrainingState(
        config=config,
        topology=topology,
        device=device,
        model=built.model,
        staging=built.staging,
        histories=[chunk.recipe.history for chunk in built.chunks],
        optimizer=built.optimizer,
        scheduler=build_scheduler(built.optimizer, config.optimizer, config.training.train_iters),
        num_micro_batches=num_micro_batches,
        vocab_size=vocab_size,
    )


def _finalize(model: list[FP8DataParallel], num_tokens: object, *, topology: Topology, **unused: object) -> None:
    # megatron-core also passes a token count (per-token losses, not used here), its groups and force_all_reduce.
    finalize_model_grads(model, topology)


def measured_storage(state: TrainingState) -> MemoryByKind:
    """Bytes of the tensors that hold this rank's weights, gradients and optimizer state."""
    linear = rest = StorageBytes(0, 0, 0, 0, 0, 0, 0)
    for buffer, space in zip(state.optimizer.buffers, state.optimizer.states, strict=True):
        counts = space.byte_counts()
        held = StorageBytes(
            num_params=buffer.space.num_params,
            weights=counts["weight"],
            gradients=buffer.nbytes,
            master_weights=counts["master_weight"],
            exp_avg=counts["exp_avg"],
            exp_avg_sq=counts["exp_avg_sq"],
            scales=counts["scales"] + buffer.scale_bytes,
        )
        if buffer.space.storage is StorageClass.LINEAR:
            linear += held
        else:
            rest += held
    return MemoryByKind(linear, rest, state.staging.nbytes)
