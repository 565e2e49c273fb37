"""Loading: verify a checkpoint, see that it is this model's, and give every rank its part, however it was saved."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import yaml
from torch import Tensor

from ..config.schema import ModelConfig
from ..optimizer.split_state import SplitSpaceState
from ..optimizer.state import SpaceState
from ..sharding.partition import Fragment, Slot
from .concurrency import NUM_READERS, in_order
from .files import CONFIG, META, CheckpointError, candidates, iteration_folder, rank_file, unfinished_folders
from .manifest import problem_with, read_manifest
from .placement import Placement
from .run_state import (
    FORMAT_VERSION,
    PREFIXES,
    Progress,
    Resumable,
    autoscales_of,
    below,
    set_autoscales,
    set_rng_states,
    topology_of,
)
from .torch_dist import TorchDistReader, Wanted

logger = logging.getLogger(__name__)

#: What is read before its turn holds no more than this, but for the last of it.
_READ_AHEAD_BYTES = 1 << 28


@dataclass(frozen=True)
class LoadOptions:
    """What is taken from a checkpoint.

    Attributes:
        iteration: which one (--ckpt-step); None takes the latest whole one.
        finetune: weights alone, and start from iteration 0.
        optimizer: moments and step count (--no-load-optim leaves them at zero).
        rng: states of random generators (--no-load-rng).
    """

    iteration: int | None = None
    finetune: bool = False
    optimizer: bool = True
    rng: bool = True


def load_checkpoint(root: Path, state: Resumable, options: LoadOptions | None = None) -> Progress | None:
    """Resume from a checkpoint under `root`; None where there is none. Called by all ranks together.

    A damaged checkpoint is reported and the next older one taken. Under the layout that it was saved with, the next
    steps are bitwise those of the run that saved it; under another one values are the same, and what belongs to a
    layout (random states, amax histories) starts anew.

    Raises:
        CheckpointError: no whole checkpoint is left, or it is another model's (the first tensor or setting that
            differs, with both shapes or values); the same on every rank.
    """
    options = options or LoadOptions()
    folder = _choose(root, state, options.iteration)
    if folder is None:
        return None
    saved = SavedRun(folder)
    _check_model(saved, state, finetune=options.finetune)
    loads_moments = options.optimizer and not options.finetune
    takes_scales = saved.has_model_layout_of(state)
    wanted = list(_state_to_read(state, tuple(PREFIXES) if loads_moments else ("master",)))
    values = saved.read([item.elements for item in wanted], pinned=state.device.type == "cuda")
    for item, value in zip(wanted, values, strict=True):
        _take(item, value, saved, state, takes_scales=takes_scales)
    for space in state.optimizer.states:
        space.derive_weights()
    if options.finetune:
        return Progress()
    if loads_moments:
        _restore_scalars(saved, state)
    if options.rng:
        _restore_rng(saved, state)
    return Progress(*(saved.description[name] for name in ("iteration", "consumed_samples", "skipped_steps")))


@dataclass(frozen=True)
class Elements:
    """Elements [start, start + length) of a rank's flat parameter; `kind` is master, exp_avg or exp_avg_sq."""

    placement: Placement
    kind: str
    start: int
    length: int


@dataclass(frozen=True)
class _StateToRead:
    """What is read at once of a rank's state; `fragment` is None for a parameter that is taken whole."""

    space: SpaceState
    slot: Slot
    fragment: Fragment | None
    elements: Elements


def _state_to_read(state: Resumable, kinds: tuple[str, ...]) -> Iterator[_StateToRead]:
    """All of this rank's masters and moments."""
    for space, slot, placement in state.slots():
        for kind in kinds:
            if kind == "master" and isinstance(space, SplitSpaceState):
                yield _StateToRead(space, slot, None, Elements(placement, kind, 0, slot.numel))
                continue
            for fragment in space.space.fragments(slot):
                yield _StateToRead(
                    space, slot, fragment, Elements(placement, kind, fragment.slot_start, fragment.length)
                )


def _take(wanted: _StateToRead, value: Tensor, saved: SavedRun, state: Resumable, *, takes_scales: bool) -> None:
    """Put FP32 [elements.length] from the CPU into its place, rounded to storage.

    Args:
        takes_scales: a split master is stored with the scale that it was saved with.
    """
    value = value.to(state.device, non_blocking=True)
    space, slot = wanted.space, wanted.slot
    if wanted.fragment is not None:
        space.part(wanted.elements.kind, slot, wanted.fragment).store_(value)
        return
    assert isinstance(space, SplitSpaceState)
    scale = saved.rank_tensor(state, f"weight_scale/{slot.name}") if takes_scales else None
    space.set_master(slot, value.view(slot.param.shape), scale)


def read_weights(folder: Path, placements: dict[str, Placement]) -> Iterator[tuple[str, Tensor]]:
    """(name, FP32 value) of every parameter by its placement on this rank; a verified checkpoint of any layout.

    Raises:
        CheckpointError: damaged, or another model's.
    """
    _raise_first([problem for record in read_manifest(folder) if (problem := problem_with(folder, record)) is not None])
    saved = SavedRun(folder)
    for placement in placements.values():
        _raise_first(saved.mismatch(placement, None))
    wanted = [Elements(placement, "master", 0, math.prod(placement.local_shape)) for placement in placements.values()]
    for (name, placement), value in zip(placements.items(), saved.read(wanted), strict=True):
        yield name, value.view(placement.local_shape)


def read_description(folder: Path) -> dict[str, Any]:
    """What ``checkpoint.json`` says.

    Raises:
        CheckpointError: missing, damaged, or of another format version.
    """
    path = folder / META
    try:
        description = json.loads(path.read_text())
        version = description["format_version"]
        names = ("iteration", "consumed_samples", "skipped_steps", "topology", "vocab_size", "padded_vocab_size")
        missing = [name for name in names if name not in description]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"checkpoint file {path} cannot be read ({error!r}); use another iteration") from None
    if version != FORMAT_VERSION or missing:
        problem = f"has no {missing[0]}" if version == FORMAT_VERSION else f"has format version {version}"
        raise CheckpointError(f"checkpoint file {path} {problem}; this version reads version {FORMAT_VERSION}")
    return description


def differing_setting(folder: Path, model: ModelConfig, *, finetune: bool = False) -> str | None:
    """The first setting beside a checkpoint that changes what weights of the same shapes compute, and differs.

    What cannot be read there, as in an earlier version's file, is taken as equal. Heads fix the other widths of
    attention, given the shapes. Fine-tuning may take another rotary base, for a longer context.
    """
    names = ["num_attention_heads", "norm_epsilon"]
    if model.position_embedding_type == "rope":
        names += ["rotary_percent"] if finetune else ["rotary_percent", "rotary_base"]
    saved = _saved_settings(folder)
    for name in names:
        theirs, ours = saved.get(name), getattr(model, name)
        if isinstance(theirs, int | float) and theirs != ours:
            return (
                f"{folder} was saved with {name}({theirs}), this run has {name}({ours}), under which those weights "
                f"compute something else; give --{name.replace('_', '-')} {theirs}, as in {CONFIG} there"
            )
    return None


def _saved_settings(folder: Path) -> dict[str, Any]:
    """The model section of ``config.yaml`` as it is; empty where it is not there or is none."""
    try:
        content = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    section = content.get("model") if isinstance(content, dict) else None
    return section if isinstance(section, dict) else {}


class SavedRun:
    """One checkpoint, read by one rank.

    Raises:
        CheckpointError: damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.description = read_description(folder)
        self.topology: dict[str, int | None] = self.description["topology"]
        self._files = {record.name for record in read_manifest(folder)}
        self.reader = TorchDistReader(folder, self._files)
        self._rank_tensors: dict[str, dict[str, Tensor]] = {}

    @property
    def layout_text(self) -> str:
        """The layout in words."""
        return ", ".join(f"{name}={value}" for name, value in self.topology.items() if value is not None)

    def has_model_layout_of(self, state: Resumable) -> bool:
        """Whether tensor, pipeline and virtual sizes are those of this run."""
        own = topology_of(state.topology)
        return all(self.topology[name] == own[name] for name in own if name != "data_parallel_size")

    def mismatch(self, placement: Placement, vocab_size: int | None) -> str | None:
        """Why a parameter cannot be taken from here; a vocabulary may be padded otherwise."""
        shape = self.reader.shapes.get(placement.key)
        own = placement.global_shape
        if shape is None:
            return f"{self.folder} has no tensor {placement.key!r}, which this model has: it is another model's"
        if shape == own:
            return None
        same_vocabulary = vocab_size is not None and vocab_size == self.description["vocab_size"]
        if placement.has_vocabulary_rows and shape[1:] == own[1:] and same_vocabulary:
            return None
        return (
            f"{self.folder}: {placement.key} has shape {shape}, this model's is {own}; "
            "load it with the configuration saved beside it (config.yaml)"
        )

    def read(self, wanted: Iterable[Elements], *, pinned: bool = False) -> Iterator[Tensor]:
        """FP32 [length] on the CPU of each, in order; the next ones are read while one is used.

        Padding after a parameter's end is zero. Rows of a vocabulary that was padded less are those of the last padding
        row, or zeros where there was none.

        Args:
            pinned: in pinned memory, for copies to a GPU.
        """
        with ThreadPoolExecutor(NUM_READERS) as threads:

            def tasks() -> Iterator[tuple[int, Future[Tensor]]]:
                for elements in wanted:
                    value = torch.empty(elements.length, pin_memory=pinned)
                    yield value.nbytes, threads.submit(self._filled, elements, value)

            yield from in_order(tasks(), limit_bytes=_READ_AHEAD_BYTES)

    def _filled(self, elements: Elements, flat: Tensor) -> Tensor:
        """Fill `flat`, and return it."""
        placement, start = elements.placement, elements.start
        key = PREFIXES[elements.kind] + placement.key
        if key not in self.reader.shapes:
            raise CheckpointError(
                f"{self.folder} has no {key}: it holds weights alone; give --finetune, or --no-load-optim"
            )
        flat.zero_()
        wanted = []
        num_rows = self.reader.shapes[key][0] if placement.has_vocabulary_rows else None
        for part in placement.rectangles(start, elements.length):
            target = flat[part.start - start : part.start - start + part.numel]
            if num_rows is None or part.offset[0] + part.sizes[0] <= num_rows:
                wanted.append(Wanted(part.offset, part.sizes, target))
                continue
            target = target.view(part.sizes)
            known = max(0, num_rows - part.offset[0])
            if known:
                wanted.append(Wanted(part.offset, (known, part.sizes[1]), target[:known].view(-1)))
            if self.description["vocab_size"] < num_rows:
                row = torch.zeros(part.sizes[1])
                self.reader.read(key, [Wanted((num_rows - 1, part.offset[1]), (1, part.sizes[1]), row)])
                target[known:] = row
        if wanted:
            self.reader.read(key, wanted)
        return flat

    def rank_tensors(self, state: Resumable, prefix: str) -> dict[str, Tensor]:
        """What the rank in this one's place saved under a prefix; replicas share all but what they saw saturate."""
        ours, topology = state.topology, self.topology
        same_replicas = topology["data_parallel_size"] == ours.dp.size()
        place = (ours.tp.rank(), ours.pp.rank(), ours.dp.rank() if same_replicas else 0)
        if not self.has_model_layout_of(state):
            place = (0, 0, 0)
        return below(prefix, self._tensors_of(*place))

    def rank_tensor(self, state: Resumable, name: str) -> Tensor | None:
        """One of them, if it is there."""
        return self.rank_tensors(state, name).get("")

    def stage_tensors(self, stage: int, prefix: str) -> dict[str, Tensor]:
        """What the first rank of a pipeline stage saved under a prefix."""
        return below(prefix, self._tensors_of(0, stage, 0))

    def _tensors_of(self, tensor_rank: int, pipeline_rank: int, data_rank: int) -> dict[str, Tensor]:
        name = rank_file(tensor_rank, pipeline_rank, data_rank)
        if name not in self._files:
            return {}  # a converted model's
        if name not in self._rank_tensors:
            path = self.folder / name
            try:
                self._rank_tensors[name] = safetensors.torch.load_file(path)
            except Exception as error:  # safetensors' own error type derives from nothing narrower
                raise CheckpointError(f"checkpoint file {path} is damaged ({error}); use another iteration") from error
        return self._rank_tensors[name]


def _restore_scalars(saved: SavedRun, state: Resumable) -> None:
    """Step count and loss scale; amax histories and μ as far as the layout lets them be told apart."""
    optimizer = state.optimizer
    tensors = saved.rank_tensors(state, "")
    if "step_count" not in tensors:
        raise CheckpointError(f"{saved.folder} has moments and no step count; give --no-load-optim")
    optimizer.step_count.copy_(tensors["step_count"])
    if optimizer.loss_scale is not None and "loss_scale/scale" in tensors:
        optimizer.loss_scale.load_state_dict(below("loss_scale/", tensors))
    own = topology_of(state.topology)
    pipeline = ("pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size")
    if all(saved.topology[name] == own[name] for name in pipeline):
        # Tensor-parallel ranks share their amaxes.
        at_stage = saved.stage_tensors(state.topology.pp.rank(), "")
        for index, history in enumerate(state.histories):
            values = below(f"amax_history.{index}/", at_stage)
            if history is None or history.history is None or "history" not in values:
                continue
            if history.history.shape == values["history"].shape:
                history.load_state_dict(values)
    _restore_autoscales(saved, state)


def _restore_rng(saved: SavedRun, state: Resumable) -> None:
    """Generators' states, where the layout and the kind of device are those that it was saved under."""
    rng = saved.rank_tensors(state, "rng/") if saved.has_model_layout_of(state) else {}
    if rng and set_rng_states(rng, state.device):
        return
    if state.topology.rank == 0:
        reason = f"on another kind of device than {state.device.type}" if rng else f"with {saved.layout_text}"
        logger.info("random states start anew: %s was saved %s", saved.folder, reason)


def _restore_autoscales(saved: SavedRun, state: Resumable) -> None:
    """μ of every parameter. On another number of replicas N, μ·N is kept: what a sum of N gradients has room for."""
    current = autoscales_of(state.optimizer)
    if not current:
        return
    mine = saved.rank_tensors(state, "autoscale/") if saved.has_model_layout_of(state) else {}
    stages = saved.topology["pipeline_model_parallel_size"] or 1
    replicas = saved.topology["data_parallel_size"] or 1
    same_replicas = replicas == state.topology.dp.size()
    for name, parts in current.items():
        values = mine.get(name)
        if values is not None and same_replicas and values.shape == (2, len(parts)):
            set_autoscales(state.optimizer, name, values)
            continue
        for stage in range(stages):
            values = saved.stage_tensors(stage, "autoscale/").get(name)
            if values is not None:
                mu = values[0].min() * replicas / state.topology.dp.size()
                unseen = torch.stack(parts, 1)
                set_autoscales(state.optimizer, name, torch.stack([mu.expand(len(parts)), unseen[1].cpu()]))
                break


def _choose(root: Path, state: Resumable, iteration: int | None) -> Path | None:
    """The best whole checkpoint, each file verified by one of the ranks; alike on every rank."""
    is_first = state.topology.rank == 0
    found: tuple[list[int], str | None] = ([], None)
    if is_first:
        try:
            found = (candidates(root, iteration), None)
        except CheckpointError as error:
            found = ([], str(error))
        for name in unfinished_folders(root):
            logger.warning("ignoring %s: saving it was cut short", root / name)
    choices, problem = _everyones(found, state)[0]
    _raise_first(problem)
    first_problem: str | None = None
    for index, choice in enumerate(choices):
        folder = iteration_folder(root, choice)
        problems = [text for texts in _everyones(_problems(folder, state), state) for text in texts]
        if not problems:
            return folder
        first_problem = first_problem or problems[0]
        if is_first and index + 1 < len(choices):
            older = iteration_folder(root, choices[index + 1]).name
            logger.warning("ignoring %s, trying %s: %s", folder, older, problems[0])
    if first_problem is not None:
        raise CheckpointError(f"{first_problem}; use another iteration (--ckpt-step)")
    return None


def _problems(folder: Path, state: Resumable) -> list[str]:
    """What is wrong with the files of a checkpoint that this rank verifies."""
    try:
        records = read_manifest(folder)
    except CheckpointError as error:
        return [str(error)]
    mine = records[state.topology.rank :: state.topology.world_size]
    return [problem for record in mine if (problem := problem_with(folder, record)) is not None]


def _check_model(saved: SavedRun, state: Resumable, *, finetune: bool) -> None:
    """Raise on every rank what the first rank with a mismatch found."""
    placements = [placement for _, _, placement in state.slots()]
    mine = next((text for place in placements if (text := saved.mismatch(place, state.vocab_size)) is not None), None)
    setting = differing_setting(saved.folder, state.config.model, finetune=finetune)
    everyones = _everyones((mine, {placement.key for placement in placements}, setting), state)
    for problem, _, _ in everyones:
        _raise_first(problem)
    known = set().union(*(keys for _, keys, _ in everyones))
    extra = [key for key in saved.reader.shapes if not key.startswith("optimizer.") and key not in known]
    if extra:
        raise CheckpointError(f"{saved.folder} holds {min(extra)!r}, which this model has not: it is another model's")
    for _, _, problem in everyones:
        _raise_first(problem)


def _everyones(value: Any, state: Resumable) -> list[Any]:
    """Every rank's value, in rank order, on every rank."""
    values = [value] * state.topology.world_size
    if state.topology.world_size > 1:
        torch.distributed.all_gather_object(values, value)
    return values


def _raise_first(problems: list[str] | str | None) -> None:
    if problems:
        raise CheckpointError(problems if isinstance(problems, str) else problems[0])
