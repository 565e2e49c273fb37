"""Checks of what attention leaves out: other documents, and tokens beyond a window."""

from __future__ import annotations

from collections.abc import Iterator

from .model import layer_pattern, window_sizes
from .schema import Config

#: FlashAttention's heads: a multiple of the first, up to the second (`nn.masked_attention`).
_FLASH_WIDTH_MULTIPLE, _FLASH_MAX_WIDTH = 8, 256


def attention_problems(config: Config) -> Iterator[str]:
    """One line for each problem of documents and windows."""
    model = config.model
    yield from _window_problems(config)
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
    width = model.head_dim
    if width % _FLASH_WIDTH_MULTIPLE or width > _FLASH_MAX_WIDTH:
        yield (
            f"{name} runs in FlashAttention's kernels, whose heads have a multiple of {_FLASH_WIDTH_MULTIPLE} columns "
            f"up to {_FLASH_MAX_WIDTH}, not {width}; choose another kv_channels or num_attention_heads"
        )


def _window_problems(config: Config) -> Iterator[str]:
    model, text = config.model, config.model.window_attn_skip_freq
    if model.window_size is None:
        if text is not None:
            yield f"window_attn_skip_freq({text}) has no effect without window_size; give both"
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
