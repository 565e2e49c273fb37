"""Peak memory of a rank, from the configuration, before anything is built.

The peak comes at the start of a backward, when all activations and the logits exist, or in the backward of a layer, if
that holds more than the logits. What a layer holds its architecture says; the formulas here follow `nn.lm_head` and
`nn.offload`. They count neither the CUDA context nor fragmentation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..config.schema import Config
from ..dtypes import StorageDtype
from ..models.registry import architecture_of
from ..sharding.partition import StorageClass
from .memory import largest_linear, model_storage, parameters_by_class, predict_memory, replicas_by_kind
from .wire import message_buffer_bytes

#: Bytes of an element of the 16-bit types.
_HALF = 2
#: Buckets in flight, a send and a receive buffer each (`sharding.staging`).
_WIRE_BUFFERS = 2 * 2
#: About how many vocabulary columns one part of the FP8 head has (`nn.lm_head`).
_HEAD_PART_COLUMNS = 16384


@dataclass(frozen=True)
class PeakBytes:
    """Predicted bytes of a rank at its peak.

    Attributes:
        state: weights, gradients, optimizer state and their scales.
        activations: of all micro-batches in flight, on the device. If the peak is in a layer's backward, with that of
            layers on their way back and of a layer that is computed again.
        logits: of the last stage, with what its backward needs at once; 0 if a layer's backward holds more.
        backward: what a layer's backward makes; 0 if the peak is at the logits.
        wire_buffers: send and receive buffers, of gradients and of messages between stages.
        transposes: transposed weights that stay over the micro-batches of a step.
        recording: what a recorded step's own memory does not serve: a shard's new weights, and validation.
        tables: cosines and sines of RoPE, for the rank's part of a sequence.
    """

    state: int
    activations: int
    logits: int
    backward: int
    wire_buffers: int
    transposes: int
    recording: int
    tables: int

    @property
    def total(self) -> int:
        """All kinds together."""
        return sum(vars(self).values())


def predict_peak(
    config: Config, padded_vocab_size: int, *, world_size: int, stage: int = 0, records: bool = False
) -> PeakBytes:
    """Predicted peak of a rank of pipeline stage `stage`.

    Args:
        records: steps are recorded as a CUDA graph. The new weights of a rank's shard then have memory of their own,
            and so has validation (`predict_validation_bytes`).
    """
    replicas, architecture = config.num_replicas(world_size), architecture_of(config.model)
    state = predict_memory(config, padded_vocab_size, world_size=world_size, stage=stage)
    stored = model_storage(config.precision, config.num_micro_batches(world_size))
    by_class = parameters_by_class(config, padded_vocab_size, stage=stage)
    layers = config.layers_of_stage(stage)
    kept = min(config.precision.keep_fp8_transpose_cache, len(layers))
    gathered = sum(count * stored.of_state(storage).weight.itemsize for storage, count in by_class.items())
    new_weights = gathered // replicas if replicas > 1 else 0
    staying = slice(config.training.cpu_offloading_num_layers, None)
    num_micro_batches = config.num_micro_batches(world_size)
    activations = _held(config, staying, stage=stage, num_micro_batches=num_micro_batches)
    leaving, arriving = _on_its_way(config, stage=stage)
    in_backward = arriving + _recomputed(config, stage=stage)
    backward = max((architecture.backward_bytes(config, layer) for layer in layers), default=0)
    is_last = stage == config.parallel.pipeline_model_parallel_size - 1
    logits = _logits(config, padded_vocab_size) if is_last else 0
    moments = [(leaving, logits, 0), (in_backward, 0, backward)]
    beside = architecture.forward_beside(config) if num_micro_batches > 1 else None
    if beside is not None:  # backward begins; the forward ends, which is ahead by layers of what backward frees
        moments += [(beside.layer_bytes, 0, backward), (round(activations * beside.ahead), logits, backward)]
    more, logits, backward = max(moments, key=sum)
    return PeakBytes(
        state=state.linear.total + state.rest.total,
        activations=activations + more,
        logits=logits,
        backward=backward,
        wire_buffers=_gradient_buffers(config, padded_vocab_size, world_size=world_size, stage=stage)
        + message_buffer_bytes(config, stage=stage),
        transposes=kept * state.linear.num_params // max(len(layers), 1),
        recording=new_weights + predict_validation_bytes(config, padded_vocab_size, stage=stage) if records else 0,
        tables=architecture.table_bytes(config),
    )


def _gradient_buffers(config: Config, padded_vocab_size: int, *, world_size: int, stage: int) -> int:
    """Bytes of the buffers for gradients, of each dtype that is sent."""
    stored = model_storage(config.precision, config.num_micro_batches(world_size))
    numel_of: dict[StorageDtype, int] = {}
    for has_matrices, replicas in replicas_by_kind(config, world_size).items():
        by_class = parameters_by_class(config, padded_vocab_size, stage=stage, has_matrices=has_matrices)
        for storage, count in by_class.items() if replicas > 1 else ():
            dtype, bucket = stored.of_grads(storage).wire, config.parallel.ddp_bucket_size
            if storage is StorageClass.LINEAR and config.precision.weight_grad_scaling == "delayed":
                bucket = max(bucket, largest_linear(config, has_matrices=has_matrices))  # no weight lies in two buckets
            numel_of[dtype] = max(numel_of.get(dtype, 0), min(count, bucket))
    return sum(_WIRE_BUFFERS * dtype.itemsize * numel for dtype, numel in numel_of.items())


def predict_validation_bytes(config: Config, padded_vocab_size: int, *, stage: int = 0) -> int:
    """Predicted bytes that a micro-batch of validation holds at most beside the state; 0 for a run without validation.

    They are those of one layer, or of the LM head (`nn.lm_head`).
    """
    if not config.training.reads_validation_data:
        return 0
    parallel, tokens, layers = config.parallel, config.tokens_per_micro_batch, config.layers_of_stage(stage)
    stages, stream = parallel.pipeline_model_parallel_size, _HALF * tokens * config.model.hidden_size
    passing = 0 if stages == 1 else 2 * stream  # of the micro-batches that come and go
    forward = max((architecture_of(config.model).forward_bytes(config, layer) for layer in layers), default=0)
    if stage < stages - 1:
        return passing + forward
    vocab = padded_vocab_size // parallel.tensor_model_parallel_size
    if config.has_fp8_lm_head:
        head = 4 * stream + _HALF * tokens * (vocab // _head_parts(vocab))
    else:
        head = 2 * stream + _HALF * _tokens_of_logits(config) * vocab
    return passing + max(forward, head)


def _head_parts(vocab: int) -> int:
    """Parts of the FP8 head, for `vocab` columns of a rank."""
    return max(1, round(vocab / _HEAD_PART_COLUMNS))


def _tokens_of_logits(config: Config) -> int:
    """Tokens of a micro-batch whose logits exist at a time."""
    tokens, chunk = config.tokens_per_micro_batch, config.training.loss_chunk_size
    return tokens if chunk is None else min(tokens, chunk * config.training.micro_batch_size)


def predict_host_bytes(config: Config, *, world_size: int, stage: int = 0) -> int:
    """Host memory of a rank of pipeline stage `stage` for the activations that leave it, without pages' ends."""
    leaving = slice(config.training.cpu_offloading_num_layers)
    return _held(config, leaving, stage=stage, num_micro_batches=config.num_micro_batches(world_size))


def _held(config: Config, layers: slice, *, stage: int, num_micro_batches: int) -> int:
    """Bytes of the activations of all micro-batches in flight, of these layers of each of a stage's model chunks."""
    held = [sum(_kept_by_layer(config, chunk)[layers]) for chunk in config.pipeline_layout.chunks[stage]]
    return round(config.tokens_per_micro_batch * _held_at_once(config, held, stage, num_micro_batches))


def _on_its_way(config: Config, *, stage: int) -> tuple[int, int]:
    """Bytes of layers on their way between device and host: at the logits, and in a layer's backward.

    At the logits the last layer has not left, if it leaves at all. In backward two layers are on the device, one that
    runs and one that arrives; the later ones are gone.
    """
    count = config.training.cpu_offloading_num_layers
    leaving = arriving = 0.0
    for chunk in config.pipeline_layout.chunks[stage]:
        kept = _kept_by_layer(config, chunk)
        largest, staying = max(kept[:count], default=0.0), sum(1 for layer in kept[count:] if layer)
        leaving = max(leaving, largest * max(0, 1 - staying))
        arriving = max(arriving, largest * max(0, 2 - staying))
    tokens = config.tokens_per_micro_batch
    return round(tokens * leaving), round(tokens * arriving)


def _recomputed(config: Config, *, stage: int) -> int:
    """Bytes that exist beside a stage's activations while a layer is computed again."""
    chunks = config.pipeline_layout.chunks[stage]
    return round(config.tokens_per_micro_batch * max(_recomputed_per_token(config, chunk) for chunk in chunks))


def _kept_by_layer(config: Config, layers: Sequence[int]) -> list[float]:
    """Bytes that each layer of a model chunk keeps of each token from its forward to its backward, on either memory.

    Layers that are recomputed together keep the input of the first; it counts for the last.
    """
    training, parallel = config.training, config.parallel
    per_layer = [architecture_of(config.model).kept_bytes(config, layer) for layer in layers]
    if training.recompute_granularity != "full":
        return per_layer
    stream = _HALF * config.model.hidden_size / parallel.sequence_shares
    count = training.recompute_num_layers or 1
    if training.recompute_method == "block":
        recomputed = min(count, len(layers))
        return [stream] * recomputed + per_layer[recomputed:]
    return [stream if index % count == count - 1 or index == len(layers) - 1 else 0.0 for index in range(len(layers))]


def _recomputed_per_token(config: Config, layers: Sequence[int]) -> float:
    """Bytes that exist of each token while layers of a model chunk are computed again for their backward."""
    training = config.training
    if not layers:
        return 0.0
    architecture = architecture_of(config.model)
    if training.recompute_granularity != "full":
        return max(architecture.recomputed_bytes(config, layer) for layer in layers)
    most = max(architecture.kept_bytes(config, layer) for layer in layers)
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
    """Bytes at the peak of the LM head's backward, from the docstrings of `nn.lm_head` and `nn.chunked_loss`.

    The input of the final norm is among them.
    """
    tp, hidden = config.parallel.tensor_model_parallel_size, config.model.hidden_size
    tokens, vocab = config.tokens_per_micro_batch, padded_vocab_size // tp
    chunk, at_once = config.training.loss_chunk_size, _tokens_of_logits(config)
    logits = 2 * at_once * vocab
    # Over chunks, the gradients of the weight are added in FP32, and that of the input is whole.
    sums = 0 if chunk is None else 4 * hidden * vocab + 2 * tokens * hidden
    sums += 2 * tokens * hidden // config.parallel.sequence_shares
    if config.has_fp8_lm_head:
        # The weight's gradient comes when the logits are gone, from their gradient in a byte.
        in_parts = logits + logits // _head_parts(vocab)
        return max(in_parts, logits // 2 + 2 * hidden * vocab) + sums
    return logits + 2 * hidden * vocab + 2 * at_once * hidden + sums
