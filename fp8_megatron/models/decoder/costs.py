"""What a layer of a decoder costs: FLOPs of attention, and bytes of a rank in forward and backward, as `nn.qkv`,
`nn.mlp` and `nn.chunked_mlp` keep them."""

from __future__ import annotations

from ...config.schema import Config, ModelConfig
from ..architecture import ForwardBeside

#: Bytes of an element of the 16-bit types.
_HALF = 2
#: Bytes of scales beside an element in FP8 whose format has blocks: 4 for 128 elements, or 1 for 32.
_BLOCK_SCALES = 1 / 32
#: FP32 statistics that backward needs of each token: mean and inverse deviation of two norms.
_NORM_STATISTICS_BYTES = 2 * 2 * 4


def fp8_bytes(config: Config) -> float:
    """Bytes of an element of an operand in FP8, with its scales under the recipe of the run that has most."""
    return 1 + _BLOCK_SCALES * config.precision.has_blocks


def kept_bytes(config: Config, layer: int) -> float:
    """As `Architecture.kept_bytes`.

    An FP8 layer keeps the two residual streams, queries, keys, values, attention's output and the MLP's input to its
    activation in 16 bits. Norms of query and key keep their inputs, RoPE nothing. With heads exchanged over ranks the
    projection keeps its input in FP8. A 16-bit layer also keeps the outputs of both norms and of the activation. What
    --recompute-modules names is left out; attention's output stays, as the projection needs it. Transformer Engine's
    layers keep FP8 copies of some of these; they are counted as a 16-bit layer, which is an upper bound.
    """
    leaves_mlp = "mlp" in config.training.recomputed_modules or config.training.mlp_chunks_for_training > 1
    return kept_around_mlp(config, layer) + (0.0 if leaves_mlp else _mlp_bytes(config, layer))


def kept_around_mlp(config: Config, layer: int) -> float:
    """`kept_bytes` without what the MLP keeps between its linear layers."""
    model, parallel, is_fp8 = config.model, config.parallel, config.is_fp8_layer(layer)
    tp, queries, keys = parallel.tensor_model_parallel_size, model.query_width, model.key_width
    streams = 2 * model.hidden_size * (1 if is_fp8 else 2)
    attention = 2 * (queries + keys)
    fp8_attention = is_fp8 and config.precision.fp8_dot_product_attention
    attention -= attention // 2 if fp8_attention else 0  # a byte each
    split: float = attention
    if model.qk_layernorm:  # the value in 16 bits lies beside their inputs; FP8 attention has another
        split += queries + keys + (keys if fp8_attention else 0)
    if is_fp8 and not (model.uses_rope or model.qk_layernorm) and model.query_groups < model.num_attention_heads:
        split += queries  # the queries of a group's heads lie apart from those of the next
    if parallel.exchanges_heads:  # attention keeps one output, the projection another, in FP8 if it is
        split += queries * fp8_bytes(config) / _HALF if is_fp8 else queries
    masks = 2 * model.hidden_size if model.hidden_dropout > 0 else 0
    log_sums = 4 * model.num_attention_heads / tp
    return (_HALF * streams + masks + _NORM_STATISTICS_BYTES) / parallel.sequence_shares + _HALF * split / tp + log_sums


def recomputed_bytes(config: Config, layer: int) -> float:
    """As `Architecture.recomputed_bytes`."""
    training = config.training
    recomputes = "mlp" in training.recomputed_modules and training.mlp_chunks_for_training == 1
    return _mlp_bytes(config, layer) if recomputes else 0.0


def _mlp_bytes(config: Config, layer: int) -> float:
    """What the MLP keeps of each token between its linear layers."""
    columns = _mlp_columns(config, is_fp8=config.is_fp8_layer(layer))
    return _HALF * columns / config.parallel.tensor_model_parallel_size


def _mlp_columns(config: Config, *, is_fp8: bool) -> int:
    """Columns of the MLP's input to its activation and, in a 16-bit layer, of its output."""
    model = config.model
    return model.mlp_columns + (0 if is_fp8 else model.padded_ffn_hidden_size)


def forward_bytes(config: Config, layer: int) -> int:
    """As `Architecture.forward_bytes`: four residual streams, and the MLP's hidden state before and behind its
    activation."""
    model, tokens, is_fp8 = config.model, config.tokens_per_micro_batch, config.is_fp8_layer(layer)
    of_hidden = fp8_bytes(config) if is_fp8 else 2 * _HALF
    columns = _HALF * model.mlp_columns + of_hidden * model.padded_ffn_hidden_size
    mlp = tokens * columns / config.parallel.tensor_model_parallel_size
    return 4 * _HALF * tokens * model.hidden_size + int(mlp / config.training.mlp_chunks_for_training)


def backward_bytes(config: Config, layer: int) -> int:
    """As `Architecture.backward_bytes`: of the MLP's backward, the gradient of its output in 16 bits and, in an FP8
    layer, in both layouts; that of its hidden state; and that of the activation's input with the activation.

    Attention's backward makes less. In chunks, what lies between the GEMMs is that of one, and weight gradients are
    added in FP32 (`nn.chunked_mlp`).
    """
    is_fp8 = config.is_fp8_layer(layer)
    if config.training.mlp_chunks_for_training > 1:
        return _chunked_backward(config, is_fp8=is_fp8)
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    hidden, ffn, columns, fp8 = model.hidden_size, model.padded_ffn_hidden_size, model.mlp_columns, fp8_bytes(config)
    of_fp8 = (2 + 2 * fp8) * hidden + (2 * ffn + fp8 * (2 * columns + ffn)) / tp
    of_half = 2 * hidden + (2 * ffn + 2 * columns) / tp
    return round(config.tokens_per_micro_batch * (of_fp8 if is_fp8 else of_half))


def _chunked_backward(config: Config, *, is_fp8: bool) -> int:
    """`backward_bytes` in chunks: the most of the last chunk, of the norm's backward behind it, and of attention's."""
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    hidden, ffn, columns = model.hidden_size, model.padded_ffn_hidden_size, model.mlp_columns
    tokens = config.tokens_per_micro_batch
    chunk = tokens / config.training.mlp_chunks_for_training
    weights = (columns + ffn) * hidden / tp
    stream = tokens * hidden / config.parallel.sequence_shares
    of_attention = tokens * _HALF * (2 * model.query_width + 2 * model.key_width) / tp
    if is_fp8:
        # The gradients of the MLP's output, with its cast, and of the norm's. Of the chunk, gradients and their casts.
        fp8 = fp8_bytes(config)
        in_chunk = chunk * (fp8 * hidden + (_HALF * columns + _HALF * ffn + fp8 * (2 * columns + ffn)) / tp)
        return round(max(5 * stream + in_chunk + 5 * weights, 8 * stream, of_attention))
    in_chunk = chunk * _HALF * 2 * (columns + ffn) / tp
    return round(max(4 * stream + in_chunk + 6 * weights, 6 * stream, of_attention))


def table_bytes(config: Config) -> int:
    """As `Architecture.table_bytes`: FP32 cosine and sine of every pair at each position."""
    model = config.model
    if not model.uses_rope:
        return 0
    positions = model.seq_length // config.parallel.context_parallel_size
    return positions * 2 * (int(model.head_dim * model.rotary_percent) // 2) * 4


def forward_beside(config: Config) -> ForwardBeside | None:
    """As `Architecture.forward_beside`: none."""
    return None


def attention_flops(model: ModelConfig, *, causal: bool) -> float:
    """As `Architecture.attention_flops`."""
    positions: float = model.num_layers * model.seq_length
    if causal:
        positions = sum(_seen_positions(model.seq_length, window) for window in model.windows)
    return 2 * 2 * positions * model.query_width


def _seen_positions(seq_length: int, window: int | None) -> float:
    """Positions that a token of a sequence sees on average: half of it, or fewer under a window.

    As half counts the diagonal by half, so does a window: w + 1 positions, of which early tokens lack a triangle.
    """
    width = seq_length if window is None else min(window + 1, seq_length)
    return width - width * width / (2 * seq_length)
