"""Checks of attention: what it leaves out, other documents and tokens beyond a window, and what the ranks that share a
sequence can compute."""

from __future__ import annotations

from collections.abc import Iterator

from ...config.model import layer_pattern, window_sizes
from ...config.schema import Config

#: FlashAttention's heads: a multiple of the first, up to the second (`nn.masked_attention`, `nn.context_attention`).
_FLASH_WIDTH_MULTIPLE, _FLASH_MAX_WIDTH = 8, 256
#: Limits of cuDNN (`mcore.attention`).
_CUDNN_MAX_WIDTH = 128


def attention_problems(config: Config) -> Iterator[str]:
    """One line for each problem of documents and windows."""
    model = config.model
    yield from _window_problems(config)
    yield from _sink_problems(config)
    name = ("sft" if config.data.sft else "reset_attention_mask") if config.data.keeps_documents_apart else None
    if name is not None and config.precision.precision == "te":
        yield (
            f"{name}: Transformer Engine's attention cannot keep documents apart; drop it, or choose --precision "
            f"fp8 or bf16"
        )
    if model.window_size is not None:
        name = f"window_size({model.window_size})"
    if name is None or config.precision.precision == "te":
        return
    if model.attention_backend == "cudnn":
        yield f"{name} runs in FlashAttention's kernels, not attention_backend(cudnn); give --attention-backend auto"
    yield from _flash_problems(name, model.head_dim)


def _sink_problems(config: Config) -> Iterator[str]:
    """What heads with sinks do not compute (`nn.attention_sinks`)."""
    model = config.model
    if model.softmax_type == "vanilla":
        return
    name = f"softmax_type({model.softmax_type})"
    if config.precision.precision == "te":
        yield f"{name} is for this project's attention, not Transformer Engine's; choose --precision fp8 or bf16"
    if model.attention_dropout > 0:
        yield f"{name} has no dropout, attention_dropout is {model.attention_dropout}; give --attention-dropout 0"
    if config.parallel.context_parallel_size == 1:  # otherwise `context_problems` says it
        yield from _kernel_problems(config, name)


def _flash_problems(name: str, width: int) -> Iterator[str]:
    if width % _FLASH_WIDTH_MULTIPLE or width > _FLASH_MAX_WIDTH:
        yield (
            f"{name} runs in FlashAttention's kernels, whose heads have a multiple of {_FLASH_WIDTH_MULTIPLE} columns "
            f"up to {_FLASH_MAX_WIDTH}, not {width}; choose another kv_channels or num_attention_heads"
        )


def _window_problems(config: Config) -> Iterator[str]:
    model, text = config.model, config.model.window_attn_skip_freq
    if model.window_size is None:
        return
    try:
        left, right = window_sizes(model.window_size)
    except ValueError:
        yield f"window_size({model.window_size}) is not LEFT,RIGHT; give for example --window-size 1024,0"
        return
    if left < 0 or right not in (0, -1):
        yield (
            f"window_size({model.window_size}): LEFT is 0 or more, and RIGHT is 0, as no token attends to a later one; "
            f"give for example --window-size 1024,0"
        )
    if text is None:
        return
    try:
        pattern = layer_pattern(text)
    except ValueError:
        yield (
            f"window_attn_skip_freq({text}) is neither a number nor a list of 0 and 1; give for example 4, or [1,1,1,0]"
        )
        return
    if isinstance(pattern, int) and pattern < 1:
        yield f"window_attn_skip_freq({text}) is below 1; give at least 2, or drop it for windows in all layers"
    elif pattern == 1 or (isinstance(pattern, list) and not any(pattern)):
        yield f"window_attn_skip_freq({text}) leaves no layer with window_size({model.window_size}); drop both"
    if isinstance(pattern, list) and len(pattern) != model.num_layers:
        yield (
            f"window_attn_skip_freq({text}) has {len(pattern)} layers, num_layers is {model.num_layers}; give one 0 or "
            f"1 for each layer"
        )


def context_problems(config: Config) -> Iterator[str]:
    """One line for each problem of --context-parallel-size."""
    cp = config.parallel.context_parallel_size
    if cp == 1:
        return
    yield from _length_problems(config)
    name = f"context_parallel_size({cp})"
    model, precision = config.model, config.precision
    if precision.precision == "te":
        yield f"{name} is for this project's attention, not Transformer Engine's; choose --precision fp8 or bf16"
    if precision.fp8_context_communication and config.parallel.cp_comm_type != "all_gather":
        instead = ", or give --fp8-dot-product-attention" if config.parallel.exchanges_heads else ""
        yield (
            f"fp8_context_communication casts what all_gather sends, not cp_comm_type({config.parallel.cp_comm_type}); "
            f"choose --cp-comm-type all_gather{instead}"
        )
    if config.parallel.cp_comm_type == "a2a":
        yield from _head_problems(config)
    else:
        yield from _block_problems(config)
    if model.attention_dropout > 0:
        yield f"{name} does not support attention dropout; give --attention-dropout 0, not {model.attention_dropout}"


def _head_problems(config: Config) -> Iterator[str]:
    """Ranks that exchange heads have the same number of them, and of their groups."""
    parallel, model = config.parallel, config.model
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    name = "num_query_groups" if model.group_query_attention else "num_attention_heads"
    count = model.query_groups
    if count % tp == 0 and count // tp % cp:
        yield (
            f"cp_comm_type(a2a): {name}({count}) / tensor_model_parallel_size({tp}) % context_parallel_size({cp}) = "
            f"{count // tp % cp}, and each rank takes as many; choose a context_parallel_size that divides "
            f"{count // tp}, or cp_comm_type p2p"
        )


def _block_problems(config: Config) -> Iterator[str]:
    """What the kernels of blocks of keys do not compute (`nn.context_attention`)."""
    name = f"context_parallel_size({config.parallel.context_parallel_size})"
    model = config.model
    for setting in ("reset_attention_mask", "sft"):
        if getattr(config.data, setting):
            yield f"{name} cannot keep documents apart in attention; drop {setting}, or choose cp_comm_type a2a"
    if config.precision.fp8_dot_product_attention:
        yield f"{name} runs attention in 16 bits; drop fp8_dot_product_attention, or choose cp_comm_type a2a"
    if model.window_size is not None:
        yield f"{name} does not support windows; drop window_size({model.window_size}), or choose cp_comm_type a2a"
    yield from _kernel_problems(config, name)


def _kernel_problems(config: Config, name: str) -> Iterator[str]:
    """What FlashAttention's and cuDNN's kernels of whole rows with their log-sum-exp do not take."""
    model = config.model
    width = model.head_dim
    yield from _flash_problems(name, width)
    if model.attention_backend == "cudnn" and _CUDNN_MAX_WIDTH < width <= _FLASH_MAX_WIDTH:
        yield (
            f"{name} runs FlashAttention's kernels for heads of {width} columns, not attention_backend(cudnn), whose "
            f"backward has up to {_CUDNN_MAX_WIDTH}; give --attention-backend auto"
        )
    if model.attention_backend == "cudnn" and config.training.deterministic_mode:
        yield (
            f"{name} has no attention_backend(cudnn) in deterministic_mode, as cuDNN's backward does not repeat its "
            f"bits; give --attention-backend auto"
        )


def _length_problems(config: Config) -> Iterator[str]:
    """A rank has two chunks of a sequence. Under sequence parallelism its tensor-parallel ranks share them evenly."""
    parallel, length = config.parallel, config.model.seq_length
    cp, tp = parallel.context_parallel_size, parallel.tensor_model_parallel_size
    if length % (2 * cp):
        yield (
            f"seq_length({length}) % (2 × context_parallel_size({cp})) = {length % (2 * cp)}; choose a seq_length that "
            f"is a multiple of {2 * cp}"
        )
    elif parallel.sequence_parallel and length // cp % tp:
        yield (
            f"sequence_parallel: seq_length({length}) / context_parallel_size({cp}) % tensor_model_parallel_size({tp}) "
            f"= {length // cp % tp}; choose a seq_length that is a multiple of {cp * tp}"
        )
