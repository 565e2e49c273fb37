"""Tiny runs that are saved and resumed, under any layout and level."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fp8_megatron.checkpoint.loading import LoadOptions, load_checkpoint
from fp8_megatron.checkpoint.run_state import Progress, Resumable
from fp8_megatron.checkpoint.saving import CheckpointWriter
from fp8_megatron.config.schema import Config
from fp8_megatron.mcore.initialization import named_buffers_of_model
from fp8_megatron.mcore.runtime import runtime
from fp8_megatron.mcore.topology import initialized
from fp8_megatron.quantization.scaled_tensor import ScaledTensor
from tests.harness.tiny_gpt import VOCAB_SIZE, TinyGPT, build_tiny_gpt, forward_backward, random_batches, whole_weights

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class TinyRun:
    """A run from `progress` on: the loss of every step, and the whole model's masters and moments, FP32, at both ends.

    Attributes:
        start, end: by ``kind/name``.
        weights: what the layers of this rank compute with at the start, by name.
    """

    progress: Progress
    losses: list[float]
    start: dict[str, Tensor]
    end: dict[str, Tensor]
    weights: dict[str, Tensor]


@contextmanager
def tiny_resumable(config: Config, num_micro_batches: int) -> Iterator[tuple[TinyGPT, Resumable]]:
    """A tiny model, ready to train and to be saved; on every rank of `ranks.RankPool`.

    Args:
        num_micro_batches: of all replicas together.
    """
    with runtime(_CPU), initialized(config.parallel, config.model.num_layers, _CPU) as topology:
        gpt = build_tiny_gpt(config, topology, _CPU, num_micro_batches // topology.dp.size())
        histories = [chunk.recipe.history for chunk in gpt.chunks]
        padded = config.model.vocab_size or VOCAB_SIZE
        yield gpt, Resumable(config, gpt.optimizer, histories, topology, _CPU, VOCAB_SIZE, padded)


def train_steps(gpt: TinyGPT, config: Config, first: int, num_steps: int, num_micro_batches: int) -> list[float]:
    """The losses of `num_steps` steps; step n has the same global batch under every layout."""
    dp = gpt.topology.dp
    losses = []
    for step in range(first, first + num_steps):
        batches = random_batches(1, num_micro_batches, seq_length=config.model.seq_length, seed=step)[0]
        losses.append(forward_backward(gpt, config, batches[dp.rank() :: dp.size()]))
        gpt.optimizer.step()
        for chunk in gpt.chunks:
            if chunk.recipe.history is not None:
                chunk.recipe.history.update(gpt.topology.stage_group)
    return losses


def whole_state(gpt: TinyGPT) -> dict[str, Tensor]:
    """Masters and the optimizer's states of the whole model by ``kind/name``, and its buffers; called by every rank."""
    kinds = ["master", *(spec.name for spec in gpt.optimizer.rule_states)]
    state = {f"{kind}/{name}": value for kind in kinds for name, value in whole_weights(gpt, kind).items()}
    buffers = {name: value for chunk in gpt.chunks for name, value in named_buffers_of_model(chunk.module).items()}
    everyones: list[dict[str, Tensor]] = [{}] * gpt.topology.world_size
    torch.distributed.all_gather_object(everyones, buffers)
    for name, value in itertools.chain.from_iterable(own.items() for own in everyones):
        assert torch.equal(state.setdefault(f"buffer/{name}", value), value), name
    return state


def run_tiny(
    config: Config,
    num_steps: int,
    *,
    load: Path | None = None,
    save: Path | None = None,
    options: LoadOptions | None = None,
    num_micro_batches: int = 2,
    in_background: bool = False,
) -> TinyRun:
    """Load if told to, train, save if told to."""
    with tiny_resumable(config, num_micro_batches) as (gpt, state):
        progress = Progress()
        if load is not None:
            loaded = load_checkpoint(load, state, options)
            assert loaded is not None, f"nothing under {load}"
            progress = loaded
        for chunk in gpt.model:
            chunk.wait_for_weights()
        start = whole_state(gpt)
        weights = {slot.name: _dequantized(slot.param) for _, slot in gpt.optimizer.slots()}
        losses = train_steps(gpt, config, progress.iteration, num_steps, num_micro_batches)
        if save is not None:
            writer = CheckpointWriter(save, gpt.topology, in_background=in_background)
            iteration = progress.iteration + num_steps
            writer.save(state, Progress(iteration, iteration * num_micro_batches))
            writer.finish()
        return TinyRun(progress, losses, start, whole_state(gpt), weights)


def run_tiny_on_a_rank(
    config: Config,
    num_steps: int,
    load: Path | None,
    save: Path | None,
    options: LoadOptions | None = None,
    num_micro_batches: int = 2,
) -> TinyRun:
    """`run_tiny` for `ranks.RankPool.run`, which passes arguments by position."""
    return run_tiny(config, num_steps, load=load, save=save, options=options, num_micro_batches=num_micro_batches)


def _dequantized(param: Tensor) -> Tensor:
    return param.dequantize() if isinstance(param, ScaledTensor) else param.detach().float().clone()
