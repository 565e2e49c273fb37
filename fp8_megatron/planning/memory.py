"""Bytes of weights, gradients and optimizer state per rank, from the configuration, before anything is built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..config.schema import Config, ModelConfig
from ..dtypes import GRAD_BLOCK, STATE_BLOCK, StorageDtype
from ..reporting.memory_report import MemoryByKind, StorageBytes
from ..sharding.partition import PLACE_BYTES, StorageClass
from ..sharding.storage import ModelStorage
from .storage import model_storage


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of one model-parallel rank, grouped by their storage when every layer is in FP8."""

    linear: int
    matrix: int
    vector: int


def count_parameters(
    model: ModelConfig,
    padded_vocab_size: int,
    *,
    tensor_parallel_size: int = 1,
    num_layers: int | None = None,
    is_first: bool = True,
    is_last: bool = True,
) -> ParameterCounts:
    """Parameters of one rank of a pipeline stage; by default, of the whole model.

    Args:
        num_layers: of the stage.
        is_first, is_last: whether the stage has the embedding, and the final norm and the head.
        padded_vocab_size: of the whole model, a multiple of `tensor_parallel_size`.
    """
    hidden, ffn, tp = model.hidden_size, model.padded_ffn_hidden_size, tensor_parallel_size
    queries = model.num_attention_heads * model.head_dim
    qkv = queries + 2 * model.query_groups * model.head_dim
    up = 2 * ffn if model.is_gated else ffn
    norm = hidden if model.normalization == "RMSNorm" else 2 * hidden
    has_bias = not model.disable_bias_linear
    linear = (hidden * qkv + queries * hidden + hidden * up + ffn * hidden) // tp
    vector = 2 * norm + has_bias * (qkv // tp + hidden + up // tp + hidden)
    if model.add_qkv_bias and not has_bias:
        vector += qkv // tp
    if model.qk_layernorm:
        vector += 2 * model.head_dim * (1 if model.normalization == "RMSNorm" else 2)
    layers = model.num_layers if num_layers is None else num_layers
    embedding = padded_vocab_size // tp * hidden
    matrix = 0
    if is_first:
        matrix += embedding
        if model.position_embedding_type == "learned_absolute":
            matrix += (model.max_position_embeddings or model.seq_length) * hidden
    if is_last and (model.untie_embeddings_and_output_weights or not is_first):
        matrix += embedding
    return ParameterCounts(layers * linear, matrix, layers * vector + is_last * norm)


def predict_memory(config: Config, padded_vocab_size: int, *, world_size: int, stage: int = 0) -> MemoryByKind:
    """Predicted memory of a rank of pipeline stage `stage`, without padding and wire buffers."""
    replicas = config.num_replicas(world_size)
    is_trained = not config.training.skip_train
    stored = model_storage(config.precision, config.num_micro_batches(world_size), is_trained=is_trained)
    by_class = parameters_by_class(config, padded_vocab_size, stage=stage)
    linear = rest = StorageBytes(0, 0, 0, 0, 0, 0, 0)
    for storage, count in by_class.items():
        held = _predict(storage, count, stored, replicas)
        if storage is StorageClass.LINEAR:
            linear += held
        else:
            rest += held
    return MemoryByKind(linear, rest)


def parameters_by_class(config: Config, padded_vocab_size: int, *, stage: int = 0) -> dict[StorageClass, int]:
    """Parameters of a rank of pipeline stage `stage` by the way they are stored."""
    parallel, layers = config.parallel, config.layers_of_stage(stage)
    counts = count_parameters(
        config.model,
        padded_vocab_size,
        tensor_parallel_size=parallel.tensor_model_parallel_size,
        num_layers=len(layers),
        is_first=stage == 0,
        is_last=stage == parallel.pipeline_model_parallel_size - 1,
    )
    return _by_class(counts, config, layers)


def predict_checkpoint_bytes(config: Config, padded_vocab_size: int) -> int:
    """Predicted bytes of the tensors of one checkpoint, of all ranks together."""
    model = config.model
    counts = count_parameters(model, padded_vocab_size)
    if config.checkpoint.ckpt_state_dtype == "fp32":
        num_kinds = 3 if config.checkpoint.save_optim else 1
        return num_kinds * StorageDtype.FP32.itemsize * (counts.linear + counts.matrix + counts.vector)
    stored = model_storage(config.precision, num_micro_batches=1)
    total = 0
    for storage, count in _by_class(counts, config, range(model.num_layers)).items():
        formats = stored.of_state(storage)
        master = formats.master_weight or formats.weight
        moments = (formats.exp_avg, formats.exp_avg_sq) if config.checkpoint.save_optim else ()
        for dtype in (master, *moments):
            total += count * dtype.itemsize + (4 * count // STATE_BLOCK if dtype.is_scaled else 0)
        if master is StorageDtype.SPLIT:
            total += count * formats.weight.itemsize
    return total


def _by_class(counts: ParameterCounts, config: Config, layers: Sequence[int]) -> dict[StorageClass, int]:
    """Parameters of some layers by the way they are stored: linear layers outside FP8 are stored as matrices."""
    per_layer = counts.linear // max(len(layers), 1)
    in_16_bits = sum(not config.is_fp8_layer(layer) for layer in layers) * per_layer
    return {
        StorageClass.LINEAR: counts.linear - in_16_bits,
        StorageClass.MATRIX: counts.matrix + in_16_bits,
        StorageClass.VECTOR: counts.vector,
    }


def _predict(storage: StorageClass, count: int, stored: ModelStorage, replicas: int) -> StorageBytes:
    formats, grads = stored.of_state(storage), stored.of_grads(storage)
    is_own_master = formats.master_weight is None
    master = formats.master_weight or formats.weight
    gradients = [] if replicas == 1 else [(grads.shard, count // replicas)]
    if replicas == 1 or grads.adds_locally:
        gradients.append((grads.local, count))
    if grads.is_released or not stored.is_trained:
        gradients = []
    rounds = any(dtype is not StorageDtype.FP32 for dtype in (formats.exp_avg, formats.exp_avg_sq, master))
    num_moments = count // replicas if stored.is_trained else 0
    state = [(formats.exp_avg, num_moments), (formats.exp_avg_sq, num_moments), (master, count // replicas)]
    if is_own_master and replicas > 1:
        state.append((master, count))  # the rank holds scales of all replicas' weights
    return StorageBytes(
        num_params=count,
        weights=count * formats.weight.itemsize,
        gradients=sum(dtype.itemsize * n for dtype, n in gradients),
        master_weights=0 if is_own_master and replicas == 1 else master.itemsize * (count // replicas),
        exp_avg=formats.exp_avg.itemsize * num_moments,
        exp_avg_sq=formats.exp_avg_sq.itemsize * num_moments,
        scales=sum(4 * n // STATE_BLOCK for dtype, n in state if dtype.is_scaled)
        + sum(4 * n // GRAD_BLOCK for dtype, n in gradients if dtype is StorageDtype.FP8)
        + (PLACE_BYTES * (count // replicas) // storage.alignment if rounds else 0),
    )
