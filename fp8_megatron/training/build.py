"""Builds what a run trains: model chunks, data parallelism, optimizer and schedule, with weights in place.

Only this module translates a configuration for the core. The core takes a recipe, storage formats, an exchange between
replicas and the optimizer's settings; it does not know `Config`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch

from ..assembly import parts_of
from ..checkpoint.run_state import Resumable
from ..config.schema import Config, PrecisionConfig
from ..dtypes import StorageDtype
from ..mcore.data_parallel import FP8DataParallel, finalize_model_grads
from ..mcore.gpt import ModelChunk, build_model
from ..mcore.initialization import initial_values, named_parameters_of_model
from ..mcore.parts import Parts
from ..mcore.topology import Topology, is_embedding_or_output, is_linear_weight, row_split_of
from ..models.keys import EMBEDDING_KEYS
from ..optimizer.distributed_optimizer import FP8DistributedOptimizer
from ..optimizer.loss_scale import LossScale
from ..planning.memory import model_storage, optimizer_settings
from ..quantization.amax_history import AmaxHistory
from ..quantization.cast_report import SlotNames
from ..quantization.recipe import Recipe
from ..reporting.layer_report import LayerTable
from ..reporting.memory_report import MemoryByKind, StorageBytes
from ..sharding.data_parallel import DataParallelModule, Exchange
from ..sharding.partition import StorageClass, storage_class
from ..sharding.staging import StagingPools
from ..update_rules import RULES, Rate, width_power
from ..watch.replica_hash import ReplicaCheck
from .cast_sampling import CastSampler
from .schedule import RunSchedule


@dataclass(frozen=True)
class TrainingState:
    """Everything that one rank trains: model chunks, data parallelism, optimizer and schedule."""

    config: Config
    topology: Topology
    device: torch.device
    model: list[FP8DataParallel]
    staging: StagingPools
    histories: list[AmaxHistory | None]
    optimizer: FP8DistributedOptimizer
    schedule: RunSchedule
    num_micro_batches: int
    """Micro-batches of a step; the most of them if the batch grows."""
    padded_vocab_size: int
    sampler: CastSampler | None = None
    """Measures single casts on sampled steps; None without --fp8-health-interval or FP8 layers."""
    layer_table: LayerTable | None = None
    """How what a part of the layers reports travels to the host; None: no part does."""

    @property
    def samples_per_micro_batch(self) -> int:
        """Samples of one micro-batch of all data-parallel ranks."""
        return self.config.training.micro_batch_size * self.topology.dp.size()

    def resumable(self, unpadded_vocab_size: int) -> Resumable:
        """What a checkpoint saves and restores."""
        return Resumable(
            self.config,
            self.optimizer,
            self.histories,
            self.topology,
            self.device,
            vocab_size=unpadded_vocab_size,
            padded_vocab_size=self.padded_vocab_size,
        )


@dataclass(frozen=True)
class TrainableModel:
    """This rank's model chunks, wrapped for data parallelism, and the optimizer that updates their weights."""

    chunks: list[ModelChunk]
    model: list[FP8DataParallel]
    staging: StagingPools
    optimizer: FP8DistributedOptimizer
    parts: Parts


def build_trainable_model(
    config: Config,
    padded_vocab_size: int,
    topology: Topology,
    device: torch.device,
    num_micro_batches: int,
    *,
    unpadded_vocab_size: int | None = None,
) -> TrainableModel:
    """Build and initialise the model and its optimizer on this rank, inside `runtime`.

    Args:
        padded_vocab_size: rows of the embedding over all tensor-parallel ranks.
        num_micro_batches: gradients each parameter will receive per step.
        unpadded_vocab_size: see `build_model`.
    """
    new_recipe = partial(build_recipe, config.precision, has_probes=config.logging.fp8_health_interval > 0)
    parts = parts_of(config)
    chunks = build_model(
        config, padded_vocab_size, topology, device, new_recipe, parts, unpadded_vocab_size=unpadded_vocab_size
    )
    is_trained = not config.training.skip_train
    storage = model_storage(config.precision, num_micro_batches, is_trained=is_trained)
    staging = StagingPools()
    named = [named_parameters_of_model(chunk.module) for chunk in chunks]
    replicate = partial(
        DataParallelModule,
        sharing_of=topology.sharing_of,
        region_of=topology.region_of,
        rate_of=partial(rate_of, config),
        is_matrix=is_linear_weight if RULES[config.optimizer.optimizer].rest is not None else None,
        row_split_of=row_split_of if config.optimizer.muon_split_qkv else None,
        storage=storage,
        exchange=build_exchange(config),
        staging=staging,
    )
    replicated = [
        replicate(chunk.module, params, on_reset=[kept.forget for kept in chunk.kept_transposes()])
        for chunk, params in zip(chunks, named, strict=True)
    ]
    model = [FP8DataParallel(module.module.config, module) for module in replicated]
    chunks[0].module.config.finalize_model_grads_func = partial(finalize_model_grads, then=parts.after_gradients)
    optimizer = FP8DistributedOptimizer(
        replicated,
        optimizer_settings(config.optimizer),
        storage,
        world=topology.world,
        device=device,
        loss_scale=build_loss_scale(config, device),
        histories=[chunk.recipe.history for chunk in chunks if chunk.recipe.history is not None],
    )
    if optimizer.loss_scale is not None:
        for chunk in chunks:
            chunk.module.config.grad_scale_func = optimizer.loss_scale.scale_loss
    draw = partial(
        initial_values,
        std=config.model.init_method_std,
        num_layers=config.model.num_layers,
        hidden_std=config.model.hidden_init_std,
        seed=config.training.seed,
        region_of=topology.region_of,
        vocab_size=unpadded_vocab_size,
    )
    optimizer.load_weights(chain.from_iterable(map(draw, named)))
    return TrainableModel(chunks, model, staging, optimizer, parts)


def build_training_state(
    config: Config,
    padded_vocab_size: int,
    topology: Topology,
    device: torch.device,
    *,
    unpadded_vocab_size: int | None = None,
) -> TrainingState:
    """Build and initialise everything on this rank.

    Args:
        padded_vocab_size: rows of the embedding over all tensor-parallel ranks.
        unpadded_vocab_size: see `build_model`.
    """
    num_micro_batches = config.num_micro_batches(topology.world_size)
    built = build_trainable_model(
        config, padded_vocab_size, topology, device, num_micro_batches, unpadded_vocab_size=unpadded_vocab_size
    )
    sampler: CastSampler | None = None
    if config.precision.is_fp8 and config.logging.fp8_health_interval > 0:
        modules = [chunk.module for chunk in built.chunks]
        sampler = CastSampler(modules, built.optimizer.buffers, device, world_size=topology.world_size)
    return TrainingState(
        config=config,
        topology=topology,
        device=device,
        model=built.model,
        staging=built.staging,
        histories=[chunk.recipe.history for chunk in built.chunks],
        optimizer=built.optimizer,
        schedule=RunSchedule(built.optimizer, config, topology.world_size),
        num_micro_batches=num_micro_batches,
        padded_vocab_size=padded_vocab_size,
        sampler=sampler,
        layer_table=None if built.parts.layer_table is None else built.parts.layer_table(topology),
    )


def build_recipe(precision: PrecisionConfig, *, has_probes: bool = False) -> Recipe:
    """The scaling recipe of one model chunk. With delayed scaling, each chunk has its own amax history.

    Args:
        has_probes: whether casts can be measured.
    """
    history = None
    if precision.is_fp8 and precision.fp8_recipe == "delayed":
        history = AmaxHistory(
            precision.fp8_amax_history_len,
            precision.fp8_amax_compute_algo,
            power_of_two=precision.fp8_power_of_two_scales,
            margin=precision.fp8_margin,
        )
    return Recipe(
        precision.fp8_recipe,
        precision.fp8_power_of_two_scales,
        history,
        delays_weight_grads=precision.weight_grad_scaling == "delayed",
        has_probes=has_probes,
    )


def build_exchange(config: Config) -> Exchange:
    """How replicas exchange gradients and weights."""
    parallel = config.parallel
    return Exchange(
        bucket_numel=parallel.ddp_bucket_size,
        whole_linears=config.precision.weight_grad_scaling == "delayed",
        reduction=parallel.fp8_grad_reduce,
        wire_in_node=StorageDtype(parallel.fp8_wire_intra),
        overlaps_reduce=parallel.overlap_grad_reduce,
        overlaps_gather=parallel.overlap_param_gather,
    )


def rate_of(config: Config, name: str, param: torch.nn.Parameter) -> Rate:
    """The learning rate of a parameter with the name `name` in the whole model: --decoupled-lr, or muP's."""
    if config.optimizer.decoupled_lr is not None and is_embedding_or_output(param):
        return Rate(is_decoupled=True)
    is_hidden = storage_class(param) is not StorageClass.VECTOR and name not in EMBEDDING_KEYS
    is_linear = is_linear_weight(name, param)
    power = width_power(config.optimizer.optimizer, is_linear=is_linear, is_hidden=is_hidden)
    return Rate(lr_mult=config.model.width_mult**power)


def build_loss_scale(config: Config, device: torch.device) -> LossScale | None:
    """The run's loss scale: constant with --loss-scale, otherwise dynamic. None unless gradients are FP16."""
    settings = config.optimizer
    if config.precision.precision != "fp16":
        return None
    if settings.loss_scale is not None:
        return LossScale(settings.loss_scale, device, window=None)
    return LossScale(
        settings.initial_loss_scale,
        device,
        window=settings.loss_scale_window,
        hysteresis=settings.hysteresis,
        minimum=settings.min_loss_scale,
    )


def slot_names_of_ranks(state: TrainingState) -> SlotNames:
    """The names of every rank's delayed scales, for messages. Collective over the pipeline's ranks.

    Ranks of a stage have the same layers.
    """
    topology = state.topology
    own = [[] if history is None else history.suspects for history in state.histories]
    stages = [own] * topology.pp.size()
    if topology.pp.size() > 1:
        torch.distributed.all_gather_object(stages, own, group=topology.pp)
    parallel = state.config.parallel
    return lambda rank, chunk: stages[parallel.stage_of(rank, topology.world_size)][chunk]


def build_replica_check(state: TrainingState) -> ReplicaCheck | None:
    """The comparison of replicas, with --check-weight-hash-across-dp-replicas-interval. Collective."""
    topology = state.topology
    if state.config.training.check_weight_hash_across_dp_replicas_interval is None or topology.world is None:
        return None
    return ReplicaCheck(
        state.optimizer,
        state.histories,
        stage_group=topology.stage_group,
        world=topology.world,
        device=state.device,
    )


def measured_storage(state: TrainingState) -> MemoryByKind:
    """Bytes of the tensors that hold this rank's weights, gradients and optimizer state."""
    linear = rest = StorageBytes.none(state.optimizer.rule_states)
    for buffer, space in zip(state.optimizer.buffers, state.optimizer.states, strict=True):
        counts = space.byte_counts()
        held = StorageBytes(
            num_params=buffer.space.num_params,
            weights=counts["weight"],
            gradients=buffer.nbytes,
            master_weights=counts["master_weight"],
            states={spec.name: counts[spec.name] for spec in space.rule.states},
            scales=counts["scales"] + buffer.scale_bytes,
        )
        if buffer.space.storage is StorageClass.LINEAR:
            linear += held
        else:
            rest += held
    return MemoryByKind(linear, rest, state.staging.nbytes)
