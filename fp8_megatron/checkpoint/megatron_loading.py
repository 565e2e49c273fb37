"""Loading a checkpoint of Megatron-LM into a run: masters, moments, step count, iteration and consumed samples."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ..config.schema import ModelConfig
from ..optimizer.split_state import SplitSpaceState
from ..optimizer.state import SpaceState
from ..sharding.partition import Slot
from .files import CheckpointError, candidates, is_megatron_checkpoint, is_torch_files, iteration_folder
from .megatron_checkpoint import MOMENTUM, STATES, MegatronCheckpoint
from .megatron_layout import Name
from .megatron_torch_dist import TorchDist
from .megatron_torch_files import TorchFiles
from .placement import Placement
from .ranks import Ranks
from .run_state import MASTER, Progress, Resumable
from .same_model import (
    first_difference,
    settings_of_arguments,
    unread_tensor,
    unsupported_argument,
)

logger = logging.getLogger(__name__)


def open_megatron_checkpoint(folder: Path) -> MegatronCheckpoint:
    """The checkpoint in a folder of one iteration.

    Raises:
        CheckpointError: as `MegatronCheckpoint`.
    """
    return TorchFiles(folder) if is_torch_files(folder) else TorchDist(folder)


class WhatToLoad(Protocol):
    """What `loading.LoadOptions` says."""

    @property
    def iteration(self) -> int | None:
        """Which checkpoint; None: the newest."""

    @property
    def finetune(self) -> bool:
        """Weights alone, from iteration 0."""

    @property
    def optimizer(self) -> bool:
        """Moments and step count."""


def megatron_folder(root: Path, iteration: int | None) -> Path | None:
    """The checkpoint that would be loaded, if Megatron-LM wrote it."""
    folders = [iteration_folder(root, number) for number in candidates(root, iteration)]
    return folders[0] if folders and is_megatron_checkpoint(folders[0]) else None


def load_megatron_checkpoint(folder: Path, state: Resumable, options: WhatToLoad) -> Progress:
    """Take over a run of Megatron-LM. Called by all ranks together.

    Random states and amax histories start anew. Without moments the masters are the weights, as in Megatron-LM. A model
    that is evaluated takes the masters, if the checkpoint has them.

    Raises:
        CheckpointError: damaged, of another model, or of a kind that is not read. A fault of the description is the
            same error on every rank.
    """
    loads_optimizer = options.optimizer and not options.finetune
    loads_moments = loads_optimizer and state.is_trained
    saved = _checked(folder, state, loads_moments=loads_moments, finetune=options.finetune)
    takes_masters = loads_moments or (loads_optimizer and _moments_problem(saved) is None)
    kinds = (MASTER, *_states_to_read(saved, state)) if loads_moments else (MASTER,)
    state.optimizer.wait_for_copies()
    for space, slot, placement in state.slots():
        for kind in filter(space.holds, kinds):
            if kind == MOMENTUM and not saved.holds(kind, _name(placement)):
                continue
            stored = kind if takes_masters else "weight"
            store(space, slot, kind, _local(saved, stored, placement, state.vocab_size).to(state.device))
    for space in state.optimizer.states:
        space.derive_weights()
    for buffer, placement in state.buffers():
        buffer.copy_(_local(saved, "weight", placement, state.vocab_size))
    if options.finetune:
        return Progress()
    if set(STATES) <= set(kinds):
        state.optimizer.step_count.fill_(saved.step_count)
    if state.topology.rank == 0:
        logger.info("%s is Megatron-LM's: random states and amax histories start anew", folder)
    return Progress(
        saved.iteration,
        saved.consumed_samples,
        scheduled_samples=saved.scheduled_samples,
        consumed_valid_samples=saved.consumed_valid_samples,
    )


def _checked(folder: Path, state: Resumable, *, loads_moments: bool, finetune: bool) -> MegatronCheckpoint:
    """The checkpoint, once it is known that this run can take it over.

    Raises:
        CheckpointError: it cannot; the same error on every rank.
    """
    ranks = Ranks(state.topology)
    saved: MegatronCheckpoint | None = None
    problem: str | None = None
    try:
        saved = open_megatron_checkpoint(folder)
        problem = differing_argument(saved, state.config.model, finetune=finetune) or _tensor_problem(saved, state)
    except CheckpointError as error:
        problem = str(error)
    everyones = ranks.everyones((problem, {placement.key for placement in state.placements()}))
    _raise_first(text for text, _ in everyones)
    assert saved is not None
    _raise_first([unread_tensor(folder, saved.shapes, set().union(*(keys for _, keys in everyones)))])
    if loads_moments:
        _raise_first(ranks.everyones(_moments_problem(saved) or _states_problem(saved, state)))
    return saved


def _raise_first(problems: Iterable[str | None]) -> None:
    for problem in problems:
        if problem is not None:
            raise CheckpointError(problem)


def _tensor_problem(saved: MegatronCheckpoint, state: Resumable) -> str | None:
    """Why a parameter of this rank cannot be read; None if all can."""
    for placement in state.placements():
        shape, own = saved.shapes.get(placement.key), placement.region.global_shape
        if shape is None:
            return f"{saved.folder} has no tensor {placement.key!r}, which this model has: it is another model's"
        enough_rows = placement.has_vocabulary_rows and shape[1:] == own[1:] and shape[0] >= state.vocab_size
        if shape != own and not enough_rows:
            return f"{saved.folder}: {placement.key} has shape {shape}, this model's is {own}; give that model's flags"
    return None


def _moments_problem(saved: MegatronCheckpoint) -> str | None:
    """Why the optimizer's state cannot be read; None if it can, as far as is known before."""
    if not saved.has_moments:
        return f"{saved.folder} holds weights alone; give --finetune, or --no-load-optim"
    try:
        saved.check_moments()
    except CheckpointError as error:
        return str(error)
    return None


def _states_problem(saved: MegatronCheckpoint, state: Resumable) -> str | None:
    """Why this run's optimizer has nothing of the states; None if it has."""
    own = state.kinds[1:]
    if set(STATES) <= set(own) <= {*STATES, MOMENTUM}:
        return None
    return (
        f"{saved.folder} holds {' and '.join(STATES)}, and --optimizer {state.config.optimizer.optimizer} needs "
        f"{' and '.join(own) or 'none'}; give --finetune, or --no-load-optim"
    )


def _states_to_read(saved: MegatronCheckpoint, state: Resumable) -> list[str]:
    """The states that are read, of parameters that have them in the checkpoint. Others start anew: Adam counts its
    steps, so all of its states do if a parameter lacks one. The log says so. Called by all ranks together.
    """
    lacking: dict[str, list[str]] = {kind: [] for kind in state.kinds[1:]}
    for space, _, placement in state.slots():
        for kind in filter(space.holds, lacking):
            if not saved.holds(kind, _name(placement)):
                lacking[kind].append(str(_name(placement)))
    for found in Ranks(state.topology).everyones(lacking):
        for kind, names in found.items():
            lacking[kind] = list(dict.fromkeys([*lacking[kind], *names]))
    for kind, names in lacking.items():
        if names and state.topology.rank == 0:
            text = "%s has no %s of %d parameters, such as %s: under --optimizer %s %s anew"
            what = "theirs starts" if kind == MOMENTUM else "all of it and the count of steps start"
            logger.warning(text, saved.folder, kind, len(names), names[0], state.config.optimizer.optimizer, what)
    is_whole = not any(lacking[kind] for kind in STATES)
    return [kind for kind in lacking if kind == MOMENTUM or is_whole]


def _name(placement: Placement) -> Name:
    """A parameter in the checkpoint."""
    return Name(placement.key, placement.region.stacked[0][0] if placement.region.stacked else None)


def differing_argument(saved: MegatronCheckpoint, model: ModelConfig, *, finetune: bool) -> str | None:
    """The error's line for the first of Megatron's arguments that makes the weights compute something else."""
    unsupported = unsupported_argument(saved.folder, saved.arguments)
    if unsupported is not None:
        return unsupported
    if not saved.ties_embeddings and not model.untie_embeddings_and_output_weights:
        return f"{saved.folder} has an LM head of its own; give --untie-embeddings-and-output-weights"
    settings = settings_of_arguments(saved.arguments)
    found = first_difference(settings, model, finetune=finetune)
    return None if found is None else found.sentence(saved.folder, "this run", f"give {found.flag}")


def _local(saved: MegatronCheckpoint, kind: str, placement: Placement, vocab_size: int) -> Tensor:
    """This rank's part of a parameter, FP32."""
    return local_part(saved.read(kind, _name(placement)), placement, vocab_size)


def local_part(whole: Tensor, placement: Placement, vocab_size: int) -> Tensor:
    """This rank's part of a whole parameter, which may have another number of rows of padding."""
    first_axis = len(placement.region.stacked)
    if placement.has_vocabulary_rows and whole.shape[0] != placement.region.global_shape[0]:
        whole = _repadded(whole, vocab_size, placement.region.global_shape[0])
    flat = torch.empty(math.prod(placement.region.shape))
    for part in placement.region.rectangles(0, flat.numel()):
        box = tuple(
            slice(start, start + size)
            for start, size in zip(part.offset[first_axis:], part.sizes[first_axis:], strict=True)
        )
        flat[part.start : part.start + part.numel] = whole[box].reshape(-1)
    return flat.view(placement.region.shape)


def store(space: SpaceState, slot: Slot, kind: str, local: Tensor) -> None:
    """Take this rank's part of a parameter, FP32 on the device, as a kind of its state."""
    if kind == MASTER and isinstance(space, SplitSpaceState):
        space.set_master(slot, local.view(slot.param.shape), None)
        return
    flat = local.reshape(-1)
    for fragment in space.space.fragments(slot):
        part = torch.zeros(fragment.length, device=local.device)
        values = flat[fragment.slot_start : fragment.slot_start + fragment.length]
        part[: values.numel()] = values
        space.part(kind, slot, fragment).store_(part)


def _repadded(whole: Tensor, vocab_size: int, num_rows: int) -> Tensor:
    """Other padding rows: fewer, or more like the last one; zeros where there was none."""
    if num_rows <= whole.shape[0]:
        return whole[:num_rows]
    last = whole[-1:] if whole.shape[0] > vocab_size else torch.zeros_like(whole[-1:])
    return torch.cat([whole, last.expand(num_rows - whole.shape[0], -1)])
