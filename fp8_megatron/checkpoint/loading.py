"""Loading: verify a checkpoint, check that it fits this model, and give every rank its part, for any saved layout."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ..config.model import ModelConfig
from ..mcore.runtime import set_rng_states
from ..optimizer.split_state import SplitSpaceState
from ..optimizer.state import SpaceState
from ..sharding.partition import Fragment, Slot
from ..update_rules import RULES, shares_rule
from .files import CheckpointError, candidates, iteration_folder, saved_iterations, unfinished_folders
from .manifest import check_files, problem_with, read_manifest
from .megatron_loading import load_megatron_checkpoint, megatron_folder
from .placement import Placement
from .ranks import Ranks
from .run_state import (
    MASTER,
    SLOTS,
    Progress,
    Resumable,
    autoscales_of,
    below,
    set_autoscales,
)
from .same_model import unread_tensor
from .saved_blocks import SavedBlocks
from .saved_run import Elements, SavedRun, differing_setting, saved_settings

logger = logging.getLogger(__name__)


class FirstWeights(Protocol):
    """Makes the first weights of a model of the checkpoint of another one."""

    def problem_of(self, folder: Path, model: ModelConfig) -> str | None:
        """The error's line if a checkpoint is not of a model that it takes, as far as its settings tell."""

    def load(self, folder: Path, state: Resumable) -> Progress:
        """Fill the masters of `state`. Called by all ranks together.

        Raises:
            CheckpointError: damaged, or not of such a model; the same on every rank.
        """


@dataclass(frozen=True)
class LoadOptions:
    """What to load from a checkpoint.

    Attributes:
        iteration: which one (--ckpt-step); None takes the latest complete one.
        finetune: load weights only, and start from iteration 0.
        optimizer: its states and step count (--no-load-optim leaves them at zero). A model that is evaluated has none.
        rng: states of random generators (--no-load-rng).
        first_weights: what makes this model's weights of the checkpoint; with `finetune`. None: they are in it.
    """

    iteration: int | None = None
    finetune: bool = False
    optimizer: bool = True
    rng: bool = True
    first_weights: FirstWeights | None = None


def load_checkpoint(root: Path, state: Resumable, options: LoadOptions | None = None) -> Progress | None:
    """Resume from a checkpoint under `root`; None if there is none. Called by all ranks together.

    It may be one of Megatron-LM (`megatron_loading`).

    A damaged checkpoint is reported, and the next older one is taken. Under the layout that it was saved with, the next
    steps are bitwise equal to those of the run that saved it. Under another layout the values are the same, but random
    states start anew.

    Raises:
        CheckpointError: no complete checkpoint is left, or it belongs to another model (names the first tensor or
            setting that differs, with both shapes or values). The error is the same on every rank.
    """
    options = options or LoadOptions()
    theirs = Ranks(state.topology).first_says(lambda: megatron_folder(root, options.iteration))
    if theirs is not None and options.first_weights is None:
        return load_megatron_checkpoint(theirs, state, options)
    folder = theirs or _choose(root, state, options.iteration)
    if folder is None:
        return None
    if options.first_weights is not None:
        return options.first_weights.load(folder, state)
    saved = SavedRun(folder)
    _check_model(saved, state, finetune=options.finetune)
    loads_state = options.optimizer and not options.finetune and state.is_trained
    starts_anew = loads_state and _has_other_rule(saved, state)
    # AdamW counts its steps: with moments that are new for some parameters, all of them start anew.
    loads_state &= not starts_anew or RULES[state.config.optimizer.optimizer].rest is not None
    takes_scales = saved.has_parameters_of(state)
    wanted = [
        item
        for item in _state_to_read(state, state.kinds if loads_state else (MASTER,))
        if not starts_anew or saved.holds(item.elements)
    ]
    values = saved.read([item.elements for item in wanted], device=state.device)
    state.optimizer.wait_for_copies()
    for item, value in zip(wanted, values, strict=True):
        _take(item, value, saved, state, takes_scales=takes_scales)
    for space in state.optimizer.states:
        space.derive_weights()
    _take_buffers(saved, state)
    if options.finetune:
        return Progress()
    if loads_state:
        _restore_scalars(saved, state)
    _restore_histories(saved, state)
    _restore_autoscales(saved, state)
    if options.rng:
        _restore_rng(saved, state)
    return Progress.of(saved.description)


def _take_buffers(saved: SavedRun, state: Resumable) -> None:
    """Copy what layers keep beside parameters."""
    buffers = list(state.buffers())
    wanted = [Elements(placement, MASTER, 0, buffer.numel()) for buffer, placement in buffers]
    for (buffer, _), value in zip(buffers, saved.read(wanted, device=state.device), strict=True):
        buffer.copy_(value.view_as(buffer))


def _has_other_rule(saved: SavedRun, state: Resumable) -> bool:
    """Whether some parameters start their state anew: the other optimizer has the rule of this one's other parameters.

    Raises:
        CheckpointError: the states are of an update rule that has nothing of this run's; the same on every rank.
    """
    own, holds, mine = state.kinds[1:], saved.description.get("optimizer"), state.config.optimizer.optimizer
    if not holds or set(holds) == set(own):
        return False
    theirs = saved_settings(saved.folder, "optimizer").get("optimizer")
    if not (isinstance(theirs, str) and shares_rule(theirs, mine)):
        raise CheckpointError(
            f"{saved.folder} has another optimizer's state: {', '.join(holds)}, where --optimizer {mine} has "
            f"{', '.join(own) or 'none'}; give --finetune, or --no-load-optim"
        )
    if state.topology.rank == 0:
        what = "all state" if RULES[mine].rest is None else "the state of linear layers' weights"
        text = "%s was saved under --optimizer %s: under %s %s starts anew"
        logger.warning(text, saved.folder, theirs, mine, what)
    return True


@dataclass(frozen=True)
class _StateToRead:
    """A part of a rank's state that is read at once; `fragment` is None for a parameter that is taken whole."""

    space: SpaceState
    slot: Slot
    fragment: Fragment | None
    elements: Elements


def _state_to_read(state: Resumable, kinds: tuple[str, ...]) -> Iterator[_StateToRead]:
    """Some kinds of all of this rank's state."""
    for space, slot, placement in state.slots():
        for kind in filter(space.holds, kinds):
            if kind == MASTER and isinstance(space, SplitSpaceState):
                yield _StateToRead(space, slot, None, Elements(placement, kind, 0, slot.numel))
                continue
            for fragment in space.space.fragments(slot):
                start, length = fragment.slot_start, fragment.length
                is_scaled = space.part(kind, slot, fragment).scales is not None
                blocks = SavedBlocks(length, min(length, slot.numel - start)) if is_scaled else None
                yield _StateToRead(space, slot, fragment, Elements(placement, kind, start, length, blocks))


def _take(wanted: _StateToRead, value: Tensor, saved: SavedRun, state: Resumable, *, takes_scales: bool) -> None:
    """Copy FP32 [elements.length] to its place, rounded to the storage dtype.

    Args:
        takes_scales: store a split master with its saved scale.
    """
    space, slot = wanted.space, wanted.slot
    if wanted.fragment is not None:
        part = space.part(wanted.elements.kind, slot, wanted.fragment)
        part.store_(value)
        if wanted.elements.blocks is not None:
            wanted.elements.blocks.put(part, value)
        return
    assert isinstance(space, SplitSpaceState)
    scale = saved.rank_tensor(state, f"weight_scale/{slot.name}") if takes_scales else None
    if scale is not None and len(scale) != slot.num_matrices:
        raise CheckpointError(
            f"{saved.folder} is damaged: {slot.name} has {len(scale)} scales, not {slot.num_matrices}; use another "
            f"iteration"
        )
    space.set_master(slot, value.view(slot.param.shape), scale)


def read_weights(folder: Path, placements: dict[str, Placement]) -> Iterator[tuple[str, Tensor]]:
    """(name, FP32 value) of this rank's part of every parameter, from a verified checkpoint of any layout.

    Raises:
        CheckpointError: damaged, or of another model.
    """
    check_files(folder)
    saved = SavedRun(folder)
    for placement in placements.values():
        _raise_if(saved.mismatch(placement, None))
    wanted = [Elements(placement, MASTER, 0, math.prod(placement.region.shape)) for placement in placements.values()]
    for (name, placement), value in zip(placements.items(), saved.read(wanted), strict=True):
        yield name, value.view(placement.region.shape)


def _restore_scalars(saved: SavedRun, state: Resumable) -> None:
    """Restore step count and loss scale."""
    optimizer = state.optimizer
    tensors = saved.rank_tensors(state, "")
    if "step_count" not in tensors:
        raise CheckpointError(f"{saved.folder} has an optimizer's state and no step count; give --no-load-optim")
    optimizer.step_count.copy_(tensors["step_count"])
    if optimizer.loss_scale is not None and "loss_scale/scale" in tensors:
        optimizer.loss_scale.load_state_dict(below("loss_scale/", tensors))


def _restore_histories(saved: SavedRun, state: Resumable) -> None:
    """Restore the amax history of each model chunk all of whose slots were saved, by any chunks.

    Checkpoints of earlier versions do not say what their slots are for: they fit the same stages alone.
    """
    at_stage = saved.stage_histories(state.topology.pp.rank()) if saved.has_stages_of(state) else {}
    for index, history in enumerate(state.histories):
        if history is None or history.history is None:
            continue
        keys, values = history.slot_keys(), at_stage.get(index, {})
        if not values or not torch.equal(values.get(SLOTS, keys), keys):
            values = _columns(keys, saved.histories(), history.length)
        if values and values["history"].shape == history.history.shape:
            history.load_state_dict(values, gradient_factor=_gradient_factor(saved, state))


def _columns(keys: Tensor, histories: Iterable[dict[str, Tensor]], length: int) -> dict[str, Tensor]:
    """The columns of `keys` in saved amax histories of `length` steps; empty if one is missing or is there twice."""
    parts = [values for values in histories if SLOTS in values and len(values["history"]) == length]
    saved = [key for values in parts for key in values[SLOTS].tolist()]
    count, place = Counter(saved), {key: column for column, key in enumerate(saved)}
    wanted = keys.tolist()
    if not wanted or any(count[key] != 1 for key in wanted):
        return {}
    columns = torch.tensor([place[key] for key in wanted])
    names = [name for name in ("history", "scale", "known") if all(name in values for values in parts)]
    return {name: torch.cat([values[name] for values in parts], -1)[..., columns] for name in names}


def _gradient_factor(saved: SavedRun, state: Resumable) -> float:
    """How much larger the gradients of a token are than in the run that saved, as a power of two, rounded up.

    The loss is a mean over the tokens of a replica before it is one over replicas. So a token's gradient is in inverse
    proportion to the tokens of a replica. Earlier versions saved no tokens: their gradients are taken for as large.
    """
    before = saved.description.get("tokens_of_next_step")
    if not before:
        return 1.0
    batches = state.config.batch_schedule(state.topology.world_size)
    now = batches.batch_size(saved.description["consumed_samples"]) * state.config.model.seq_length
    ratio = before * state.topology.replicas.size / (now * saved.num_replicas)
    return float(2.0 ** math.ceil(math.log2(ratio)))


def _restore_rng(saved: SavedRun, state: Resumable) -> None:
    """Restore the generators' states if the layout and the kind of device are those of the checkpoint."""
    rng = saved.rank_tensors(state, "rng/") if saved.has_model_layout_of(state) else {}
    try:
        if rng and set_rng_states(rng, state.device):
            return
    except (ValueError, RuntimeError) as error:  # RuntimeError: torch's, of a state that is none
        raise CheckpointError(f"{saved.folder} is damaged: {error}; give --no-load-rng") from error
    if state.topology.rank == 0:
        reason = f"on another kind of device than {state.device.type}" if rng else f"with {saved.layout_text}"
        if not rng and saved.has_model_layout_of(state):
            reason = "without them"
        logger.info("random states start anew: %s was saved %s", saved.folder, reason)


def _restore_autoscales(saved: SavedRun, state: Resumable) -> None:
    """Restore μ of every parameter. If the number of replicas N differs, μ·N is kept, which fixes the headroom of the
    sum of N gradients.
    """
    current = autoscales_of(state.optimizer)
    if not current:
        return
    mine = saved.rank_tensors(state, "autoscale/") if saved.has_model_layout_of(state) else {}
    same_replicas = saved.num_replicas == state.topology.replicas.size
    for name, parts in current.items():
        values = mine.get(name)
        if values is not None and same_replicas and values.shape == (2, len(parts)):
            set_autoscales(state.optimizer, name, values)
            continue
        for stage in range(saved.num_stages):
            values = saved.stage_tensors(stage, "autoscale/").get(name)
            if values is not None:
                mu = values[0].min() * saved.num_replicas / state.topology.replicas.size
                unseen = torch.stack(parts, 1)
                set_autoscales(state.optimizer, name, torch.stack([mu.expand(len(parts)), unseen[1].cpu()]))
                break


def _choose(root: Path, state: Resumable, iteration: int | None) -> Path | None:
    """The best complete checkpoint, each file verified by one of the ranks; the same on every rank."""
    ranks = Ranks(state.topology)
    is_first = state.topology.rank == 0
    if is_first:
        for name in unfinished_folders(root):
            logger.warning("ignoring %s: saving it was cut short", root / name)
    choices = ranks.first_says(lambda: candidates(root, iteration))
    first_problem: str | None = None
    for index, choice in enumerate(choices):
        folder = iteration_folder(root, choice)
        problems = [text for texts in ranks.everyones(_problems(folder, state)) for text in texts]
        if not problems:
            return folder
        first_problem = first_problem or problems[0]
        if is_first and index + 1 < len(choices):
            older = iteration_folder(root, choices[index + 1]).name
            logger.warning("ignoring %s, trying %s: %s", folder, older, problems[0])
    if first_problem is not None:
        raise CheckpointError(f"{first_problem}; {_what_else(root, choices)}")
    return None


def _what_else(root: Path, tried: list[int]) -> str:
    """What to do if none of the tried checkpoints is whole."""
    others = [number for number in saved_iterations(root) if number not in tried]
    if others:
        names = ", ".join(map(str, others))
        return f"use another iteration (--ckpt-step), there are: {names}"
    return f"all {len(tried)} checkpoints under {root} are damaged: restore one from a copy, or start without --load"


def _problems(folder: Path, state: Resumable) -> list[str]:
    """Problems of the checkpoint files that this rank verifies."""
    try:
        records = read_manifest(folder)
    except CheckpointError as error:
        return [str(error)]
    mine = records[state.topology.rank :: state.topology.world_size]
    return [problem for record in mine if (problem := problem_with(folder, record)) is not None]


def _check_model(saved: SavedRun, state: Resumable, *, finetune: bool) -> None:
    """Raise the error of the first rank with a mismatch on every rank."""
    placements = state.placements()
    mismatches = (saved.mismatch(place, state.vocab_size, finetune=finetune) for place in placements)
    mine = next((text for text in mismatches if text is not None), None)
    setting = differing_setting(saved.folder, state.config.model, finetune=finetune)
    setting = setting or saved.vocabulary_problem(state.vocab_size, finetune=finetune)
    everyones = Ranks(state.topology).everyones((mine, {placement.key for placement in placements}, setting))
    for problem, _, _ in everyones:
        _raise_if(problem)
    known = set().union(*(keys for _, keys, _ in everyones))
    weights = (key for key in saved.reader.shapes if not key.startswith("optimizer."))
    _raise_if(unread_tensor(saved.folder, weights, known))
    for _, _, problem in everyones:
        _raise_if(problem)
    before = saved.description["vocab_size"]
    if before != state.vocab_size and state.topology.rank == 0:
        logger.warning("%s has a vocabulary of %d tokens, this run has %d", saved.folder, before, state.vocab_size)


def _raise_if(problem: str | None) -> None:
    if problem is not None:
        raise CheckpointError(problem)
