"""Saving and resuming a training run: bitwise the same next steps under the same layout.

Every rank writes its shard of master weights and moments as they are stored, raw payload and scales. Weights that
layers compute with are derived from the masters on load. Another number of replicas takes over the same state; another
tensor- or pipeline-parallel layout is refused with both layouts named; another precision or level is converted.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor

from ..config import Config
from ..config_io import save_config
from ..distributed.topology import Topology
from ..optimizer.distributed_optimizer import FP8DistributedOptimizer
from ..quantization.amax_history import AmaxHistory
from .files import (
    META,
    CheckpointError,
    iteration_folder,
    latest_iteration,
    publish,
    rank_file,
    read_meta,
    remove_old,
    write_tensors,
    write_text,
)
from .saved_state import KINDS, SavedState, tensors_of


@dataclass(frozen=True)
class Progress:
    """How far a run has come."""

    iteration: int = 0
    consumed_samples: int = 0
    skipped_steps: int = 0


@dataclass(frozen=True)
class Resumable:
    """Everything of a run that a checkpoint holds besides its progress."""

    optimizer: FP8DistributedOptimizer
    histories: list[AmaxHistory | None]
    topology: Topology
    device: torch.device


def save_checkpoint(
    root: Path, state: Resumable, progress: Progress, *, config: Config, vocab_size: int, keep_last: int | None
) -> Path:
    """Write the checkpoint of this iteration; called by all ranks together.

    Args:
        vocab_size: padded vocabulary, which a reader needs to build the model.

    Returns:
        The folder.
    """
    topology = state.topology
    folder = iteration_folder(root, progress.iteration)
    temporary = folder.with_name(folder.name + ".tmp")
    if topology.rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    torch.distributed.barrier()
    file = rank_file(temporary, topology.tp.rank(), topology.pp.rank(), topology.dp.rank())
    write_tensors(file, _tensors_of(state))
    if topology.rank == 0:
        meta = {
            "format": 2,
            "layout": _layout(topology),
            "data_parallel_size": topology.dp.size(),
            "vocab_size": vocab_size,
            "iteration": progress.iteration,
            "consumed_samples": progress.consumed_samples,
            "skipped_steps": progress.skipped_steps,
        }
        save_config(config, temporary / "config.yaml")
        write_text(temporary / META, json.dumps(meta, indent=2))
    torch.distributed.barrier()
    if topology.rank == 0:
        publish(temporary, folder, str(progress.iteration))
        if keep_last is not None:
            remove_old(root, keep_last)
    torch.distributed.barrier()
    return folder


def load_checkpoint(root: Path, state: Resumable, *, weights_only: bool) -> Progress | None:
    """Resume from the latest checkpoint under `root`; None where there is none.

    Args:
        weights_only: take the master weights alone and start from iteration 0 (--finetune).

    Raises:
        CheckpointError: another layout, a damaged file, or a tensor of another shape (the first one, with both shapes).
    """
    iteration = latest_iteration(root)
    if iteration is None:
        return None
    folder = iteration_folder(root, iteration)
    meta = read_meta(folder)
    topology = state.topology
    if meta["layout"] != _layout(topology):
        raise CheckpointError(
            f"{folder} was saved with {_text(meta['layout'])}, this run has {_text(_layout(topology))}"
        )
    saved = _saved_state(folder, topology.tp.rank(), topology.pp.rank())
    _check_shapes(folder, saved, state.optimizer)
    for space, slot in state.optimizer.slots():
        for kind in KINDS[:1] if weights_only else KINDS:
            saved.get(slot.name, kind).restore(space, slot, kind)
    for space_state in state.optimizer.states:
        space_state.derive_weights()
    if weights_only:
        return Progress()
    tensors = saved.shared()
    state.optimizer.step_count.copy_(tensors["step_count"])
    if state.optimizer.loss_scale is not None and "loss_scale/scale" in tensors:
        state.optimizer.loss_scale.load_state_dict(_below("loss_scale/", tensors))
    for index, history in enumerate(state.histories):
        if history is not None:
            history.load_state_dict(_below(f"amax_history.{index}/", tensors))
    _set_rng_states(_below("rng/", tensors), state.device)
    return Progress(meta["iteration"], meta["consumed_samples"], meta["skipped_steps"])


def read_weights(folder: Path, tensor_rank: int, pipeline_rank: int) -> Iterator[tuple[str, Tensor]]:
    """(name, FP32 value) of every parameter of one model-parallel rank."""
    return _saved_state(folder, tensor_rank, pipeline_rank).masters()


def _saved_state(folder: Path, tensor_rank: int, pipeline_rank: int) -> SavedState:
    return SavedState(folder, tensor_rank, pipeline_rank, num_replicas=read_meta(folder)["data_parallel_size"])


def _tensors_of(state: Resumable) -> dict[str, Tensor]:
    tensors = {"step_count": state.optimizer.step_count}
    if state.optimizer.loss_scale is not None:
        tensors |= {f"loss_scale/{name}": tensor for name, tensor in state.optimizer.loss_scale.state_dict().items()}
    for space, slot in state.optimizer.slots():
        tensors |= tensors_of(space, slot)
    for index, history in enumerate(state.histories):
        for name, tensor in (history.state_dict() if history is not None else {}).items():
            tensors[f"amax_history.{index}/{name}"] = tensor
    return tensors | {f"rng/{name}": tensor for name, tensor in _rng_states(state.device).items()}


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under a prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _check_shapes(folder: Path, saved_state: SavedState, optimizer: FP8DistributedOptimizer) -> None:
    saved = saved_state.shapes
    for _, slot in optimizer.slots():
        if slot.name not in saved:
            raise CheckpointError(f"{folder} has no tensor {slot.name!r}, which this model has: it is another model's")
        if saved[slot.name] != slot.param.shape:
            raise CheckpointError(
                f"{folder}: {slot.name} has shape {tuple(saved[slot.name])}, "
                f"this model's is {tuple(slot.param.shape)}; "
                "load it with the configuration saved beside it (config.yaml)"
            )
    extra = set(saved) - {slot.name for _, slot in optimizer.slots()}
    if extra:
        raise CheckpointError(f"{folder} holds {min(extra)!r}, which this model has not: it is another model's")


def _layout(topology: Topology) -> dict[str, int | None]:
    return {
        "tensor_model_parallel_size": topology.tp.size(),
        "pipeline_model_parallel_size": topology.pp.size(),
        "virtual_pipeline_model_parallel_size": topology.virtual_pipeline_size,
    }


def _text(layout: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in layout.items() if value is not None)


def _rng_states(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states | {f"tracker/{name}": tensor for name, tensor in get_cuda_rng_tracker().get_states().items()}


def _set_rng_states(states: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
    tracked = {name[len("tracker/") :]: tensor for name, tensor in states.items() if name.startswith("tracker/")}
    get_cuda_rng_tracker().set_states(tracked)
