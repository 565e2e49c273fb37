"""Writing weights as megatron-core's ``torch_dist``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..checkpoint.encoding import Encoded
from ..checkpoint.files import CheckpointError
from ..checkpoint.manifest import FileEntry
from ..checkpoint.torch_dist import Chunk, TorchDistReader, write_chunks, write_metadata
from ..checkpoint.weights import WeightReader, is_finite, places
from ..config.model import ModelConfig
from ..models.registry import has_unlike_layers, is_linear_weight, stored_names
from ..sharding.region import Shape

#: Transformer Engine's FP8 state. In most checkpoints it is an object, not a tensor.
_EXTRA_STATE = "_extra_state"


def write_torch_dist(
    folder: Path,
    reader: WeightReader,
    *,
    common: dict[str, Any],
    model: ModelConfig | None = None,
    on_weight: Callable[[], None] = lambda: None,
) -> list[FileEntry]:
    """Write a model's weights in FP32 as megatron-core reads them. Holds a few weights or one large one in memory.

    Args:
        common: plain numbers and strings for ``common.pt``.
        model: that the weights are of; None: only this project reads them, by their keys.
        on_weight: called after each weight of a layer or outside them, for a progress bar.

    Returns:
        Records of what was written, for the manifest.
    """
    written, entries = write_chunks(folder, 0, _chunks(reader, model, on_weight))
    return entries + write_metadata(folder, written, common=common, checkpoint_id=folder.stem)


def fp32_chunks(reader: TorchDistReader) -> Iterator[Chunk | str]:
    """Every tensor of a checkpoint in FP32, cut as it was saved, and the objects that megatron-core's readers want."""
    for key, shape in reader.shapes.items():
        for item in reader.chunks(key):
            value = reader.load(item)
            yield Chunk(key, shape, item.offset, value.decode() if isinstance(value, Encoded) else value)
        if is_linear_weight(key):
            yield from (_extra_state_key(key, (layer,), shape[:1]) for layer in range(shape[0]))


def _extra_state_key(key: str, index: Shape, counts: Shape) -> str:
    """The object that megatron-core's readers look for beside a linear weight, of one layer and matrix of so many."""
    shard, shape = (".".join(map(str, numbers)) for numbers in (index or (0,), counts or (1,)))
    return f"{key.removesuffix('weight')}{_EXTRA_STATE}/shard_{shard}_{shape}"


def _chunks(reader: WeightReader, model: ModelConfig | None, on_weight: Callable[[], None]) -> Iterator[Chunk | str]:
    for place in places(reader.shapes):
        key, layer, matrix = place
        value = reader.read(*place).float().contiguous()
        if not is_finite(value):
            where = key if layer is None else f"{key}, layer {layer},"
            raise CheckpointError(f"{where} holds an inf or a NaN")
        index, shape = tuple(each for each in (layer, matrix) if each is not None), reader.shapes[key]
        stored = [key]
        if model is not None and layer is not None:
            stored = stored_names(model, key, layer)
            index, shape = (index[1:], shape[1:]) if has_unlike_layers(model) else (index, shape)
        for name in stored:
            yield Chunk(name, shape, (*index, *(0 for _ in value.shape)), value[(None,) * len(index)])
        if is_linear_weight(key) and layer is not None and (model is not None or matrix is None):
            yield _extra_state_key(stored[0], index, shape[: len(index)])
        on_weight()
