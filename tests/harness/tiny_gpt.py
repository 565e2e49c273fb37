"""Trains a tiny GPT through the whole stack for a few steps, so that parallel layouts can be compared number by number.

The loop is the least that drives the public parts; the trainer's own is `training`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fp8_megatron.config.schema import (
    Config,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainingConfig,
)
from fp8_megatron.data.document_bounds import DocumentBounds, SequencePart
from fp8_megatron.mcore.data_parallel import FP8DataParallel
from fp8_megatron.mcore.gpt import ModelChunk
from fp8_megatron.mcore.pipeline import schedule_arguments
from fp8_megatron.mcore.runtime import runtime, seed_everything
from fp8_megatron.mcore.schedule import forward_backward_func
from fp8_megatron.mcore.topology import Topology, initialized
from fp8_megatron.optimizer.distributed_optimizer import FP8DistributedOptimizer
from fp8_megatron.optimizer.state import SpaceState
from fp8_megatron.sharding.partition import Fragment, Slot
from fp8_megatron.sharding.region import Region
from fp8_megatron.training.build import build_trainable_model

VOCAB_SIZE = 256
#: Ends documents in runs with --reset-attention-mask.
EOD = 0

#: Every local weight of these models has a multiple of 4096 elements down to TP=2, as levels O1 and O2 want.
GPT3_STYLE = ModelConfig(
    num_layers=2, hidden_size=128, num_attention_heads=4, seq_length=32, attention_dropout=0.0, hidden_dropout=0.0
)
LLAMA_STYLE = replace(
    GPT3_STYLE,
    ffn_hidden_size=256,
    group_query_attention=True,
    num_query_groups=2,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    disable_bias_linear=True,
    untie_embeddings_and_output_weights=True,
)


def tiny_optimizer(**settings: Any) -> OptimizerConfig:
    """The optimizer of tests: GPT-3's weight decay and second moment."""
    return OptimizerConfig(**{"weight_decay": 0.1, "adam_beta2": 0.95, "lr_decay_style": "cosine", **settings})


def tiny_config(
    model: ModelConfig = GPT3_STYLE,
    *,
    parallel: ParallelConfig | None = None,
    precision: PrecisionConfig | None = None,
    optimizer: OptimizerConfig | None = None,
    seed: int = 1,
) -> Config:
    """A configuration with a constant learning rate of 1e-3."""
    return Config(
        model=model,
        parallel=parallel or ParallelConfig(),
        precision=precision or PrecisionConfig(),
        optimizer=optimizer or tiny_optimizer(lr=1e-3),
        training=TrainingConfig(seed=seed),
    )


def random_batches(
    num_steps: int, num_micro_batches: int, *, micro_batch_size: int = 2, seq_length: int = 32, seed: int = 0
) -> Tensor:
    """Token ids [num_steps, num_micro_batches, micro_batch_size, seq_length + 1], uniform."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_steps, num_micro_batches, micro_batch_size, seq_length + 1)
    return torch.randint(VOCAB_SIZE, shape, generator=generator)


@dataclass(frozen=True)
class TinyRun:
    """Result of a run: the mean loss and gradient norm of each step; the whole FP32 masters at its end, by name."""

    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, Tensor]


@dataclass(frozen=True)
class TinyGPT:
    """The parts of a model that is ready to train."""

    topology: Topology
    chunks: list[ModelChunk]
    model: list[FP8DataParallel]
    optimizer: FP8DistributedOptimizer


def train_tiny_gpt(
    config: Config,
    batches: Tensor,
    *,
    device: torch.device | None = None,
    before_training: Callable[[TinyGPT], None] | None = None,
) -> TinyRun:
    """Train one step per batch; called by every rank (see `ranks.RankPool`), and every rank returns the same run.

    Args:
        batches: [steps, micro_batches, micro_batch_size, seq + 1] of all data-parallel ranks; replica r takes
            micro-batches r, r + dp, …, so that a batch is the same under every layout.
        before_training: may break something, to see that a comparison notices.
    """
    device = device or torch.device("cpu")
    with runtime(device), initialized(config.parallel, config.model.num_layers, device) as topology:
        num_micro_batches = batches.shape[1] // topology.dp.size()
        gpt = build_tiny_gpt(config, topology, device, num_micro_batches)
        if before_training is not None:
            before_training(gpt)
        mine = batches[:, topology.dp.rank() :: topology.dp.size()].to(device)
        losses, grad_norms = [], []
        for step_batches in mine:
            losses.append(forward_backward(gpt, config, step_batches))
            grad_norms.append(gpt.optimizer.step().item())
            for chunk in gpt.chunks:
                if chunk.recipe.history is not None:
                    chunk.recipe.history.update(topology.stage_group)
        return TinyRun(losses, grad_norms, whole_weights(gpt))


def build_tiny_gpt(config: Config, topology: Topology, device: torch.device, num_micro_batches: int) -> TinyGPT:
    """This rank's part of the model, with initial weights loaded, inside `runtime`."""
    seed_everything(
        config.training.seed, device, tensor_parallel_rank=topology.tp.rank(), pipeline_rank=topology.pp.rank()
    )
    built = build_trainable_model(config, VOCAB_SIZE, topology, device, num_micro_batches)
    return TinyGPT(topology, built.chunks, built.model, built.optimizer)


def forward_backward(gpt: TinyGPT, config: Config, micro_batches: Tensor) -> float:
    """One step's gradients from [num_micro_batches, micro_batch_size, seq + 1]; the loss over all replicas."""
    for chunk in gpt.model:
        chunk.zero_grad_buffer()
    iterators = [iter(list(micro_batches)) for _ in gpt.model]
    outputs = forward_backward_func(config.parallel, forward_only=False)(
        forward_step_func=partial(
            _forward_step, has_documents=config.data.reset_attention_mask, part=gpt.topology.sequence_part
        ),
        data_iterator=iterators if len(gpt.model) > 1 else iterators[0],
        model=gpt.model,
        num_microbatches=len(micro_batches),
        seq_length=config.model.seq_length,
        micro_batch_size=micro_batches.shape[1],
        forward_only=False,
        **schedule_arguments(gpt.model, gpt.topology, in_fp8=config.precision.fp8_pipeline_communication),
    )
    topology = gpt.topology
    total = torch.zeros(1, device=micro_batches.device)
    if topology.reads_loss:
        total += torch.stack(outputs).mean() / topology.dp.size()
    torch.distributed.all_reduce(total)
    return total.item()


def _forward_step(
    batches: Iterator[Tensor], chunk: FP8DataParallel, *, has_documents: bool, part: SequencePart
) -> tuple[Tensor, Callable[[Tensor], Any]]:
    tokens = next(batches)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    positions = torch.arange(inputs.shape[1], device=tokens.device).expand_as(inputs)

    def loss_function(output: Tensor) -> tuple[Tensor, Tensor]:
        loss = output.float().mean() / part.size
        return loss, loss.detach().clone()

    documents = DocumentBounds(EOD).of(inputs.cpu()).to(inputs.device) if has_documents else None
    inputs, positions, labels = (part.of(x, dim=1) for x in (inputs, positions, labels))
    return chunk(inputs, positions, documents, labels=labels), loss_function


def whole_weights(gpt: TinyGPT, kind: str = "master") -> dict[str, Tensor]:
    """FP32 master weights by their names in the whole model, assembled from all ranks; called by every rank.

    Args:
        kind: a state of the update rule instead, of the parameters that have it.
    """
    mine = []
    for state, slot in gpt.optimizer.slots():
        if not state.holds(kind):
            continue
        load = partial(_load_fragment, state, kind, slot)
        mine.append((slot.name, slot.region, state.space.assemble(slot, load).cpu().numpy()))
    everyone: list[Any] = [None] * gpt.topology.world_size
    torch.distributed.all_gather_object(everyone, mine)
    # Arrays: they are pickled and compared in a fraction of the time of tensors, of which there are a thousand.
    found: dict[str, np.ndarray] = {}
    for name, region, value in itertools.chain.from_iterable(everyone):
        flat = found.setdefault(name, np.full(region.whole_shape, np.nan, np.float32)).reshape(-1)
        places = _places(region)
        known = flat[places]
        assert (np.isnan(known) | (known == value)).all(), f"{name} differs between the ranks that share it"
        flat[places] = value
    return {name: torch.from_numpy(found[name]) for name in sorted(found)}


@functools.lru_cache(64)
def _places(region: Region) -> np.ndarray:
    """The indices of a part's elements in the whole parameter."""
    places: np.ndarray = region.part_of(torch.arange(math.prod(region.whole_shape)).view(region.whole_shape)).numpy()
    return places


def _load_fragment(state: SpaceState, kind: str, slot: Slot, fragment: Fragment) -> Tensor:
    return state.part(kind, slot, fragment).load()
