"""Bytes of weights, gradients and optimizer state per rank, from the configuration, before anything is built."""

from __future__ import annotations

from ..config.optimizer import OptimizerConfig
from ..config.schema import Config, PrecisionConfig
from ..data import tokenizer
from ..dtypes import GRAD_BLOCK, STATE_BLOCK, StorageDtype
from ..models.registry import architecture_of
from ..optimizer.hyperparameters import OptimizerSettings
from ..optimizer.rules.rule import UpdateRule, all_states, build_rule
from ..reporting.memory_report import MemoryByKind, StorageBytes
from ..sharding.partition import PLACE_BYTES, StorageClass
from ..sharding.storage import ModelStorage
from ..storage import StateSpec
from ..update_rules import rule_of_space

#: GPT-2's, for a model whose tokenizer gives the size.
_GPT2_VOCAB_SIZE = 50257


def vocab_size(config: Config) -> int:
    """Tokens of the vocabulary: the configuration's, or GPT-2's if the tokenizer gives it."""
    return _GPT2_VOCAB_SIZE if config.model.vocab_size is None else config.model.vocab_size


def padded_vocab_size(config: Config) -> int:
    """Rows of the embedding."""
    tp = config.parallel.tensor_model_parallel_size
    return tokenizer.padded_vocab_size(vocab_size(config), config.model.make_vocab_size_divisible_by, tp)


def model_storage(precision: PrecisionConfig, num_micro_batches: int, *, is_trained: bool = True) -> ModelStorage:
    """Storage formats of a model.

    Args:
        num_micro_batches: gradients that each parameter receives per step.
        is_trained: False for --skip-train.
    """
    accumulator = precision.grad_accumulation_dtype
    return ModelStorage(
        precision.formats,
        has_fp8_layers=precision.is_fp8,
        num_micro_batches=num_micro_batches,
        adds_locally=precision.grad_accumulation == "local",
        accumulator=None if accumulator is None else StorageDtype(accumulator),
        releases_gradients=precision.release_gradients,
        is_trained=is_trained,
    )


def optimizer_settings(config: OptimizerConfig) -> OptimizerSettings:
    """The optimizer's settings."""
    return OptimizerSettings(
        rule=config.optimizer,
        options=config.rule_options,
        lr=config.lr,
        min_lr=config.min_lr,
        decoupled_lr=config.decoupled_lr,
        decoupled_min_lr=config.decoupled_min_lr,
        weight_decay=config.weight_decay,
        clip_grad=config.clip_grad,
    )


def rule_of(config: Config, *, is_linear: bool) -> UpdateRule:
    """How the run updates weights of linear layers, or its other parameters."""
    name = rule_of_space(config.optimizer.optimizer, has_matrices=is_linear)
    return build_rule(name, optimizer_settings(config.optimizer).all_options)


def states_of(config: Config) -> tuple[StateSpec, ...]:
    """What the run's optimizer stores, of any parameter."""
    return all_states(config.optimizer.optimizer, optimizer_settings(config.optimizer).all_options)


def predict_memory(config: Config, padded_vocab_size: int, *, world_size: int, stage: int = 0) -> MemoryByKind:
    """Predicted memory of a rank of pipeline stage `stage`, without padding and wire buffers."""
    is_trained = not config.training.skip_train
    stored = model_storage(config.precision, config.num_micro_batches(world_size), is_trained=is_trained)
    linear = rest = StorageBytes.none(states_of(config))
    for has_matrices, replicas in replicas_by_kind(config, world_size).items():
        for is_linear in (True, False):
            rule = rule_of(config, is_linear=is_linear)
            counts = parameters_by_class(
                config, padded_vocab_size, stage=stage, has_matrices=has_matrices, is_linear=is_linear
            )
            for storage, count in counts.items():
                held = _predict(storage, count, stored, rule, replicas)
                if storage is StorageClass.LINEAR:
                    linear += held
                else:
                    rest += held
    return MemoryByKind(linear, rest)


def replicas_by_kind(config: Config, world_size: int) -> dict[bool, int]:
    """Whether parameters hold several matrices (`Parameter.matrices`) → ranks that hold the same ones, for what the
    model has of both."""
    kinds = {row.matrices is not None for row in architecture_of(config.model).parameters(config.model, 0)}
    return {kind: config.num_replicas(world_size, has_matrices=kind) for kind in sorted(kinds, reverse=True)}


def parameters_by_class(
    config: Config,
    padded_vocab_size: int,
    *,
    stage: int | None = None,
    has_matrices: bool | None = None,
    is_linear: bool | None = None,
) -> dict[StorageClass, int]:
    """Parameters by the way they are stored: of a rank of pipeline stage `stage`, or of the whole model (None).

    Linear layers outside FP8 are stored as matrices.

    Args:
        has_matrices: those that hold several matrices, or the others; None: all.
        is_linear: weights of linear layers, or the others; None: all.
    """
    model, tp, holders, layers = config.model, 1, 1, list(range(config.model.num_layers))
    ends = {"is_first": True, "is_last": True}
    if stage is not None:
        parallel, layers = config.parallel, config.layers_of_stage(stage)
        tp, holders = parallel.tensor_model_parallel_size, parallel.matrix_holders
        ends = {"is_first": stage == 0, "is_last": stage == config.parallel.pipeline_model_parallel_size - 1}
    counts = {StorageClass.LINEAR: 0, StorageClass.MATRIX: 0, StorageClass.VECTOR: 0}
    for row in architecture_of(model).parameters(model, padded_vocab_size):
        has_several = row.matrices is not None
        if row.is_buffer or has_matrices is (not has_several) or is_linear is (not row.is_linear):
            continue
        numel, copies = row.numel_of_rank(tp, holders), row.copies(layers, **ends)
        in_fp8 = sum(map(config.is_fp8_layer, row.layers_of(layers))) if row.is_linear else 0
        counts[StorageClass.LINEAR] += in_fp8 * numel
        is_matrix = len(row.shape) - has_several > 1
        counts[StorageClass.MATRIX if is_matrix else StorageClass.VECTOR] += (copies - in_fp8) * numel
    return counts


def largest_linear(config: Config, *, has_matrices: bool) -> int:
    """Elements of the largest linear weight that a rank holds, of those with several matrices, or of the others."""
    parallel = config.parallel
    sizes = (parallel.tensor_model_parallel_size, parallel.matrix_holders)
    rows = [row for row in architecture_of(config.model).parameters(config.model, 0) if row.is_linear]
    return max((row.numel_of_rank(*sizes) for row in rows if (row.matrices is not None) is has_matrices), default=0)


def predict_checkpoint_bytes(config: Config, padded_vocab_size: int) -> int:
    """Predicted bytes of the tensors of one checkpoint, of all ranks together."""
    stored, in_fp32 = model_storage(config.precision, num_micro_batches=1), config.checkpoint.ckpt_state_dtype == "fp32"
    total = 0
    for is_linear in (True, False):
        rule = rule_of(config, is_linear=is_linear)
        for storage, count in parameters_by_class(config, padded_vocab_size, is_linear=is_linear).items():
            formats = stored.of_state(storage)
            master = formats.master_weight or formats.weight
            dtypes = [master, *(rule.dtypes(formats) if config.checkpoint.save_optim else ())]
            if in_fp32:
                dtypes = [StorageDtype.FP32] * len(dtypes)
            for dtype in dtypes:
                total += count * dtype.itemsize + (4 * count // STATE_BLOCK if dtype.is_scaled else 0)
            if master is StorageDtype.SPLIT and not in_fp32:
                total += count * formats.weight.itemsize
    return total


def _predict(storage: StorageClass, count: int, stored: ModelStorage, rule: UpdateRule, replicas: int) -> StorageBytes:
    formats, grads = stored.of_state(storage), stored.of_grads(storage)
    is_own_master = formats.master_weight is None
    master = formats.master_weight or formats.weight
    gradients = [] if replicas == 1 else [(grads.shard, count // replicas)]
    if replicas == 1 or grads.adds_locally:
        gradients.append((grads.local, count))
    if grads.is_released or not stored.is_trained:
        gradients = []
    rounds = any(dtype is not StorageDtype.FP32 for dtype in (*rule.dtypes(formats), master))
    num_updated = count // replicas if stored.is_trained else 0
    state = [*((dtype, num_updated) for dtype in rule.dtypes(formats)), (master, count // replicas)]
    if is_own_master and replicas > 1:
        state.append((master, count))  # the rank holds scales of all replicas' weights
    return StorageBytes(
        num_params=count,
        weights=count * formats.weight.itemsize,
        gradients=sum(dtype.itemsize * n for dtype, n in gradients),
        master_weights=0 if is_own_master and replicas == 1 else master.itemsize * (count // replicas),
        states={spec.name: spec.dtype(formats).itemsize * num_updated for spec in rule.states},
        scales=sum(4 * n // STATE_BLOCK for dtype, n in state if dtype.is_scaled)
        + sum(4 * n // GRAD_BLOCK for dtype, n in gradients if dtype is StorageDtype.FP8)
        + (PLACE_BYTES * (count // replicas) // storage.alignment if rounds else 0),
    )
