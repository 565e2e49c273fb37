"""Megatron-LM's ``torch_dist``: whole tensors by their keys.

A distributed optimizer's state has the keys of its parameters (``fully_reshardable``), or is flat buffers of the ranks
(``dp_reshardable``, the default).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config.pipeline_layout import PipelineLayout, pipeline_layout
from ..config.schema import ParallelConfig
from ..models.keys import LAYERS, OUTPUT_LAYER, WORD_EMBEDDING, holds_experts
from ..models.registry import ARCHITECTURES, shared_axis
from ..sharding.region import Shape
from .files import CheckpointError
from .megatron_checkpoint import MOMENTUM, STATES, MegatronCheckpoint
from .megatron_layout import (
    Name,
    chunk_names,
    local_shape,
    merged,
    numels_of,
    part_of,
    places_in_buckets,
)
from .metadata_file import find_object
from .pickles import mapping, read_megatron_file
from .torch_dist import TorchDistReader, Wanted
from .weights import TorchDistWeights

_FLAT = re.compile(
    r"optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)\.dtype_.*\.bucket_idx_(\d+)\.(param|exp_avg|exp_avg_sq)"
)
#: The object with what ranks have in common.
_COMMON_STATE = "common_state/shard_0_1"
#: Megatron's arguments that divide layers over stages otherwise than evenly, with the types of their values.
_DIVISION = {
    "pipeline_model_parallel_layout": str,
    "decoder_first_pipeline_num_layers": int,
    "decoder_last_pipeline_num_layers": int,
    "account_for_embedding_in_pipeline_split": bool,
    "account_for_loss_in_pipeline_split": bool,
}
#: Where a parameter is in the buffers: (stage, model chunk, bucket, first element).
FlatPlace = tuple[int, int, int, int]


class TorchDist(MegatronCheckpoint):
    """Megatron's ``torch_dist``."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, _common_state(folder))
        self._reader = TorchDistReader(folder)
        self._prefixes = {kind: self._prefixes_of(kind) for kind in ("fp32_param", "param", *STATES, MOMENTUM)}
        self._is_flat = any(map(_FLAT.fullmatch, self._reader.shapes))

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
    def _flat(self) -> _FlatBuffers:
        return _FlatBuffers(self, self._reader)

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
        """What stands before a parameter's key in that of its state. Experts may have an optimizer of their own."""
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


class _FlatBuffers:
    """State of a distributed optimizer as flat buffers of model-parallel ranks, a tensor a bucket."""

    def __init__(self, checkpoint: TorchDist, reader: TorchDistReader) -> None:
        self._checkpoint, self._reader = checkpoint, reader
        arguments = checkpoint.arguments
        if any(map(holds_experts, checkpoint.shapes)):
            raise self._unknown("experts")
        if not {"tensor_model_parallel_size", "pipeline_model_parallel_size"} <= arguments.keys():
            raise self._unknown("unknown parallel sizes")
        self._tensor_size: int = arguments["tensor_model_parallel_size"]
        self._stages: int = arguments["pipeline_model_parallel_size"]
        keys: dict[tuple[int, int], dict[int, str]] = {}
        for key in reader.shapes:
            match = _FLAT.fullmatch(key)
            if match is not None and match[4] == "param":
                buckets = keys.setdefault((int(match[1]), int(match[2])), {})
                buckets[int(match[3])] = key.removesuffix(".param")
        self._buckets = {place: [found[index] for index in sorted(found)] for place, found in keys.items()}
        self._num_chunks = len({buffer for _, buffer in keys})
        self._layout = self._layout_of(arguments)
        self._places = self._with_known_order()

    def read(self, kind: str, name: Name) -> Tensor:
        """As `MegatronCheckpoint.read`."""
        parts = [self._part(kind, name, rank, self._places) for rank in range(self._ranks_of(name))]
        whole = merged(name.key, parts, is_gated=self._checkpoint.is_gated)
        if kind == "master":
            self._checkpoint.checked(self._checkpoint.in_model_dtype(whole), self._checkpoint.weight(name), name)
        return whole

    def _unknown(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self._checkpoint.folder} holds the optimizer's buffers of {what}; save it again with "
            f"--dist-ckpt-optim-fully-reshardable, or give --no-load-optim"
        )

    def _layout_of(self, arguments: Mapping[str, Any]) -> PipelineLayout:
        """The layers of every stage and model chunk, by Megatron's arguments."""
        division = {name: arguments[name] for name in _DIVISION if arguments.get(name)}
        unread = next((name for name, value in division.items() if not isinstance(value, _DIVISION[name])), None)
        if unread is not None:
            raise self._unknown(f"unknown stages ({unread} cannot be read)")
        parallel = ParallelConfig(
            pipeline_model_parallel_size=self._stages,
            num_virtual_stages_per_pipeline_rank=self._num_chunks if self._num_chunks > 1 else None,
            **division,
        )
        try:
            return pipeline_layout(parallel, _num_layers(self._checkpoint.shapes))
        except ValueError as error:
            raise self._unknown(f"unknown stages ({error})") from None

    def _ranks_of(self, name: Name) -> int:
        return 1 if shared_axis(name.key) is None else self._tensor_size

    def _part(self, kind: str, name: Name, rank: int, places: Mapping[Name, FlatPlace]) -> Tensor:
        stage, chunk, bucket, start = places[name]
        key = self._buckets[stage * self._tensor_size + rank, chunk][bucket]
        shape = local_shape(name.key, self._shape(name), self._tensor_size)
        value = torch.empty(shape)
        stored = f"{key}.{'param' if kind == 'master' else kind}"
        self._reader.read(stored, [Wanted((start,), (value.numel(),), value.view(-1))])
        return value

    def _shape(self, name: Name) -> Shape:
        shape = self._checkpoint.shapes[name.key]
        return shape if name.layer is None else shape[1:]

    def _with_known_order(self) -> dict[Name, FlatPlace]:
        """(stage, chunk, bucket, start) of every parameter, in the order under which masters are the weights."""
        problem: Exception | None = None
        for order in (order for each in ARCHITECTURES for order in each.layer_orders):
            try:
                places = dict(self._all_places(order))
                for name in places:
                    if name.layer in (None, 0) and name.key in self._checkpoint.shapes:
                        self._check(name, places)
                return places
            except (CheckpointError, IndexError, RuntimeError) as error:  # other sizes than a buffer's
                problem = error
        assert problem is not None
        raise CheckpointError(
            f"{self._checkpoint.folder} holds the optimizer's buffers in an order that is not known ({problem}); save "
            f"it again with --dist-ckpt-optim-fully-reshardable, or give --no-load-optim"
        ) from problem

    def _check(self, name: Name, places: Mapping[Name, FlatPlace]) -> None:
        weight = self._checkpoint.weight(name)
        own = part_of(name.key, weight, 0, self._ranks_of(name), is_gated=self._checkpoint.is_gated)
        master = self._checkpoint.in_model_dtype(self._part("master", name, 0, places))
        self._checkpoint.checked(master, own, name)

    def _all_places(self, order: Sequence[str]) -> Iterator[tuple[Name, FlatPlace]]:
        shapes = self._checkpoint.shapes
        for stage in range(self._stages):
            for chunk in range(self._num_chunks):
                names = chunk_names(
                    list(shapes),
                    self._layout.chunks[stage][chunk],
                    order,
                    is_first=stage == chunk == 0,
                    is_last=stage == self._stages - 1 and chunk == self._num_chunks - 1,
                    ties=self._checkpoint.ties_embeddings,
                )
                whole = [shapes[self._key_of(name)][0 if name.layer is None else 1 :] for name in names]
                local = [
                    local_shape(name.key, shape, self._tensor_size) for name, shape in zip(names, whole, strict=True)
                ]
                keys = self._buckets.get((stage * self._tensor_size, chunk))
                if keys is None:
                    raise CheckpointError(f"stage {stage} has no buffer {chunk}")
                sizes = [self._reader.shapes[f"{key}.param"][0] for key in keys]
                for name, place in zip(names, places_in_buckets(numels_of(local), sizes), strict=True):
                    yield name, (stage, chunk, *place)

    def _key_of(self, name: Name) -> str:
        """Where the shape stands: the last stage's copy of the embedding has none of its own."""
        is_copy = name.key == OUTPUT_LAYER and name.key not in self._checkpoint.shapes
        return WORD_EMBEDDING if is_copy else name.key


def _num_layers(shapes: Mapping[str, Shape]) -> int:
    return next(shape[0] for key, shape in shapes.items() if key.startswith(LAYERS))
