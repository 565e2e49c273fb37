"""Optimizer state on disk: every rank's fragments of every parameter, and the whole parameter from all ranks' files.

A rank's file holds, for each parameter that its shard has a part of, ``<name>/<kind>`` (payload of its fragments, flat,
in order; the FP32 value of a split master), ``<name>/<kind>_scales`` where the storage is scaled, ``<name>/fragments``
(int64 [k, 2]: first element and length of each, in the padded parameter) and ``<name>/shape``. So a run on another
number of replicas finds its part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..distributed.partition import Slot
from ..formats import STATE_BLOCK
from ..kernels import reference
from ..optimizer.split_state import SplitSpaceState
from ..optimizer.state import SpaceState
from .files import open_tensors, rank_file

KINDS = ("master", "exp_avg", "exp_avg_sq")


def tensors_of(state: SpaceState, slot: Slot) -> dict[str, Tensor]:
    """What this rank writes of a parameter; nothing if it owns no part of it."""
    fragments = state.space.fragments(slot)
    if not fragments:
        return {}
    tensors = {
        f"{slot.name}/fragments": torch.tensor([[part.slot_start, part.length] for part in fragments]),
        f"{slot.name}/shape": torch.tensor(slot.param.shape),
    }
    for kind in KINDS:
        parts = [state.part(kind, slot, fragment) for fragment in fragments]
        # Bytes, because a CPU does not concatenate FP8.
        payload = torch.cat([part.payload.view(torch.uint8) for part in parts]).view(parts[0].payload.dtype)
        tensors[f"{slot.name}/{kind}"] = payload
        scales = [part.scales for part in parts if part.scales is not None]
        if scales:
            tensors[f"{slot.name}/{kind}_scales"] = torch.cat(scales)
    if isinstance(state, SplitSpaceState):
        tensors[f"{slot.name}/weight_scale"] = state.scale_of(slot)
    return tensors


@dataclass(frozen=True)
class SavedTensor:
    """A parameter's state of one kind, whole, as it was stored: payload [padded], scales [padded / 256] or None."""

    payload: Tensor
    scales: Tensor | None
    weight_scale: Tensor | None = None
    """FP32 [1], the scale of the FP8 weight where the master was split."""

    def load(self) -> Tensor:
        """FP32 [padded]."""
        return reference.load_state(self.payload, self.scales)

    def restore(self, state: SpaceState, slot: Slot, kind: str) -> None:
        """Put this rank's fragments in place, bit for bit where the storage is the same, else rounded to it."""
        if kind == "master" and isinstance(state, SplitSpaceState):
            value = self.load()[: slot.numel].view(slot.param.shape)
            state.set_master(slot, value, self.weight_scale)
            return
        for fragment in state.space.fragments(slot):
            part = state.part(kind, slot, fragment)
            start, stop = fragment.slot_start, fragment.slot_start + fragment.length
            if self.payload.dtype == part.payload.dtype and (self.scales is None) == (part.scales is None):
                part.payload.copy_(self.payload[start:stop])
                if self.scales is not None and part.scales is not None:
                    part.scales.copy_(self.scales[start // STATE_BLOCK : stop // STATE_BLOCK])
            else:
                part.store_(self.load()[start:stop].to(part.payload.device))


class SavedState:
    """The files of all replicas of one model-parallel rank.

    Raises:
        CheckpointError: a file is missing or damaged.
    """

    def __init__(self, folder: Path, tensor_rank: int, pipeline_rank: int, *, num_replicas: int) -> None:
        self._files: list[Any] = [
            open_tensors(rank_file(folder, tensor_rank, pipeline_rank, replica)) for replica in range(num_replicas)
        ]
        self._keys = [set(file.keys()) for file in self._files]
        suffix = "/shape"
        self.shapes: dict[str, torch.Size] = {
            key.removesuffix(suffix): torch.Size(file.get_tensor(key).tolist())
            for file, keys in zip(self._files, self._keys, strict=True)
            for key in keys
            if key.endswith(suffix)
        }

    def get(self, name: str, kind: str) -> SavedTensor:
        """A parameter's state of one kind."""
        pieces = []
        weight_scale = None
        for file, keys in zip(self._files, self._keys, strict=True):
            if f"{name}/fragments" not in keys:
                continue
            payload = file.get_tensor(f"{name}/{kind}")
            scales = file.get_tensor(f"{name}/{kind}_scales") if f"{name}/{kind}_scales" in keys else None
            if f"{name}/weight_scale" in keys:
                weight_scale = file.get_tensor(f"{name}/weight_scale")
            end = 0
            for start, length in file.get_tensor(f"{name}/fragments").tolist():
                begin, end = end, end + length
                part = None if scales is None else scales[begin // STATE_BLOCK : end // STATE_BLOCK]
                pieces.append((start, payload[begin:end], part))
        pieces.sort(key=lambda piece: piece[0])
        dtype = pieces[0][1].dtype
        payload = torch.cat([piece[1].view(torch.uint8) for piece in pieces]).view(dtype)
        scales = [piece[2] for piece in pieces if piece[2] is not None]
        return SavedTensor(payload, torch.cat(scales) if scales else None, weight_scale)

    def masters(self) -> Iterator[tuple[str, Tensor]]:
        """(name, FP32 value) of every parameter."""
        for name, shape in self.shapes.items():
            yield name, self.get(name, "master").load()[: shape.numel()].view(shape)

    def shared(self) -> dict[str, Tensor]:
        """What replicas have alike, from the first one's file: step count, loss scale, amax histories, generators."""
        shared = {key for key in self._keys[0] if key.split("/")[0].split(".")[0] in _SHARED}
        return {key: self._files[0].get_tensor(key) for key in shared}


_SHARED = ("step_count", "loss_scale", "amax_history", "rng")
