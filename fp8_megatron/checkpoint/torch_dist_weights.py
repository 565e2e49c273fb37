"""The weights in a ``torch_dist`` folder, this project's or megatron-core's, by standard keys, a layer at a time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from .files import CheckpointError
from .torch_dist import TorchDistReader
from .weights import LAYERS, standard_key

#: What begins the key of a tensor that is no weight: an optimizer's state, of several optimizers by number.
_OPTIMIZER = ("optimizer.", "chained_")
#: Transformer Engine's FP8 state. In most checkpoints it is an object, not a tensor.
_EXTRA_STATE = "_extra_state"


class TorchDistWeights:
    """Reads weights under standard keys, in FP32. Every tensor counts as one but the optimizer's state.

    Also finds norms under their modules' names (specs without `sharded_state_dict_keys_map`).

    Args:
        folder: with ``.metadata``.
        reader: of that folder, if there is one already.

    Attributes:
        stored_keys: by standard key, the key under which a weight was saved.
        shapes: of the weights by standard key, layers stacked.

    Raises:
        CheckpointError: there is no description of tensors, or the decoder's layers are missing or not stacked.
    """

    def __init__(self, folder: Path, reader: TorchDistReader | None = None) -> None:
        self._reader = TorchDistReader(folder) if reader is None else reader
        found = self._reader.shapes
        self.stored_keys: Mapping[str, str] = {
            standard_key(key): key for key in found if not key.startswith(_OPTIMIZER) and _EXTRA_STATE not in key
        }
        self.shapes: Mapping[str, tuple[int, ...]] = {key: found[stored] for key, stored in self.stored_keys.items()}
        if not any(key.startswith(LAYERS) for key in self.shapes):
            raise CheckpointError(f"{folder} has no {LAYERS}*: it is not the checkpoint of a GPT")
        flat = next((key for key, shape in self.shapes.items() if key.startswith(LAYERS) and not shape), None)
        if flat is not None:
            raise CheckpointError(f"{folder} is damaged: {flat} is a single number, not stacked layers; copy it again")
        numbered = next((key for key in self.shapes if key.removeprefix(LAYERS)[:1].isdigit()), None)
        if numbered is not None:
            raise CheckpointError(
                f"{folder} numbers its layers ({numbered}) instead of stacking them; save it again without "
                f"megatron-core's metadata non_homogeneous_layers"
            )

    def read(self, key: str, layer: int | None) -> Tensor:
        """As `weights.WeightReader.read`."""
        return self._reader.read_layer(self.stored_keys[key], layer)
