"""Whether a run fits into its machine: memory for its state, and disk for its checkpoints. Before a model is built."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from ..checkpoint.files import saved_iterations
from ..checkpoint.ranks import Ranks
from ..config.schema import Config
from ..device.device import node_size
from ..device.memory import memory_bytes
from ..errors import UserError
from ..mcore.topology import Topology
from ..outputs import check_free_bytes, free_bytes
from ..planning.activations import predict_host_bytes
from ..planning.memory import predict_checkpoint_bytes, predict_memory
from .run_start import RunStart

logger = logging.getLogger(__name__)


def check_memory(config: Config, topology: Topology, device: torch.device, padded_vocab_size: int) -> None:
    """Compare the memory of a GPU, or of a machine without one, with what is certain to be held. For all ranks.

    Weights, gradients and optimizer state are certain. Activations and temporary memory are not counted, but for those
    that leave for the host.

    Raises:
        UserError: they do not fit. The same on every rank.
    """
    num_bytes, where = _state_on(config, topology, device, padded_vocab_size)
    available = memory_bytes(device)
    on_gpu = device.type == "cuda"
    problem = None if num_bytes <= available else _memory_problem(config, num_bytes, where, available, on_gpu=on_gpu)
    problem = problem or _host_problem(config, topology)
    for text in Ranks(topology).everyones(problem):
        if text is not None:
            raise UserError(text)


def _state_on(config: Config, topology: Topology, device: torch.device, padded_vocab_size: int) -> tuple[int, str]:
    """(bytes of state, its place in words) of this rank's GPU, or of all ranks of this machine."""
    stages = range(config.parallel.pipeline_model_parallel_size)

    def state_bytes(stage: int) -> int:
        predicted = predict_memory(config, padded_vocab_size, world_size=topology.world_size, stage=stage)
        return predicted.linear.total + predicted.rest.total

    if device.type == "cuda":
        return state_bytes(topology.pp.rank()), "a GPU"
    # Which stages are on this machine is not known. One machine at least has the mean.
    num_ranks = node_size()
    where = "this machine" if num_ranks == 1 else f"the {num_ranks} ranks of this machine"
    return num_ranks * sum(map(state_bytes, stages)) // len(stages), where


def _host_problem(config: Config, topology: Topology) -> str | None:
    """Why the host cannot take the activations of its ranks; None if it can. Stages count by their mean, as above."""
    count, stages = config.training.cpu_offloading_num_layers, config.pipeline_layout.num_stages
    total = sum(predict_host_bytes(config, world_size=topology.world_size, stage=stage) for stage in range(stages))
    needed, available = node_size() * total // stages, memory_bytes(torch.device("cpu"))
    if needed <= available:
        return None
    return (
        f"activations of cpu_offloading_num_layers({count}) take {needed / 1e9:,.3f} GB of host memory for "
        f"{node_size()} ranks, and this machine has {available / 1e9:,.3f} GB; lower it, or recompute more: "
        f"--recompute-granularity full keeps the least"
    )


def _memory_problem(config: Config, num_bytes: int, where: str, available: int, *, on_gpu: bool) -> str:
    model, parallel = config.model, config.parallel
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    # Ranks of one machine share its memory, so more of them are no help there.
    spread = f"raise tensor_model_parallel_size({tp}) or pipeline_model_parallel_size({pp})"
    return (
        f"weights, gradients and optimizer state take {num_bytes / 1e9:,.3f} GB on {where}, which has "
        f"{available / 1e9:,.3f} GB; lower num_layers({model.num_layers}), hidden_size({model.hidden_size}) or the "
        f"vocabulary, or {spread if on_gpu else 'use a machine with more memory'}"
    )


def check_room(config: Config, start: RunStart, topology: Topology, padded_vocab_size: int) -> None:
    """Compare the free space of --save with the checkpoints to come; log a warning if not all fit. For all ranks.

    Raises:
        CheckpointError: not even one fits. The same on every rank.
    """
    if config.checkpoint.save is None:
        return
    save = Path(config.checkpoint.save)
    num_bytes = predict_checkpoint_bytes(config, padded_vocab_size)
    Ranks(topology).first_says(lambda: _check_disk(save, config, topology.world_size, start, num_bytes))


def _check_disk(save: Path, config: Config, world_size: int, start: RunStart, num_bytes: int) -> None:
    check_free_bytes(save, "--save", num_bytes, "one checkpoint")
    checkpoint = config.checkpoint
    reached = start.source.newest if start.continues_save and start.source is not None else 0
    remaining = max(0, config.train_iters(world_size) - reached)
    intervals = [each for each in (checkpoint.save_interval, checkpoint.non_persistent_save_interval) if each]
    count = max(1, sum(-(-remaining // interval) for interval in intervals))
    retained = checkpoint.retained_interval
    if checkpoint.num_newest_kept is not None or retained is not None:
        held = checkpoint.num_newest_kept or 1
        if retained is not None:
            held += remaining // retained
        present = len(saved_iterations(save)) if start.continues_save else 0
        # The oldest is removed when the next one is whole.
        count = min(count, max(1, held + 1 - present))
    free = free_bytes(save)
    if free is not None and free < count * num_bytes:
        logger.warning(
            "%s: %d checkpoints of %.3f GB are to come, its disk has %.3f GB free; free some, or give --keep-last",
            save,
            count,
            num_bytes / 1e9,
            free / 1e9,
        )
