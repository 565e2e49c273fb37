"""Initial weights that depend only on the seed and the parameter's name, not on the parallel layout.

Every matrix is drawn whole from a generator seeded with its name in the whole model, and each rank keeps its part. Of
matrices [M, N, K] a rank draws its own, each by its number. One seed therefore gives the same model under any layout,
so losses are comparable.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from ..models.keys import EMBEDDING_KEYS, OUTPUT_LAYER, VOCABULARY_KEYS, WORD_EMBEDDING
from ..quantization.attention import AttentionQuantizers
from ..quantization.recipe import HeadQuantizers, LinearQuantizers
from ..sharding.region import Region

_OUTPUT_PROJECTIONS = ("linear_proj.weight", "linear_fc2.weight")
_IN_A_LAYER = ("linear_qkv", "core_attention", "linear_proj", "linear_fc1", "linear_fc2")


def named_parameters_of_model(chunk: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Parameters of one model chunk by their names in the whole model. Layers are counted over all stages; a tied head
    has the embedding's name."""
    named = {_name_in_model(name, chunk): param for name, param in chunk.named_parameters()}
    if getattr(chunk, "share_embeddings_and_output_weights", False) and OUTPUT_LAYER in named:
        named[WORD_EMBEDDING] = named.pop(OUTPUT_LAYER)
    return named


def named_buffers_of_model(chunk: torch.nn.Module) -> dict[str, Tensor]:
    """What one model chunk computes itself and keeps, by the names in the whole model."""
    return {
        _name_in_model(f"{prefix}.{name}", chunk): buffer
        for prefix, module in chunk.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }


def named_quantizers_of_model(
    chunk: torch.nn.Module,
) -> dict[str, LinearQuantizers | HeadQuantizers | AttentionQuantizers]:
    """The quantisers of one model chunk's FP8 layers by the layers' names in the whole model, in the order in which
    forward runs them."""
    found = {
        _name_in_model(name, chunk): module.quantizers
        for name, module in chunk.named_modules()
        if isinstance(getattr(module, "quantizers", None), (LinearQuantizers, HeadQuantizers, AttentionQuantizers))
    }
    return dict(sorted(found.items(), key=lambda item: _forward_order(item[0])))


def _forward_order(layer: str) -> tuple[float, int]:
    """megatron-core makes an attention's output projection before its input projection."""
    parts = layer.split(".")
    index = int(parts[parts.index("layers") + 1]) if "layers" in parts else math.inf
    return index, _IN_A_LAYER.index(parts[-1]) if parts[-1] in _IN_A_LAYER else len(_IN_A_LAYER)


def _name_in_model(name: str, chunk: torch.nn.Module) -> str:
    parts = name.split(".")
    if "layers" in parts:
        offset = next((m.layer_number - 1 for m in chunk.modules() if isinstance(m, TransformerLayer)), 0)
        position = parts.index("layers") + 1
        parts[position] = str(int(parts[position]) + offset)
    return ".".join(parts)


def initial_values(
    named_params: dict[str, torch.nn.Parameter],
    *,
    std: float,
    num_layers: int,
    hidden_std: float | None = None,
    seed: int,
    region_of: Callable[[torch.nn.Parameter], Region],
    vocab_size: int | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, this rank's part in FP32 on the parameter's device), one parameter at a time.

    Matrices are normal. The standard deviation of output projections is divided by √(2 · num_layers) (GPT-2's scheme,
    as in Megatron). Norm weights are 1, biases and sinks 0.

    Args:
        std: standard deviation of matrices.
        num_layers: of the whole model.
        hidden_std: the same of matrices of layers; None: `std`.
        region_of: where this rank's part of a parameter lies in the whole parameter.
        vocab_size: tokens of the vocabulary. Later rows of its matrices are padding and zero. None: no padding.
    """
    for name, param in named_params.items():
        if param.ndim == 1 or name.endswith(".bias"):
            is_norm_weight = name.endswith(("norm.weight", "layer_norm_weight"))
            yield name, torch.full(param.shape, 1.0 if is_norm_weight else 0.0, device=param.device)
            continue
        scaled_std = std if name in EMBEDDING_KEYS or hidden_std is None else hidden_std
        if name.endswith(_OUTPUT_PROJECTIONS):
            scaled_std /= math.sqrt(2.0 * num_layers)
        region = region_of(param)
        rows = vocab_size if name in VOCABULARY_KEYS else None
        if param.ndim == 2:
            yield name, _drawn(region, _seed_of(name, seed), scaled_std, param.device, rows)
            continue
        value, first = torch.empty(param.shape, device=param.device), region.matrices[0] * len(param)
        for number, matrix in enumerate(value, start=first):
            matrix.copy_(_drawn(region.of_matrix(), _seed_of(f"{name}/{number}", seed), scaled_std, param.device))
        yield name, value


def _drawn(region: Region, seed: int, std: float, device: torch.device, num_rows: int | None = None) -> Tensor:
    """This rank's part of a normal matrix, FP32.

    Args:
        num_rows: rows that are drawn, before rows of zeros; None: all.
    """
    rows, columns = region.whole_shape
    # A meta tensor has no values to draw, and its device no generator.
    generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)
    drawn = rows if num_rows is None else num_rows
    whole = torch.empty(drawn, columns, device=device).normal_(0.0, std, generator=generator)
    if drawn < rows:
        whole = torch.nn.functional.pad(whole, (0, 0, 0, rows - drawn))
    return region.part_of(whole)


def _seed_of(name: str, seed: int) -> int:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
