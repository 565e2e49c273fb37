"""Megatron-LM's ``torch``: a folder ``mp_rank_<tensor>_<pipeline>`` for each model-parallel rank.

It has ``model_optim_rng.pt``, and ``distrib_optim.pt`` from a distributed optimizer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

from ..config.model import ModelConfig
from ..models.keys import OUTPUT_LAYER
from ..models.registry import architecture_of, shared_axis
from ..sharding.region import Shape
from .files import CheckpointError, megatron_rank_folder
from .megatron_checkpoint import STATES, MegatronCheckpoint
from .megatron_layout import Name, local_shape, merged, places_in_buffer
from .pickles import mapping, read_megatron_file
from .same_model import settings_of_arguments


class TorchFiles(MegatronCheckpoint):
    """Megatron's ``torch``: files of `torch.save`, one folder for each model-parallel rank."""

    def __init__(self, folder: Path) -> None:
        self._tensor_size, self._stages = _sizes(folder)
        self._content = lru_cache(maxsize=None)(lambda tensor, stage: _content(folder, tensor, stage, self._stages))
        super().__init__(folder, self._content(0, 0))
        matrices = architecture_of(ModelConfig(**settings_of_arguments(self.arguments))).matrices_name
        if matrices is not None:  # their names are others
            raise CheckpointError(
                f"{folder} holds {matrices} in the format torch; save it again with --ckpt-format torch_dist"
            )
        if self._tensor_size > 1 and "swiglu" not in self.arguments:
            raise CheckpointError(
                f"{folder} has no arguments of Megatron-LM, which say whether an MLP has two halves: its "
                f"{self._tensor_size} tensor-parallel parts cannot be joined; save it again with its arguments (args)"
            )
        self._places: dict[Name, tuple[int, int, str]] = {}
        first_layer = 0
        num_chunks = len(_chunks(self._content(0, 0), folder))
        for chunk in range(num_chunks):
            for stage in range(self._stages):
                first_layer += self._add(stage, chunk, first_layer)
        self.num_layers = first_layer
        self._check_layers()
        self._shapes = self._whole_shapes()
        self._state = lru_cache(maxsize=None)(self._state_of_rank)

    @property
    def shapes(self) -> Mapping[str, Shape]:
        return self._shapes

    @property
    def has_moments(self) -> bool:
        return self.optimizer is not None and (
            isinstance(self.optimizer, list)
            or (megatron_rank_folder(self.folder, 0, 0, self._stages) / "distrib_optim.pt").is_file()
            or _inner_optimizer(self.optimizer) is not None
        )

    def check_moments(self) -> None:
        self._state(0, 0)

    def stored(self, kind: str, name: Name) -> Tensor:
        stage, chunk, local = self._places[name]
        size = self._tensor_size if shared_axis(name.key) is not None else 1
        parts = []
        for rank in range(size):
            weight = self._weight(rank, name)
            if kind == "weight":
                parts.append(weight)
                continue
            state = self._state(rank, stage).get((chunk, local), {})
            if kind not in state:
                raise CheckpointError(f"{self.folder} has no {kind} of {name}; give --no-load-optim or --finetune")
            value = state[kind].view(weight.shape)
            parts.append(self.checked(value, weight, name) if kind == "master" else value)
        return merged(name.key, [part.float() for part in parts], is_gated=self.is_gated)

    def _add(self, stage: int, chunk: int, first_layer: int) -> int:
        """Enter the parameters of a model chunk; how many layers it has."""
        layers = set()
        for local in _chunks(self._content(0, stage), self.folder)[chunk]:
            name = Name.of(local, first_layer)
            if name.layer is not None:
                layers.add(name.layer)
            is_embedding = name.key == OUTPUT_LAYER and self.ties_embeddings and (stage, chunk) != (0, 0)
            if not is_embedding:  # the last stage's copy of it
                self._places[name] = (stage, chunk, local)
        return len(layers)

    def _check_layers(self) -> None:
        """Raise `CheckpointError` if a layer lacks a parameter that another one has."""
        for key in sorted({name.key for name in self._places if name.layer is not None}):
            for layer in range(self.num_layers):
                if Name(key, layer) not in self._places:
                    raise CheckpointError(
                        f"{self.folder} has {self.num_layers} layers and no {Name(key, layer)}: a file is damaged, or "
                        f"of another checkpoint; copy the folder again"
                    )

    def _weight(self, rank: int, name: Name) -> Tensor:
        """A tensor-parallel rank's part of a parameter.

        Raises:
            CheckpointError: the rank has none, or its shape is not that of the other ranks.
        """
        stage, chunk, local = self._places[name]
        chunks = _chunks(self._content(rank, stage), self.folder)
        found = chunks[chunk].get(local) if chunk < len(chunks) else None
        whole = self._shapes[name.key]
        expected = local_shape(name.key, whole if name.layer is None else whole[1:], self._tensor_size)
        if found is None or tuple(found.shape) != expected:
            own = "is missing" if found is None else f"has shape {tuple(found.shape)}"
            raise CheckpointError(
                f"{megatron_rank_folder(self.folder, rank, stage, self._stages)}: {local} {own}, and is {expected} on "
                f"other ranks: the file is damaged, or of another checkpoint; copy it again"
            )
        return found

    def _whole_shapes(self) -> dict[str, Shape]:
        shapes: dict[str, Shape] = {}
        for name, (stage, chunk, local) in self._places.items():
            own = _chunks(self._content(0, stage), self.folder)[chunk][local].shape
            axis = shared_axis(name.key)
            shape = tuple(size * (self._tensor_size if index == axis else 1) for index, size in enumerate(own))
            whole = shape if name.layer is None else (self.num_layers, *shape)
            if shapes.setdefault(name.key, whole) != whole:
                raise CheckpointError(
                    f"{self.folder}: {name} has shape {shape}, and is {shapes[name.key][1:]} in other layers: a file "
                    f"is damaged, or of another checkpoint; copy the folder again"
                )
        return shapes

    def _read_state(self, rank: int, stage: int) -> dict[tuple[int, str], dict[str, Tensor]]:
        chunks = _chunks(self._content(rank, stage), self.folder)
        file = megatron_rank_folder(self.folder, rank, stage, self._stages) / "distrib_optim.pt"
        if file.is_file():
            return dict(self._distributed_state(file, chunks))
        params = [(index, name, value) for index, chunk in enumerate(chunks) for name, value in chunk.items()]
        return dict(self._plain_state(self._content(rank, stage).get("optimizer"), params))

    def _state_of_rank(self, rank: int, stage: int) -> dict[tuple[int, str], dict[str, Tensor]]:
        """Masters and moments of a rank's parameters by chunk and name.

        Raises:
            CheckpointError: they are of another form.
        """
        try:
            return self._read_state(rank, stage)
        except CheckpointError:
            raise
        except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError) as error:
            folder = megatron_rank_folder(self.folder, rank, stage, self._stages)
            raise CheckpointError(
                f"{folder}: the optimizer's state is of another form ({error!r}); give --no-load-optim, or --finetune"
            ) from error

    def _distributed_state(
        self, file: Path, chunks: list[dict[str, Tensor]]
    ) -> Iterator[tuple[tuple[int, str], dict[str, Tensor]]]:
        content = read_megatron_file(file)
        if isinstance(content, list) and len(content) == 1:
            content = content[0]
        content = mapping(content, "its content", file)
        for index, chunk in enumerate(chunks):
            buffers = content.get(index)
            if not isinstance(buffers, dict) or len(buffers) != 1 or index + 1 == len(chunks) < len(content) - 1:
                raise CheckpointError(
                    f"{file} has other buffers than one for each model chunk: parameters of several dtypes, or an "
                    f"earlier format; give --no-load-optim"
                )
            flat = mapping(next(iter(buffers.values())), "a buffer", file)
            numels = [value.numel() for value in chunk.values()]
            try:
                starts = places_in_buffer(numels, flat["param"].numel())
            except (CheckpointError, KeyError) as error:
                raise CheckpointError(f"{file}: {error}; give --no-load-optim") from None
            kinds = {"master": flat["param"], **{kind: flat[kind] for kind in STATES}}
            for name, start, numel in zip(chunk, starts, numels, strict=True):
                yield (index, name), {kind: value[start : start + numel] for kind, value in kinds.items()}

    def _plain_state(
        self, optimizer: Any, params: list[tuple[int, str, Tensor]]
    ) -> Iterator[tuple[tuple[int, str], dict[str, Tensor]]]:
        """The state of an optimizer that is not distributed: by number, in groups with and without weight decay."""
        if isinstance(optimizer, list):
            raise CheckpointError(
                f"{self.folder} holds {len(optimizer)} optimizers in the format torch; save it again with "
                f"--ckpt-format torch_dist, or give --no-load-optim"
            )
        inner = _inner_optimizer(optimizer)
        if inner is None:
            return
        groups, state = inner["param_groups"], inner["state"]
        masters = optimizer.get("fp32_from_fp16_params", [[None] * len(group["params"]) for group in groups])
        decayed = [each for each in params if each[2].dim() > 1 and not each[1].endswith(".bias")]
        others = [each for each in params if each[2].dim() <= 1 or each[1].endswith(".bias")]
        for group, own in zip(groups, masters, strict=True):
            shapes = [state[number][STATES[0]].shape for number in group["params"]]
            fits = [each for each in (params, decayed, others) if [param[2].shape for param in each] == shapes]
            if not fits:
                raise CheckpointError(
                    f"{self.folder}: a group of the optimizer has other parameters than the model's matrices or "
                    f"vectors; give --no-load-optim"
                )
            for number, master, (chunk, name, weight) in zip(group["params"], own, fits[0], strict=True):
                kept = {kind: state[number][kind] for kind in STATES}
                yield (chunk, name), {"master": weight if master is None else master, **kept}


def _sizes(folder: Path) -> tuple[int, int]:
    """Tensor- and pipeline-parallel sizes, from the names of the ranks' folders."""
    found = [re.fullmatch(r"mp_rank_(\d+)(?:_(\d+))?", path.name) for path in folder.glob("mp_rank_*")]
    ranks = {(int(match[1]), int(match[2] or 0)) for match in found if match is not None}
    sizes = 1 + max(tensor for tensor, _ in ranks), 1 + max(stage for _, stage in ranks)
    if len(ranks) != sizes[0] * sizes[1]:
        raise CheckpointError(
            f"{folder} has {len(ranks)} folders mp_rank_* of {sizes[0]} × {sizes[1]}; copy the others"
        )
    return sizes


def _content(folder: Path, rank: int, stage: int, stages: int) -> dict[str, Any]:
    path = megatron_rank_folder(folder, rank, stage, stages) / "model_optim_rng.pt"
    return mapping(read_megatron_file(path), "its content", path)


def _chunks(content: dict[str, Any], folder: Path) -> list[dict[str, Tensor]]:
    """The model chunks of a rank: parameters by name, in the order of the modules."""
    keys = ["model"] if "model" in content else [f"model{index}" for index in range(100) if f"model{index}" in content]
    chunks = [mapping(content[key], key, folder) for key in keys]
    foreign = next(
        (name for chunk in chunks for name in chunk if not isinstance(name, str) or not name.isprintable()), ""
    )
    if foreign != "":
        raise CheckpointError(f"{folder} is damaged: its model names a parameter {foreign!r}; copy it again")
    if not chunks or any("language_model" in chunk for chunk in chunks):
        raise CheckpointError(
            f"{folder} holds a model from before megatron-core; convert it with Megatron's tools/checkpoint/convert.py "
            f"--saver core"
        )
    return [
        # Transformer Engine's layers keep their FP8 state as a tensor of bytes, which is no parameter.
        {name: value for name, value in chunk.items() if isinstance(value, Tensor) and "_extra_state" not in name}
        for chunk in chunks
    ]


def _inner_optimizer(optimizer: Any) -> dict[str, Any] | None:
    """The state of torch's optimizer, with state by number; None if there is none."""
    inner = optimizer.get("optimizer", optimizer) if isinstance(optimizer, dict) else None
    return inner if isinstance(inner, dict) and inner.get("state") and "param_groups" in inner else None
