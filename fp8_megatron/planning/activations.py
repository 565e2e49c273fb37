"""Peak memory of a rank, from the configuration, before anything is built.

The peak comes at the start of a backward, when all activations and the logits exist. The formulas follow what the
layers keep (`nn.qkv`, `nn.mlp`, `nn.lm_head`). They count neither the CUDA context nor fragmentation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..config.schema import Config
from ..formats import StorageDtype
from .memory import parameters_by_class, predict_memory
from .storage import model_storage

#: Bytes of an element of the 16-bit types.
_HALF = 2
#: Buckets in flight, a send and a receive buffer each (`sharding.staging`).
_WIRE_BUFFERS = 2 * 2
#: About how many vocabulary columns one part of the FP8 head has (`nn.lm_head`).
_HEAD_PART_COLUMNS = 16384
#: FP32 statistics that backward needs of each token: mean and inverse deviation of two norms.
_NORM_STATISTICS_BYTES = 2 * 2 * 4


@dataclass(frozen=True)
class PeakBytes:
    """Predicted bytes of a rank at its peak.

    Attributes:
        state: weights, gradients, optimizer state and their scales.
        activations: of all micro-batches in flight.
        logits: of the last stage, with what its backward needs at once.
        wire_buffers: send and receive buffers of gradients.
        transposes: transposed weights that stay over the micro-batches of a step.
        recording: what a CUDA graph holds beside the activations.
    """

    state: int
    activations: int
    logits: int
    wire_buffers: int
    transposes: int
    recording: int

    @property
    def total(self) -> int:
        """All kinds together."""
        return self.state + self.activations + self.logits + self.wire_buffers + self.transposes + self.recording


def predict_peak(
    config: Config, padded_vocab_size: int, *, world_size: int, stage: int = 0, records: bool = False
) -> PeakBytes:
    """Predicted peak of a rank of pipeline stage `stage`.

    Args:
        records: steps are recorded as a CUDA graph. The new weights of a rank's shard then have memory of their own.
    """
    replicas = config.num_replicas(world_size)
    state = predict_memory(config, padded_vocab_size, world_size=world_size, stage=stage)
    stored = model_storage(config.precision, config.num_micro_batches(world_size))
    by_class = parameters_by_class(config, padded_vocab_size, stage=stage)
    wire = 0
    if replicas > 1:
        numel_of: dict[StorageDtype, int] = {}
        for storage, count in by_class.items():
            dtype = stored.of_grads(storage, replicas).wire
            numel_of[dtype] = max(numel_of.get(dtype, 0), min(count, config.parallel.ddp_bucket_size))
        wire = sum(_WIRE_BUFFERS * dtype.itemsize * numel for dtype, numel in numel_of.items())
    layers = config.layers_of_stage(stage)
    kept = min(config.precision.keep_fp8_transpose_cache, len(layers))
    gathered = sum(count * stored.of_state(storage).weight.itemsize for storage, count in by_class.items())
    is_last = stage == config.parallel.pipeline_model_parallel_size - 1
    return PeakBytes(
        state=state.linear.total + state.rest.total,
        activations=_activations(config, stage=stage, num_micro_batches=config.num_micro_batches(world_size)),
        logits=_logits(config, padded_vocab_size) if is_last else 0,
        wire_buffers=wire,
        transposes=kept * state.linear.num_params // max(len(layers), 1),
        recording=gathered // replicas if records and replicas > 1 else 0,
    )


def layer_bytes_per_token(config: Config, *, is_fp8: bool) -> float:
    """Bytes that one layer keeps of each token of the micro-batch for its backward, on one rank.

    An FP8 layer keeps the two residual streams, queries, keys, values, attention's output and the MLP's input to its
    activation in 16 bits. Norms of query and key keep their inputs, RoPE nothing. A 16-bit layer also keeps the outputs
    of both norms and of the activation. What --recompute-modules names is left out; attention's output stays, as the
    projection needs it. Transformer Engine's layers keep FP8 copies of some of these; they are counted as a 16-bit
    layer, which is an upper bound.
    """
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    recomputed = config.training.recomputed_modules
    queries = model.num_attention_heads * model.head_dim
    streams = 2 * model.hidden_size * (1 if is_fp8 else 2)
    attention = 2 * (queries + model.query_groups * model.head_dim)
    # FP8 attention keeps all of them in one byte each.
    attention -= attention // 2 if is_fp8 and config.precision.fp8_dot_product_attention else 0
    split = attention + (0 if "mlp" in recomputed else _mlp_columns(config, is_fp8=is_fp8))
    split += (queries + model.query_groups * model.head_dim) if model.qk_layernorm else 0
    masks = 2 * model.hidden_size if model.hidden_dropout > 0 else 0
    over_sequence = tp if config.parallel.sequence_parallel else 1
    log_sums = 4 * model.num_attention_heads / tp
    return (_HALF * streams + masks + _NORM_STATISTICS_BYTES) / over_sequence + _HALF * split / tp + log_sums


def _mlp_columns(config: Config, *, is_fp8: bool) -> int:
    """Columns of the MLP's input to its activation and, in a 16-bit layer, of its output."""
    model = config.model
    return model.padded_ffn_hidden_size * ((2 if model.is_gated else 1) + (0 if is_fp8 else 1))


def _activations(config: Config, *, stage: int, num_micro_batches: int) -> int:
    """Bytes of a stage's activations of all micro-batches in flight, with what a recomputed layer needs beside them."""
    chunks = config.pipeline_layout.chunks[stage]
    tokens = config.tokens_per_micro_batch
    held = [_held_per_token(config, chunk) for chunk in chunks]
    recomputed = max(_recomputed_per_token(config, chunk) for chunk in chunks)
    return round(tokens * (_held_at_once(config, held, stage, num_micro_batches) + recomputed))


def _held_per_token(config: Config, layers: Sequence[int]) -> float:
    """Bytes that a model chunk keeps of each token from its forward to its backward."""
    training, parallel = config.training, config.parallel
    per_layer = [layer_bytes_per_token(config, is_fp8=config.is_fp8_layer(layer)) for layer in layers]
    if training.recompute_granularity != "full":
        return sum(per_layer)
    over_sequence = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    stream = _HALF * config.model.hidden_size / over_sequence
    count = training.recompute_num_layers or 1
    if training.recompute_method == "block":
        return min(count, len(layers)) * stream + sum(per_layer[count:])
    return -(-len(layers) // count) * stream


def _recomputed_per_token(config: Config, layers: Sequence[int]) -> float:
    """Bytes that exist of each token while layers of a model chunk are computed again for their backward."""
    training = config.training
    if not layers:
        return 0.0
    if "mlp" in training.recomputed_modules:
        columns = max(_mlp_columns(config, is_fp8=config.is_fp8_layer(layer)) for layer in layers)
        return _HALF * columns / config.parallel.tensor_model_parallel_size
    if training.recompute_granularity != "full":
        return 0.0
    most = max(layer_bytes_per_token(config, is_fp8=config.is_fp8_layer(layer)) for layer in layers)
    return most if training.recompute_method == "block" else min(training.recompute_num_layers or 1, len(layers)) * most


def _held_at_once(config: Config, held: Sequence[float], stage: int, num_micro_batches: int) -> float:
    """The most that a stage holds, if each of its model chunks holds `held` of one micro-batch.

    Under 1F1B a stage is ahead of its backward by as many micro-batches as stages follow it. The interleaved schedule
    (arXiv 2104.04473, section 2.2) takes groups of micro-batches through its chunks, and starts backward later.
    """
    stages, chunks = config.pipeline_layout.num_stages, len(held)
    if not config.pipeline_layout.is_interleaved:
        return held[0] * min(stages - stage, num_micro_batches)
    group = config.parallel.microbatch_group_size_per_virtual_pipeline_stage or stages
    forward = [
        chunk
        for first in range(0, num_micro_batches, group)
        for chunk in range(chunks)
        for _ in range(first, min(first + group, num_micro_batches))
    ]
    warm_up = min(2 * (stages - stage - 1) + (chunks - 1) * group, len(forward))
    now = most = 0.0
    for step, chunk in enumerate(forward):
        now += held[chunk]
        most = max(most, now)
        if step >= warm_up:
            now -= held[chunks - 1 - forward[step - warm_up]]
    return most


def _logits(config: Config, padded_vocab_size: int) -> int:
    """Bytes at the peak of the LM head's backward, from the docstring of `nn.lm_head`."""
    tp, hidden = config.parallel.tensor_model_parallel_size, config.model.hidden_size
    tokens, vocab = config.tokens_per_micro_batch, padded_vocab_size // tp
    logits = 2 * tokens * vocab
    if config.precision.fp8_lm_head:
        return logits + 2 * tokens * vocab // max(1, round(vocab / _HEAD_PART_COLUMNS))
    return logits + 2 * hidden * vocab + 2 * tokens * hidden
