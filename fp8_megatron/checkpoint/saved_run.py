"""A checkpoint on disk as one rank reads it: its description, its settings, and its tensors by place."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import yaml
from torch import Tensor

from ..config.io import load_config, stated_settings
from ..config.parallel import LAYER_SHARES
from ..config.schema import Config, ModelConfig
from .description import check_rank_tensors, read_description
from .encoding import Encoded
from .files import CONFIG, CheckpointError, rank_file, read_file
from .manifest import NUM_READERS, in_order, read_manifest
from .placement import Placement
from .run_state import STAGES, Resumable, below, prefix_of, topology_of
from .same_model import first_difference, model_settings
from .saved_blocks import SavedBlocks
from .torch_dist import PlannedRead, TorchDistReader, Wanted

#: Bytes that are read ahead; the last read may exceed this.
_READ_AHEAD_BYTES = 1 << 28


_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Elements:
    """Elements [start, start + length) of a rank's flat parameter.

    Attributes:
        kind: of `Resumable.kinds`.
        blocks: takes their scale blocks as they were saved.
    """

    placement: Placement
    kind: str
    start: int
    length: int
    blocks: SavedBlocks | None = None


def differing_setting(folder: Path, model: ModelConfig, *, finetune: bool = False) -> str | None:
    """The error's line for the first saved setting that makes the same weights compute something else.

    A setting that cannot be read counts as equal. Fine-tuning may use another rotary base, for a longer context.
    """
    saved = saved_model_settings(folder)
    found = first_difference(saved, model, finetune=finetune)
    return None if found is None else found.sentence(folder, "this run", f"give {found.flag}, as in {CONFIG} there")


def saved_model_settings(folder: Path) -> dict[str, Any]:
    """The `model_settings` of a checkpoint's ``config.yaml``."""
    stated = saved_settings(folder, "model")
    found = model_settings(stated)
    return {**found, "use_te_activation_func": True} if _has_one_gelu(stated) else found


def saved_config(folder: Path) -> Config:
    """The configuration of the run that saved a checkpoint.

    Raises:
        ConfigError: ``config.yaml`` cannot be read.
    """
    config = load_config(folder / CONFIG)
    if config.model.activation.kind != "gelu_erf" or not _has_one_gelu(stated_settings(folder / CONFIG)):
        return config
    return replace(config, model=replace(config.model, use_te_activation_func=True))


def _has_one_gelu(stated: Collection[str]) -> bool:
    """Whether a version saved these settings that knew GELU's tanh form alone."""
    return bool(stated) and "bias_gelu_fusion" not in stated


def saved_settings(folder: Path, section: str) -> dict[str, Any]:
    """A section of ``config.yaml``, unchecked; empty if it is missing or not a mapping."""
    try:
        content = yaml.safe_load(read_file(folder / CONFIG))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    found = content.get(section) if isinstance(content, dict) else None
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class _IncomingValues:
    """Values on their way from a checkpoint.

    Attributes:
        flat: FP32 [length], filled by `plan`.
        repeated: (a row that `plan` fills, the rows that repeat it).
    """

    flat: Tensor
    plan: list[PlannedRead]
    repeated: list[tuple[Tensor, Tensor]]

    def finished(self) -> Tensor:
        """All values, after every planned read."""
        for row, target in self.repeated:
            target.copy_(row.expand_as(target))
        return self.flat


@dataclass(frozen=True)
class _Loaded:
    """A chunk for a part; without one the part is complete."""

    part: _IncomingValues
    planned: PlannedRead | None = None
    value: Tensor | Encoded | None = None


class SavedRun:
    """One checkpoint, read by one rank.

    Raises:
        CheckpointError: damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.description = read_description(folder)
        self.topology: dict[str, Any] = self.description["topology"]
        self._files = {record.name for record in read_manifest(folder)}
        self.reader = TorchDistReader(folder, self._files)
        self._rank_tensors: dict[str, dict[str, Tensor]] = {}

    @property
    def layout_text(self) -> str:
        """The layout in words."""
        return ", ".join(f"{name}={value}" for name, value in self.topology.items() if value is not None)

    @property
    def num_replicas(self) -> int:
        """Ranks that held the same parameters; 1 for a model that was converted."""
        return (self.topology.get("data_parallel_size") or 1) * (self.topology.get("context_parallel_size") or 1)

    @property
    def num_stages(self) -> int:
        """Pipeline stages."""
        return int(self.topology.get("pipeline_model_parallel_size") or 1)

    def has_model_layout_of(self, state: Resumable) -> bool:
        """Whether this run cuts the model into the same parts."""
        own = topology_of(state.topology)
        return all(self.topology.get(name) == own.get(name) for name in LAYER_SHARES) and self.has_stages_of(state)

    def has_parameters_of(self, state: Resumable) -> bool:
        """Whether the rank whose tensors `rank_tensors` gives held the parameters of this one. Replicas share the
        matrices of a weight that has several, so they hold the same ones only where they are as many."""
        ours = state.topology
        shares_none = ours.layer_shares.matrices == 1
        return self.has_model_layout_of(state) and (shares_none or self.num_replicas == ours.replicas.size)

    def has_stages_of(self, state: Resumable) -> bool:
        """Whether this run has the same layers on every stage."""
        own = topology_of(state.topology)
        return all(self.topology.get(name) == own.get(name) for name in STAGES)

    def mismatch(self, placement: Placement, vocab_size: int | None, *, finetune: bool = False) -> str | None:
        """Why a parameter cannot be read from this checkpoint. A vocabulary may be padded differently.

        Args:
            finetune: another vocabulary is read as well, if the checkpoint has a row for each of its tokens.
        """
        shape = self.reader.shapes.get(placement.key)
        own = placement.region.global_shape
        if shape is None:
            return (
                f"{self.folder} has no tensor {placement.key!r}, which this model has: it is another model's; give the "
                f"model's flags as they were when it was saved"
            )
        if shape == own:
            return None
        if placement.has_vocabulary_rows and shape[1:] == own[1:] and vocab_size is not None:
            if vocab_size == self.description["vocab_size"] or (finetune and vocab_size <= shape[0]):
                return None
            if finetune:
                return (
                    f"{self.folder}: {placement.key} has {shape[0]} rows, fewer than the vocabulary of {vocab_size} "
                    f"tokens that this run has; give a --vocab-size up to {shape[0]} and its tokenizer"
                )
        return (
            f"{self.folder}: {placement.key} has shape {shape}, this model's is {own}; "
            "load it with the configuration saved beside it (config.yaml)"
        )

    def holds(self, elements: Elements) -> bool:
        """Whether the checkpoint has this kind of state of the parameter."""
        return prefix_of(elements.kind) + elements.placement.key in self.reader.shapes

    def vocabulary_problem(self, vocab_size: int, *, finetune: bool = False) -> str | None:
        """Why a vocabulary of another size cannot take these weights; None if it can.

        Two sizes may be padded to the same rows. Fine-tuning may use rows of the padding for new tokens, or fewer rows.
        """
        saved = self.description["vocab_size"]
        if saved == vocab_size or finetune:
            return None
        return (
            f"{self.folder} was saved with a vocabulary of {saved} tokens, this run has {vocab_size}; give "
            f"--vocab-size {saved} and the tokenizer of that run"
        )

    def read(self, wanted: Iterable[Elements], *, device: torch.device = _CPU) -> Iterator[Tensor]:
        """FP32 [length] of each, on `device` and in order. Threads read later ones while one is decoded and used.

        Padding after a parameter's end is zero. If the saved vocabulary has fewer padding rows, the missing ones repeat
        its last padding row, or are zero if it has none.
        """
        with ThreadPoolExecutor(NUM_READERS) as threads:

            def tasks() -> Iterator[tuple[int, Future[_Loaded]]]:
                for elements in wanted:
                    part = self._part(elements, torch.zeros(elements.length, device=device))
                    for planned in part.plan:
                        yield planned.item.length, threads.submit(self._load, part, planned, device)
                    yield 0, threads.submit(_Loaded, part)

            for loaded in in_order(tasks(), limit_bytes=_READ_AHEAD_BYTES):
                if loaded.planned is None:
                    yield loaded.part.finished()
                else:
                    assert loaded.value is not None
                    loaded.planned.place(loaded.value)

    def _load(self, part: _IncomingValues, planned: PlannedRead, device: torch.device) -> _Loaded:
        if device.type != "cuda":
            return _Loaded(part, planned, self.reader.load(planned.item))
        with torch.cuda.device(device):  # a new thread's device is the first one
            return _Loaded(part, planned, self.reader.load(planned.item, pinned=True))

    def _part(self, elements: Elements, flat: Tensor) -> _IncomingValues:
        """What fills `flat`, FP32 zeros [length]."""
        placement, start = elements.placement, elements.start
        key = prefix_of(elements.kind) + placement.key
        if key not in self.reader.shapes:
            raise CheckpointError(
                f"{self.folder} has no {key}: it holds weights alone; give --finetune, or --no-load-optim"
            )
        wanted: list[Wanted] = []
        repeated: list[tuple[Tensor, Tensor]] = []
        num_rows = self.reader.shapes[key][0] if placement.has_vocabulary_rows else None
        for part in placement.region.rectangles(start, elements.length):
            first = part.start - start
            target = flat[first : first + part.numel]
            if num_rows is None or part.offset[0] + part.sizes[0] <= num_rows:
                wanted.append(Wanted(part.offset, part.sizes, target, elements.blocks, first))
                continue
            target = target.view(part.sizes)
            known = max(0, num_rows - part.offset[0])
            if known:
                wanted.append(Wanted(part.offset, (known, part.sizes[1]), target[:known].view(-1)))
            if self.description["vocab_size"] < num_rows:
                row = flat.new_zeros(part.sizes[1])
                wanted.append(Wanted((num_rows - 1, part.offset[1]), (1, part.sizes[1]), row))
                repeated.append((row, target[known:]))
        return _IncomingValues(flat, self.reader.plan(key, wanted), repeated)

    def rank_tensors(self, state: Resumable, prefix: str) -> dict[str, Tensor]:
        """The tensors that the rank in this rank's place saved under a prefix. Replicas share them, except for
        saturated fractions.
        """
        ours = state.topology
        place = (ours.tp.rank(), ours.pp.rank(), ours.replicas.rank if self.num_replicas == ours.replicas.size else 0)
        if not self.has_model_layout_of(state):
            place = (0, 0, 0)
        return below(prefix, self._tensors_of(*place))

    def rank_tensor(self, state: Resumable, name: str) -> Tensor | None:
        """One of these tensors, or None."""
        return self.rank_tensors(state, name).get("")

    def stage_tensors(self, stage: int, prefix: str) -> dict[str, Tensor]:
        """The tensors that the first rank of a pipeline stage saved under a prefix."""
        return below(prefix, self._tensors_of(0, stage, 0))

    def stage_histories(self, stage: int) -> dict[int, dict[str, Tensor]]:
        """The amax histories of a pipeline stage by model chunk. Its ranks share them."""
        found: dict[int, dict[str, Tensor]] = {}
        for name, tensor in self.stage_tensors(stage, "amax_history.").items():
            chunk, _, key = name.partition("/")
            found.setdefault(int(chunk), {})[key] = tensor
        return found

    def histories(self) -> list[dict[str, Tensor]]:
        """The amax histories of all model chunks."""
        return [history for stage in range(self.num_stages) for history in self.stage_histories(stage).values()]

    def _tensors_of(self, tensor_rank: int, pipeline_rank: int, data_rank: int) -> dict[str, Tensor]:
        name = rank_file(tensor_rank, pipeline_rank, data_rank)
        if name not in self._files:
            return {}  # a converted model has none
        if name not in self._rank_tensors:
            path = self.folder / name
            try:
                tensors = safetensors.torch.load(read_file(path))
            except Exception as error:  # safetensors' own error type derives from nothing narrower
                raise CheckpointError(f"checkpoint file {path} is damaged ({error}); use another iteration") from error
            check_rank_tensors(path, tensors)
            self._rank_tensors[name] = tensors
        return self._rank_tensors[name]
