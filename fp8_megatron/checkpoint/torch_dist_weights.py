"""The weights in a ``torch_dist`` folder, this project's or megatron-core's, by standard keys and one layer at a time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from .files import CheckpointError
from .torch_dist import TorchDistReader, Wanted
from .weights import LAYERS, standard_key

_MODEL = ("embedding.", "decoder.", "output_layer.")
#: Transformer Engine's FP8 state. In most checkpoints it is an object, not a tensor.
_EXTRA_STATE = "_extra_state"


class TorchDistWeights:
    """Reads weights under standard keys, in FP32. Skips optimizer state and other tensors.

    Also finds norms under their modules' names (specs without `sharded_state_dict_keys_map`).

    Args:
        folder: with ``.metadata``.
        files: as `TorchDistReader`.

    Raises:
        CheckpointError: there is no description of tensors, or the decoder's layers are missing or not stacked.
    """

    def __init__(self, folder: Path, files: list[str] | None = None) -> None:
        self._reader = TorchDistReader(folder, files)
        self._stored = {
            standard_key(key): key for key in self._reader.shapes if key.startswith(_MODEL) and _EXTRA_STATE not in key
        }
        self.shapes: Mapping[str, tuple[int, ...]] = {
            key: self._reader.shapes[stored] for key, stored in self._stored.items()
        }
        if not any(key.startswith(LAYERS) for key in self.shapes):
            raise CheckpointError(f"{folder} has no {LAYERS}*: it is not the checkpoint of a GPT")
        numbered = next((key for key in self.shapes if key.removeprefix(LAYERS)[:1].isdigit()), None)
        if numbered is not None:
            raise CheckpointError(
                f"{folder} numbers its layers ({numbered}) instead of stacking them; save it again without "
                f"megatron-core's metadata non_homogeneous_layers"
            )

    def read(self, key: str, layer: int | None) -> Tensor:
        """As `weights.WeightReader.read`."""
        shape = self.shapes[key]
        if layer is None:
            return self._reader.read_whole(self._stored[key])
        value = torch.empty(shape[1:])
        wanted = Wanted((layer, *(0 for _ in shape[1:])), (1, *shape[1:]), value.view(-1))
        self._reader.read(self._stored[key], [wanted])
        return value
