"""Megatron-LM's ``torch_dist``: whole tensors by their keys.

A distributed optimizer's state has the keys of its parameters (``fully_reshardable``), or is flat buffers of the ranks
(``dp_reshardable``, the default; `megatron_flat_buffers`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from ..sharding.region import Shape
from .files import CheckpointError
from .megatron_checkpoint import MOMENTUM, STATES, MegatronCheckpoint
from .megatron_flat_buffers import FlatBuffers, has_flat_buffers
from .megatron_layout import Name
from .metadata_file import find_object
from .pickles import mapping, read_megatron_file
from .torch_dist import TorchDistReader
from .weights import TorchDistWeights

#: The object with what ranks have in common.
_COMMON_STATE = "common_state/shard_0_1"


class TorchDist(MegatronCheckpoint):
    """Megatron's ``torch_dist``."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, _common_state(folder))
        self._reader = TorchDistReader(folder)
        self._prefixes = {kind: self._prefixes_of(kind) for kind in ("fp32_param", "param", *STATES, MOMENTUM)}
        self._is_flat = has_flat_buffers(self._reader.shapes)

    @cached_property
    def _weights(self) -> TorchDistWeights:
        return TorchDistWeights(self.folder, self._reader)

    @property
    def shapes(self) -> Mapping[str, Shape]:
        return self._weights.shapes

    @property
    def has_moments(self) -> bool:
        return any(key.startswith(("optimizer.", "chained_")) for key in self._reader.shapes)

    @cached_property
    def _flat(self) -> FlatBuffers:
        return FlatBuffers(self, self._reader)

    def check_moments(self) -> None:
        if self._is_flat:
            assert self._flat
        elif not self._prefixes[STATES[0]]:
            raise CheckpointError(
                f"{self.folder} holds optimizer state of another kind than is read; give --no-load-optim or "
                f"--finetune, or save it again with --dist-ckpt-optim-fully-reshardable"
            )

    def holds(self, kind: str, name: Name) -> bool:
        if self._is_flat:
            return super().holds(kind, name)
        return self._state_key(kind, self._weights.stored_place(name.key, name.layer)[0]) is not None

    def _state_key(self, kind: str, key: str) -> str | None:
        """Where a state, or the master, of the weight `key` is; None: nowhere."""
        kinds = ("fp32_param", "param") if kind == "master" else (kind,)
        places = (prefix + key for each in kinds for prefix in self._prefixes[each])
        return next((place for place in places if place in self._reader.shapes), None)

    def stored(self, kind: str, name: Name) -> Tensor:
        if kind == "weight":
            return self.weight(name)
        if self._is_flat:
            return self._flat.read(kind, name)
        key, row = self._weights.stored_place(name.key, name.layer)
        stored = self._state_key(kind, key)
        if stored is not None:
            if self._reader.shapes[stored] != self._reader.shapes[key]:
                raise CheckpointError(
                    f"{self.folder}: {stored} is cut flat (fully_sharded_model_space); save it again with "
                    f"--dist-ckpt-optim-fully-reshardable, or give --no-load-optim"
                )
            return self._reader.read_layer(stored, row)
        if kind != "master":
            raise CheckpointError(f"{self.folder} has no {kind} of {name}; give --no-load-optim or --finetune")
        return self.weight(name)  # of FP32, so it is its own master

    def weight(self, name: Name) -> Tensor:
        """A weight as it was saved, in FP32."""
        return self._weights.read(name.key, name.layer)

    def _prefixes_of(self, kind: str) -> list[str]:
        """What stands before a parameter's key in that of its state. Matrices that ranks share may have an optimizer of
        their own."""
        end = f"optimizer.state.{kind}."
        return list(dict.fromkeys(key[: key.index(end)] + end for key in self._reader.shapes if end in key))


def _common_state(folder: Path) -> dict[Any, Any]:
    """What ranks have in common: a file, or from megatron-core 0.19 on an object beside the tensors, in a list."""
    path, part = folder / "common.pt", None
    found = None if path.exists() else find_object(folder, _COMMON_STATE)
    if found is not None:
        path, part = folder / found.file, (found.start, found.length)
    content = read_megatron_file(path, part)
    if part is not None and isinstance(content, list) and len(content) == 1:
        (content,) = content
    return mapping(content, "its content", path)
