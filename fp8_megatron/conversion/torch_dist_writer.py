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
from ..models.registry import is_linear_weight

#: Transformer Engine's FP8 state. In most checkpoints it is an object, not a tensor.
_EXTRA_STATE = "_extra_state"


def write_torch_dist(
    folder: Path, reader: WeightReader, *, common: dict[str, Any], on_weight: Callable[[], None] = lambda: None
) -> list[FileEntry]:
    """Write a model's weights in FP32 as megatron-core reads them. Holds a few weights or one large one in memory.

    Args:
        common: plain numbers and strings for ``common.pt``.
        on_weight: called after each weight of a layer or outside them, for a progress bar.

    Returns:
        Records of what was written, for the manifest.
    """
    written, entries = write_chunks(folder, 0, _chunks(reader, on_weight))
    return entries + write_metadata(folder, written, common=common, checkpoint_id=folder.stem)


def fp32_chunks(reader: TorchDistReader) -> Iterator[Chunk | str]:
    """Every tensor of a checkpoint in FP32, cut as it was saved, and the objects that megatron-core's readers want."""
    for key, shape in reader.shapes.items():
        for item in reader.chunks(key):
            value = reader.load(item)
            yield Chunk(key, shape, item.offset, value.decode() if isinstance(value, Encoded) else value)
        if is_linear_weight(key):
            yield from (_extra_state_key(key, layer, shape[0]) for layer in range(shape[0]))


def _extra_state_key(key: str, layer: int, num_layers: int) -> str:
    """The object that megatron-core's readers look for beside a linear weight of one layer."""
    return f"{key.removesuffix('weight')}{_EXTRA_STATE}/shard_{layer}_{num_layers}"


def _chunks(reader: WeightReader, on_weight: Callable[[], None]) -> Iterator[Chunk | str]:
    for place in places(reader.shapes):
        key, layer, expert = place
        shape = reader.shapes[key]
        value = reader.read(*place).float().contiguous()
        if not is_finite(value):
            where = key if layer is None else f"{key}, layer {layer},"
            raise CheckpointError(f"{where} holds an inf or a NaN")
        index = [each for each in (layer, expert) if each is not None]
        yield Chunk(key, shape, (*index, *(0 for _ in value.shape)), value[(None,) * len(index)])
        if is_linear_weight(key) and layer is not None and not expert:
            yield _extra_state_key(key, layer, shape[0])
        on_weight()
