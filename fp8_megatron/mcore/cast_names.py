"""The FP8 layers of a model chunk, by their names in the whole model."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer

from .lm_head import FP8OutputLayer
from .tensor_parallel import FP8ColumnParallelLinear, FP8RowParallelLinear


def fp8_layers(
    chunk: torch.nn.Module,
) -> Iterator[tuple[str, FP8ColumnParallelLinear | FP8RowParallelLinear | FP8OutputLayer]]:
    """(name, layer) of every FP8 linear layer and LM head. Layers are counted over all stages."""
    offset = next((m.layer_number - 1 for m in chunk.modules() if isinstance(m, TransformerLayer)), 0)
    for name, module in chunk.named_modules():
        if isinstance(module, (FP8ColumnParallelLinear, FP8RowParallelLinear, FP8OutputLayer)):
            parts = name.split(".")
            if "layers" in parts:
                position = parts.index("layers") + 1
                parts[position] = str(int(parts[position]) + offset)
            yield ".".join(parts), module
