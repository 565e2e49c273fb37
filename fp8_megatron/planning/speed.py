"""Time of a step, from the configuration and the rates of a GPU.

GEMMs and attention count FLOPs, all other kernels count elements. Communication that fits beside backward is hidden.
The host is taken to be fast enough: a step that waits for it is recorded as a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..activation_functions import GELUS
from ..config.schema import Config
from ..dtypes import StorageDtype
from ..models.architecture import LayerShape
from ..models.registry import architecture_of
from ..optimizer.rules.rule import ElementwiseRule, MatrixRule
from ..reporting.flops import layer_flops, linear_params_per_layer
from ..sharding.partition import StorageClass
from .memory import model_storage, parameters_by_class, rule_of
from .wire import predict_wire_bytes, stage_message_bytes


@dataclass(frozen=True)
class ElementRates:
    """Seconds per element of the kernels between the GEMMs of one layer, forward and backward together.

    Attributes:
        stream: per element of the residual stream: norms, residual adds, casts.
        qkv: per element of queries, keys and values.
        gelu: per element of the MLP's hidden state.
        swiglu: the same with SwiGLU.
    """

    stream: float
    qkv: float
    gelu: float
    swiglu: float


@dataclass(frozen=True)
class GpuRates:
    """What one GPU does; `H200` and `H100` say where each figure comes from.

    Attributes:
        name: of the GPU.
        fp8_gemm_flops, half_gemm_flops: FLOP/s of GEMMs in a training step.
        attention_flops: FLOP/s of causal attention by the width of a head and the tokens of a sequence; forward and
            backward count three forwards.
        fp8_attention_flops: the same in FP8.
        delayed, tensorwise: kernels of FP8 layers by recipe.
        fp8_other: seconds per element of the residual stream of what a profile calls other kernels and copies.
        half_stream: the same of a 16-bit layer, of all kernels but GEMMs and attention.
        loss: seconds per logit.
        received: seconds per element of a gradient shard that a reduction adds.
        copied: bytes/s that a copy reads and writes, for gradients that a rank adds up itself.
        transpose: seconds per element of an FP8 weight.
        fp8_update: seconds per FP8 weight of the optimizer, with its new payload.
        moments_update: the same with 8-bit moments.
        split_update: the same with masters split and 8-bit moments.
        half_update: seconds per other weight.
        node_bytes: bytes/s that a GPU sends to others of its node.
        exchange, nccl_exchange: seconds that tensor parallelism adds per element of the residual stream and layer, by
            its size; with copy engines and over NCCL.
    """

    name: str
    fp8_gemm_flops: float
    half_gemm_flops: float
    attention_flops: dict[tuple[int, int], float]
    fp8_attention_flops: dict[tuple[int, int], float]
    delayed: ElementRates
    tensorwise: ElementRates
    fp8_other: float
    half_stream: float
    loss: float
    received: float
    copied: float
    transpose: float
    fp8_update: float
    moments_update: float
    split_update: float
    half_update: float
    node_bytes: float
    exchange: dict[int, float]
    nccl_exchange: dict[int, float]

    def with_memory(self, name: str, share: float) -> GpuRates:
        """A GPU that differs in its memory, which moves `share` times as many bytes/s: all kernels but GEMMs and
        attention wait for it."""

        def slower(rates: ElementRates) -> ElementRates:
            return ElementRates(**{name: seconds / share for name, seconds in vars(rates).items()})

        names = ["fp8_other", "half_stream", "loss", "received", "transpose"]
        names += ["fp8_update", "moments_update", "split_update", "half_update"]
        return replace(
            self,
            name=name,
            delayed=slower(self.delayed),
            tensorwise=slower(self.tensorwise),
            copied=self.copied * share,
            **{name: getattr(self, name) / share for name in names},
        )


#: Figures of benchmarks/results; `tests/planning/test_speed.py` derives them again. GEMMs, attention and node_bytes are
#: of profiled steps: FP8 and width 128 of GPT-7B (gpt7b_4h200_residual_in_gemm.json), width 64 of GPT-345M
#: (gpt345m_speed_h200.json), longer sequences of Llama (llama7b_2h200.json, llama8b_2h200.json,
#: llama8b_8_layers_32k_h200.json), 16 bits and other kernels of GPT-1.3B (gpt1.3b_h200.json). The remaining kernels are
#: of kernels_h200.json, exchanges of tensor_parallel_7b_h200.json: those of a forward, and as much again for backward.
H200 = GpuRates(
    name="H200",
    fp8_gemm_flops=1322e12,
    half_gemm_flops=750e12,
    attention_flops={
        (64, 1024): 208e12,
        (64, 8192): 299.9e12,
        (128, 2048): 301e12,
        (128, 4096): 349.4e12,
        (128, 8192): 379.4e12,
        (128, 32768): 417.7e12,
    },
    fp8_attention_flops={(128, 8192): 473.1e12, (128, 32768): 509.8e12},
    delayed=ElementRates(stream=11.8e-12, qkv=1.26e-12, gelu=2.72e-12, swiglu=4.44e-12),
    tensorwise=ElementRates(stream=15.7e-12, qkv=2.00e-12, gelu=4.89e-12, swiglu=7.19e-12),
    fp8_other=8.7e-12,
    half_stream=57.3e-12,
    loss=1.59e-12,
    received=2.81e-12,
    copied=4261e9,
    transpose=0.55e-12,
    fp8_update=3.43e-12,
    moments_update=8.42e-12,
    split_update=9.31e-12,
    half_update=7.33e-12,
    node_bytes=224e9,
    exchange={2: 9.8e-12},
    nccl_exchange={2: 33.1e-12, 4: 39.5e-12},
)


#: The same chip with slower memory: 3.35 and 4.8 TB/s by NVIDIA's data sheets.
H100 = H200.with_memory("H100", 3.35 / 4.8)
#: By the word of `plan --gpu`.
RATES = {rates.name.lower(): rates for rates in (H100, H200)}
#: Attention's forward over forward and backward (attention_h200.json).
_ATTENTION_FORWARD = 0.25
#: Kernels of smaller layers reach lower rates than those: GPT-345M's steps of 4 sequences took 15 to 27% longer.
_SMALL_LAYER_FLOPS = 1e12
#: Activation functions of the runs that the rates are from.
_MEASURED_ACTIVATIONS = (*GELUS, "swiglu")


@dataclass(frozen=True)
class StepSeconds:
    """Predicted seconds of one step, by what they go to.

    Attributes:
        gemms: linear layers and the LM head.
        attention: core attention.
        elements: norms, casts, activations, transposes and the loss.
        tensor_parallel: exchanges of activations that GEMMs do not hide.
        context_parallel: exchanges of keys and values, or of heads, all of which count.
        pipeline: waiting for the first and the last micro-batch, and for activations of other stages.
        data_parallel: gradients and weights that compute does not hide.
        optimizer: the update, and sums of gradients that arrive.
    """

    gemms: float
    attention: float
    elements: float
    tensor_parallel: float
    context_parallel: float
    pipeline: float
    data_parallel: float
    optimizer: float

    @property
    def total(self) -> float:
        """All together."""
        return sum(vars(self).values())


def unmeasured(config: Config, *, world_size: int, gpus_per_node: int, rates: GpuRates = H200) -> list[str]:
    """What of a configuration no recorded step time vouches for, in words."""
    parallel, tp, shape = config.parallel, config.parallel.tensor_model_parallel_size, _shape(config)
    exchanges = tp > 1 or parallel.context_parallel_size > 1
    return [
        text
        for text, applies in (
            ("more than one node", world_size > gpus_per_node),
            ("stages before replicas", config.parallel.use_tp_pp_dp_mapping),
            ("tensor or context parallelism on H100", exchanges and rates is H100),
            ("more than two virtual stages on each rank", (config.pipeline_layout.virtual_size or 1) > 2),
            (f"tensor-parallel size {tp}", tp > max(H200.nccl_exchange)),
            (
                f"context parallelism by {parallel.cp_comm_type}",
                parallel.context_parallel_size > 1 and parallel.cp_comm_type == "all_gather",
            ),
            ("tensor parallelism in 16 bits", tp > 1 and not config.precision.is_fp8),
            ("recomputation", config.training.recompute_granularity is not None),
            ("copies to the host, which count as hidden", config.training.cpu_offloading_num_layers > 0),
            ("MLPs over chunks", config.training.mlp_chunks_for_training > 1),
            ("the loss over chunks", config.training.loss_chunk_size is not None),
            (shape.activation.row.title, shape.activation.kind not in _MEASURED_ACTIVATIONS),
            ("a window, of which attention saves nothing here", shape.has_windows),
            ("documents, of which attention saves nothing here", config.data.keeps_documents_apart),
            (
                f"heads of width {shape.head}",
                shape.head not in {width for width, _ in H200.attention_flops},
            ),
        )
        if applies
    ]


def _shape(config: Config) -> LayerShape:
    return architecture_of(config.model).layer_shape(config.model)


def why_no_time(config: Config) -> str | None:
    """Why the time of a configuration's steps is not predicted; None if it is.

    Rates are those of BF16 and FP16, and of FP8 with one scale a tensor.
    """
    precision = config.precision
    unknown = architecture_of(config.model).why_no_rates(config.model)
    if unknown is not None:
        return unknown
    has_rates = precision.fp8_recipe in ("delayed", "tensorwise") if precision.is_fp8 else precision.precision != "te"
    if not has_rates:
        name = f"fp8_recipe({precision.fp8_recipe})" if precision.is_fp8 else precision.precision
        return f"no rates of {name} were measured"
    if isinstance(rule_of(config, is_linear=True), ElementwiseRule | MatrixRule):
        return f"no update of optimizer({config.optimizer.optimizer}) was measured"
    if layer_flops(config) < _SMALL_LAYER_FLOPS:
        return "layers have under 1 TFLOP a micro-batch, and their kernels reach lower rates than were measured"
    return None


def predict_step(
    config: Config,
    padded_vocab_size: int,
    *,
    world_size: int,
    gpus_per_node: int = 8,
    network_bytes: float = 50e9,
    rates: GpuRates = H200,
) -> StepSeconds:
    """Predicted time of one step of the largest batch.

    Args:
        gpus_per_node: tensor-parallel ranks are neighbours, then context-parallel ranks, data-parallel ranks, stages.
        network_bytes: bytes/s that a GPU sends to GPUs of other nodes.

    Raises:
        ValueError: there is a reason for no prediction (`why_no_time`).
    """
    reason = why_no_time(config)
    if reason is not None:
        raise ValueError(reason)
    parallel = config.parallel
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    num_micro_batches = config.num_micro_batches(world_size)
    shares_node = tp * parallel.context_parallel_size <= gpus_per_node
    context_bytes = rates.node_bytes if shares_node else min(rates.node_bytes, network_bytes)
    stage, slowest = _slowest_stage(config, padded_vocab_size, num_micro_batches, context_bytes, rates)
    replicas = config.num_replicas(world_size)
    wire = predict_wire_bytes(config, padded_vocab_size, world_size=world_size, stage=stage)
    data_bytes = rates.node_bytes if tp * replicas <= gpus_per_node else min(rates.node_bytes, network_bytes)
    virtual = config.pipeline_layout.virtual_size or 1
    sent = stage_message_bytes(config) / (rates.node_bytes if world_size <= gpus_per_node else network_bytes)
    return StepSeconds(
        gemms=slowest.gemms,
        attention=slowest.attention,
        elements=slowest.elements,
        tensor_parallel=slowest.exchanges,
        context_parallel=slowest.context,
        pipeline=(pp - 1) * (slowest.total / num_micro_batches / virtual + 2 * sent),
        data_parallel=_exposed(wire.gradients, wire.weights, slowest.total, data_bytes),
        optimizer=_update(config, padded_vocab_size, stage, replicas, num_micro_batches, rates),
    )


@dataclass(frozen=True)
class _StageSeconds:
    """Seconds of a stage's micro-batches of one step, by what they go to."""

    gemms: float
    attention: float
    elements: float
    exchanges: float
    context: float

    @property
    def total(self) -> float:
        return sum(vars(self).values())


def _slowest_stage(
    config: Config, vocab: int, num_micro_batches: int, context_bytes: float, rates: GpuRates
) -> tuple[int, _StageSeconds]:
    """The stage that computes longest, for which the others wait. It is the last, which has the head, if none has more
    layers."""
    seconds = [
        _stage_seconds(config, stage, vocab, num_micro_batches, context_bytes, rates)
        for stage in range(config.pipeline_layout.num_stages)
    ]
    stage = max(range(len(seconds)), key=lambda index: (seconds[index].total, index))
    return stage, seconds[stage]


def _stage_seconds(
    config: Config, stage: int, vocab: int, num_micro_batches: int, context_bytes: float, rates: GpuRates
) -> _StageSeconds:
    tp, hidden = config.parallel.tensor_model_parallel_size, _shape(config).stream
    tokens = config.tokens_per_micro_batch
    layers = config.layers_of_stage(stage)
    rows = vocab if stage == config.parallel.pipeline_model_parallel_size - 1 else 0
    num_fp8 = sum(config.is_fp8_layer(layer) for layer in layers)
    training = config.training
    forwards = 4 / 3 if training.recompute_granularity == "full" else 1.0
    attends_again = "core_attn" in training.recomputed_modules or training.recompute_granularity == "full"
    attended = 1 + _ATTENTION_FORWARD if attends_again else 1.0
    gemms = num_micro_batches * _gemms(config, rows, tokens, len(layers), num_fp8, forwards, rates)
    per_layer = 6 * tokens * config.model.seq_length * _shape(config).queries / tp
    attention = num_micro_batches * len(layers) * attended * per_layer / _attention_flops(config, rates)
    elements = num_micro_batches * (
        forwards * _elements(config, tokens, len(layers), num_fp8, rates)
        + _transposes(config, len(layers), num_fp8, num_micro_batches, rates)
        + tokens * rows / tp * rates.loss
    )
    exchanges = num_micro_batches * len(layers) * forwards * tokens * hidden * _exchange(config, rates)
    context = num_micro_batches * len(layers) * attended * _context_bytes(config, tokens) / context_bytes
    return _StageSeconds(gemms, attention, elements, exchanges, context)


def _gemms(
    config: Config, vocab: int, tokens: int, num_layers: int, num_fp8: int, forwards: float, rates: GpuRates
) -> float:
    """Seconds of the GEMMs of one micro-batch: forward, input gradient and weight gradient."""
    tp, shape = config.parallel.tensor_model_parallel_size, _shape(config)
    layer = forwards * 6 * tokens * linear_params_per_layer(config.model) / tp
    # 16-bit layers also compute the MLP's second GEMM again.
    mlps = architecture_of(config.model).mlp_modules(config.model)
    if {*mlps} & {*config.training.recomputed_modules} or config.training.mlp_chunks_for_training > 1:
        layer += 2 * tokens * shape.stream * shape.mlp_input / tp
    # Over chunks, backward computes the logits again.
    head = (6 if config.training.loss_chunk_size is None else 8) * tokens * shape.stream * vocab / tp
    head_flops = rates.fp8_gemm_flops if config.has_fp8_lm_head else rates.half_gemm_flops
    fp8, half = num_fp8 * layer / rates.fp8_gemm_flops, (num_layers - num_fp8) * layer / rates.half_gemm_flops
    return fp8 + half + head / head_flops


def _attention_flops(config: Config, rates: GpuRates) -> float:
    """The rate of the nearest width that was measured, and of the nearest length there."""
    width, length = _shape(config).head, config.model.seq_length
    measured = rates.fp8_attention_flops if config.precision.fp8_dot_product_attention else rates.attention_flops
    return measured[min(measured, key=lambda at: (abs(at[0] - width), abs(at[1] - length)))]


def _context_bytes(config: Config, tokens: int) -> float:
    """Bytes that a rank receives from context-parallel ranks in a layer, forward and backward (`nn.context_attention`,
    `nn.head_exchange`).

    Args:
        tokens: of the rank, in a micro-batch.
    """
    parallel, shape = config.parallel, _shape(config)
    ranks, queries, keys = parallel.context_parallel_size, shape.queries, shape.keys
    if parallel.cp_comm_type == "a2a":  # query, key, value and output, and their gradients
        elements = 2.0 * (2 * queries + 2 * keys) * (ranks - 1) / ranks
        each = 1 if config.precision.fp8_dot_product_attention else 2
        received = elements * each
    elif parallel.cp_comm_type == "all_gather":  # three of four chunks of the others, twice, and their gradients
        each = 1 if config.precision.fp8_context_communication else 2
        received = (2 * each + 2) * 0.75 * (ranks - 1) * 2 * keys
    else:  # keys and values of all others twice, and FP32 sums that come home
        received = (2 * 2 * (ranks - 1) + 4 * ranks) * 2 * keys if ranks > 1 else 0.0
    return tokens * received / parallel.tensor_model_parallel_size


def _elements(config: Config, tokens: int, num_layers: int, num_fp8: int, rates: GpuRates) -> float:
    """Seconds of the kernels between the GEMMs of one micro-batch."""
    shape, tp = _shape(config), config.parallel.tensor_model_parallel_size
    kernels = rates.delayed if config.precision.fp8_recipe == "delayed" else rates.tensorwise
    per_token = kernels.stream * shape.stream + kernels.qkv * (shape.queries + 2 * shape.keys)
    per_token += (kernels.swiglu if shape.is_gated else kernels.gelu) * shape.mlp
    per_token += rates.fp8_other * shape.stream
    half = rates.half_stream * shape.stream
    return tokens * (num_fp8 * per_token + (num_layers - num_fp8) * half) / tp


def _transposes(config: Config, num_layers: int, num_fp8: int, num_micro_batches: int, rates: GpuRates) -> float:
    """Seconds of the transposes of FP8 weights, per micro-batch. A layer that keeps them makes them once a step."""
    kept = min(config.precision.keep_fp8_transpose_cache, num_layers, num_fp8)
    times = (num_fp8 - kept) + kept / num_micro_batches
    params = linear_params_per_layer(config.model) / config.parallel.tensor_model_parallel_size
    return times * params * rates.transpose


def _exchange(config: Config, rates: GpuRates) -> float:
    """Seconds that tensor parallelism adds per element of the residual stream and layer.

    Copy engines between more ranks than were measured count as NCCL. A larger group counts by the share (n - 1) / n of
    rows that other ranks have.
    """
    tp = config.parallel.tensor_model_parallel_size
    if tp == 1:
        return 0.0
    if config.parallel.tp_transport != "nccl" and config.precision.is_fp8 and tp in rates.exchange:
        return rates.exchange[tp]
    size = max(size for size in rates.nccl_exchange if size <= tp)
    return rates.nccl_exchange[size] * ((tp - 1) / tp) / ((size - 1) / size)


def _exposed(gradients: int, weights: int, compute: float, data_bytes: float) -> float:
    """Seconds of communication that compute does not hide. Backward, two thirds of compute, hides gradients; forward, a
    third, hides weights."""
    hidden_gradients, hidden_weights = 2 / 3 * compute, compute / 3
    return max(0.0, gradients / data_bytes - hidden_gradients) + max(0.0, weights / data_bytes - hidden_weights)


def _update(
    config: Config, padded_vocab_size: int, stage: int, replicas: int, num_micro_batches: int, rates: GpuRates
) -> float:
    """Seconds of the update of a rank's shard, and of adding up gradients of FP8 weights: what arrives, or each
    micro-batch's own, whose GEMM reads the sum so far."""
    stored, seconds = model_storage(config.precision, num_micro_batches), 0.0
    for storage, count in parameters_by_class(config, padded_vocab_size, stage=stage).items():
        in_fp8 = config.precision.is_fp8 and storage is StorageClass.LINEAR
        grads = stored.of_grads(storage)
        sends_each = in_fp8 and replicas > 1 and not grads.adds_locally
        received = (num_micro_batches if sends_each else 1) * rates.received if replicas > 1 else 0.0
        seconds += count / replicas * ((_fp8_update(config, rates) if in_fp8 else rates.half_update) + received)
        if in_fp8 and not sends_each:
            seconds += (num_micro_batches - 1) * count * grads.local.itemsize / rates.copied
    return seconds


def _fp8_update(config: Config, rates: GpuRates) -> float:
    formats = config.precision.formats
    if formats.master_weight is StorageDtype.SPLIT:
        return rates.split_update
    return rates.moments_update if formats.average is StorageDtype.INT8 else rates.fp8_update
