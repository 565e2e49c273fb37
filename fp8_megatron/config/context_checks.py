"""Checks of context parallelism: what the ranks that share a sequence can compute."""

from __future__ import annotations

from collections.abc import Iterator

from .schema import Config

#: Heads of the kernels of `kernels.attention.blocks`: a multiple of the first, up to the second.
_WIDTH_MULTIPLE, _MAX_WIDTH = 8, 256
#: Limits of cuDNN (`mcore.attention`).
_CUDNN_MAX_WIDTH = 128


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
    width = model.head_dim
    if width % _WIDTH_MULTIPLE or width > _MAX_WIDTH:
        yield (
            f"{name} takes heads of a multiple of {_WIDTH_MULTIPLE} columns up to {_MAX_WIDTH}, not {width}; choose "
            f"another kv_channels or num_attention_heads"
        )
    elif model.attention_backend == "cudnn" and width > _CUDNN_MAX_WIDTH:
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
