"""What a rank writes to a checkpoint: its part of the model and of its state, and the tensors of the rank itself.

State is written in its storage dtypes (`encoding`) or, for other readers, in FP32. Loading decodes it to FP32 and
encodes that again. This gives the same values, because scales are powers of two or amaxes
(tests/checkpoint/test_resume.py tests every form). One way of loading therefore serves every layout and level, and
resuming is bitwise. A file of the rank holds what the values do not determine, mainly the scales of split masters.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..config.parallel import LAYER_SHARES
from ..config.schema import Config
from ..device.memory import cpu_copy
from ..dtypes import STATE_BLOCK
from ..mcore.initialization import named_buffers_of_model
from ..mcore.runtime import rng_states
from ..mcore.topology import Topology
from ..optimizer.distributed_optimizer import FP8DistributedOptimizer
from ..optimizer.split_state import SplitSpaceState
from ..optimizer.state import SpaceState
from ..quantization.amax_history import AmaxHistory
from ..sharding.partition import Fragment, Slot
from ..sharding.sharded_grads import ShardedGradBuffer
from .encoding import Encoded
from .placement import Placement, placement_of
from .torch_dist import Chunk

#: The version of each format, by `--ckpt-state-dtype`.
FORMAT_VERSIONS = {"fp32": 3, "native": 4}

#: The kind of a parameter's state that every checkpoint holds; others are states of the update rule, by their names.
MASTER = "master"

#: The key of what the columns of an amax history are for.
SLOTS = "slots"

#: Elements of a written chunk, unless a row has more.
_CHUNK_NUMEL = 1 << 22

#: Linear layers of a layer; megatron-core keeps an (empty) object for each.
_LINEAR_LAYERS = ("linear_proj.weight", "linear_qkv.weight", "linear_fc1.weight", "linear_fc2.weight")


@dataclass(frozen=True)
class Progress:
    """How far a run has come.

    Attributes:
        consumed_samples: samples of the data that lie behind, with those that were left out.
        scheduled_samples: samples that the schedule of the learning rate has counted; None if it is not known.
        schedule: the schedule's settings by name; empty if they are not known.
        left_out_samples: samples that rollbacks have left out. The length of the run does not count them.
        consumed_valid_samples: samples of the validations before, which the next one does not read.
    """

    iteration: int = 0
    consumed_samples: int = 0
    skipped_steps: int = 0
    scheduled_samples: int | None = None
    schedule: Mapping[str, Any] = field(default_factory=dict)
    left_out_samples: int = 0
    consumed_valid_samples: int = 0

    @classmethod
    def of(cls, description: Mapping[str, Any]) -> Progress:
        """The progress that a checkpoint's description holds. Earlier versions saved less."""
        return cls(
            iteration=description["iteration"],
            consumed_samples=description["consumed_samples"],
            skipped_steps=description["skipped_steps"],
            scheduled_samples=description.get("scheduled_samples"),
            schedule=description.get("schedule") or {},
            left_out_samples=description.get("left_out_samples", 0),
            consumed_valid_samples=description.get("consumed_valid_samples", 0),
        )


@dataclass(frozen=True)
class Resumable:
    """Everything of a run that a checkpoint holds, except its progress.

    Attributes:
        vocab_size: the tokenizer's; padded_vocab_size: rows of the embedding.
    """

    config: Config
    optimizer: FP8DistributedOptimizer
    histories: list[AmaxHistory | None]
    topology: Topology
    device: torch.device
    vocab_size: int
    padded_vocab_size: int

    def slots(self) -> Iterator[tuple[SpaceState, Slot, Placement]]:
        """Every parameter of this model-parallel rank, with its placement in the model."""
        for state, slot in self.optimizer.slots():
            assert slot.region is not None, slot.name
            yield state, slot, placement_of(slot.name, slot.region, self.config.model)

    def buffers(self) -> Iterator[tuple[Tensor, Placement]]:
        """What this rank's layers keep beside parameters, FP32, with its placement. Replicas keep the same."""
        for module in self.optimizer.model:
            for name, buffer in named_buffers_of_model(module.module).items():
                yield buffer, placement_of(name, self.topology.region_of(buffer), self.config.model)

    def placements(self) -> list[Placement]:
        """Of all that this model-parallel rank has of the model."""
        return [*(placement for _, _, placement in self.slots()), *(placement for _, placement in self.buffers())]

    @property
    def is_trained(self) -> bool:
        """False for a model that is evaluated (--skip-train)."""
        return all(state.is_trained for state in self.optimizer.states)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of state that parameters have; each has those that its rule stores."""
        return (MASTER, *(spec.name for spec in self.optimizer.rule_states))


@dataclass(frozen=True)
class Snapshot:
    """A rank's part of a checkpoint: copied to the CPU so that training may continue while it is written, or the state
    itself, of which pieces are copied as they are written.

    Attributes:
        kinds: the kinds of state that are written.
        buffers: see `Resumable.buffers`; empty where another rank writes them.
        copied: the end of the copies from a GPU; None where there are none.
    """

    slots: list[tuple[SpaceState, Slot, Placement]]
    rank_tensors: dict[str, Tensor]
    description: dict[str, Any]
    config: Config
    kinds: tuple[str, ...]
    buffers: Sequence[tuple[Tensor, Placement]] = ()
    copied: torch.cuda.Event | None = None

    @property
    def is_native(self) -> bool:
        """Whether state is written in its storage dtypes, not in FP32."""
        return self.config.checkpoint.ckpt_state_dtype == "native"

    @classmethod
    def of(cls, state: Resumable, progress: Progress, *, copies: bool) -> Snapshot:
        """What this rank writes. `wait` before it is read.

        Args:
            copies: of masters and states, so that they may change before they are written. The host needs memory for
                them. On a GPU it does not wait: they are copied beside the next step, up to its update.
        """
        spaces = state.optimizer.states
        # The next step changes these: amaxes, generators, a router's bias.
        writes_buffers = state.topology.replicas.rank == state.topology.tp.rank() == 0
        buffers = [(cpu_copy(buffer), placement) for buffer, placement in state.buffers() if writes_buffers]
        rank_tensors = {name: cpu_copy(tensor.detach()) for name, tensor in rank_tensors_of(state).items()}
        for space in spaces:
            space.before_copy()
        copied = None
        if not copies:
            frozen = {id(space): space for space in spaces}
        elif state.device.type == "cuda":
            stream = _copy_stream(state.device)
            stream.wait_stream(torch.cuda.current_stream(state.device))
            with torch.cuda.stream(stream):
                frozen = {id(space): space.on_cpu() for space in spaces}
            copied = torch.cuda.Event()
            copied.record(stream)
            state.optimizer.hold_state(copied)
        else:
            frozen = {id(space): space.on_cpu() for space in spaces}
        slots = [(frozen[id(space)], slot, placement) for space, slot, placement in state.slots()]
        return cls(slots, rank_tensors, describe(state, progress), state.config, _kinds(state), buffers, copied)

    def wait(self) -> None:
        """Wait until everything has been copied."""
        if self.copied is not None:
            self.copied.synchronize()

    def chunks(self) -> Iterator[Chunk | str]:
        """This rank's part of the model's tensors, one piece of a fragment at a time."""
        for buffer, placement in self.buffers:
            for part in placement.region.rectangles(0, buffer.numel()):
                yield Chunk(placement.key, placement.region.global_shape, part.offset, buffer.view(part.sizes))
        for space, slot, placement in self.slots:
            if not space.space.sharing.counts_in_norm:
                continue  # another rank writes the parameter
            pieces = (piece for fragment in space.space.fragments(slot) for piece in _pieces(fragment, slot))
            for piece in pieces:
                for kind in filter(space.holds, self.kinds):
                    prefix = prefix_of(kind)
                    state = _encoded(space, kind, slot, piece).on_cpu()
                    value = None if self.is_native else state.decode()
                    for part in placement.region.rectangles(piece.slot_start, piece.length):
                        start = part.start - piece.slot_start
                        yield Chunk(
                            prefix + placement.key,
                            placement.region.global_shape,
                            part.offset,
                            state.rectangle(start, part.sizes)
                            if value is None
                            else value[start : start + part.numel].view(part.sizes),
                        )
            if not self.is_native and space.space.shard_index == 0 and placement.region.is_first:
                yield from _extra_state(placement)


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of copies to the host."""
    return torch.cuda.Stream(device)


def _encoded(space: SpaceState, kind: str, slot: Slot, piece: Fragment) -> Encoded:
    """A piece of a parameter's state as it is stored."""
    if kind == MASTER and isinstance(space, SplitSpaceState):
        return Encoded.of_split_master(*space.split_part(slot, piece))
    return Encoded.of_state(*space.part(kind, slot, piece))


def _pieces(fragment: Fragment, slot: Slot) -> Iterator[Fragment]:
    """Cut a fragment at the ends of matrices, and in each at multiples of rows and of scale blocks. Pieces are small
    enough to be read and written in parallel, and other layouts read little beyond their part.
    """
    unit = math.lcm(*slot.param.shape[1:][-1:], STATE_BLOCK)
    step = max(1, _CHUNK_NUMEL // unit) * unit
    start, end = fragment.slot_start, fragment.slot_start + fragment.length
    while start < end:
        inside = start % slot.padded_matrix
        stop = min(start - inside + min((inside // step + 1) * step, slot.padded_matrix), end)
        yield Fragment(fragment.shard_start + start - fragment.slot_start, start, stop - start)
        start = stop


def _extra_state(placement: Placement) -> Iterator[str]:
    """The key of the object that megatron-core keeps beside a linear weight of one matrix."""
    if placement.region.stacked and placement.key.endswith(_LINEAR_LAYERS) and len(placement.region.shape) == 2:
        index, count = placement.region.stacked[0]
        yield f"{placement.key.removesuffix('weight')}_extra_state/shard_{index}_{count}"


def describe(state: Resumable, progress: Progress) -> dict[str, Any]:
    """What ``checkpoint.json`` says."""
    precision, state_dtype = state.config.precision, state.config.checkpoint.ckpt_state_dtype
    batches = state.config.batch_schedule(state.topology.world_size)
    return {
        "format_version": FORMAT_VERSIONS[state_dtype],
        "state_dtype": state_dtype,
        "iteration": progress.iteration,
        "consumed_samples": progress.consumed_samples,
        "skipped_steps": progress.skipped_steps,
        "scheduled_samples": progress.scheduled_samples,
        "schedule": dict(progress.schedule),
        "left_out_samples": progress.left_out_samples,
        "consumed_valid_samples": progress.consumed_valid_samples,
        "tokens_of_next_step": batches.batch_size(progress.consumed_samples) * state.config.model.seq_length,
        "topology": topology_of(state.topology),
        "level": precision.level,
        "vocab_size": state.vocab_size,
        "padded_vocab_size": state.padded_vocab_size,
        "optimizer": [name for name in _kinds(state) if name != MASTER],
    }


def _kinds(state: Resumable) -> tuple[str, ...]:
    """The kinds of state that a checkpoint of the run has."""
    return state.kinds if state.config.checkpoint.save_optim else (MASTER,)


def prefix_of(kind: str) -> str:
    """What stands before a parameter's key."""
    return "" if kind == MASTER else f"optimizer.{kind}."


#: What a description says of the layers of a stage. The last stands there if chunks have different numbers of layers.
STAGES = (
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "pipeline_model_parallel_layout",
)


def topology_of(topology: Topology) -> dict[str, int | str | None]:
    """Sizes of a layout by Megatron's names; the layers of every stage if chunks have different numbers of them."""
    layout = topology.layout
    sizes: dict[str, int | str | None] = {
        "tensor_model_parallel_size": topology.tp.size(),
        "pipeline_model_parallel_size": topology.pp.size(),
        "virtual_pipeline_model_parallel_size": topology.virtual_pipeline_size,
        "data_parallel_size": topology.dp.size(),
    }
    if topology.cp.size() > 1:
        sizes["context_parallel_size"] = topology.cp.size()
    shares = zip(LAYER_SHARES, topology.layer_shares, strict=True)
    sizes |= {name: size for name, size in shares if size > 1}
    return sizes if layout.is_even else sizes | {STAGES[-1]: layout.text}


def rank_tensors_of(state: Resumable) -> dict[str, Tensor]:
    """Tensors of this rank alone, or equal on all ranks, by name; views of the running state.

    ``step_count``, ``loss_scale/…``; ``weight_scale/<parameter>`` of split masters; ``autoscale/<parameter>`` FP32
    [2, buckets]: μ and the last saturated fraction; ``amax_history.<chunk>/…``; ``rng/…``.
    --no-save-optim leaves out step count and loss scale, --no-save-rng the generators.
    """
    optimizer, checkpoint = state.optimizer, state.config.checkpoint
    tensors = {"step_count": optimizer.step_count} if checkpoint.save_optim else {}
    if optimizer.loss_scale is not None and checkpoint.save_optim:
        tensors |= _under("loss_scale/", optimizer.loss_scale.state_dict())
    for space, slot in optimizer.slots():
        if isinstance(space, SplitSpaceState):
            tensors[f"weight_scale/{slot.name}"] = space.scale_of(slot)
    tensors |= _under("autoscale/", {name: torch.stack(parts, 1) for name, parts in autoscales_of(optimizer).items()})
    for index, history in enumerate(state.histories):
        if history is not None and (values := history.state_dict()):
            tensors |= _under(f"amax_history.{index}/", {**values, SLOTS: history.slot_keys()})
    return tensors | _under("rng/", rng_states(state.device) if checkpoint.save_rng else {})


def autoscales_of(optimizer: FP8DistributedOptimizer) -> dict[str, list[Tensor]]:
    """Parameter → one FP32 [2] for each bucket that holds a part of it: μ and the last saturated fraction (copies)."""
    found: dict[str, list[Tensor]] = {}
    for buffer in optimizer.buffers:
        if isinstance(buffer, ShardedGradBuffer):
            for name, autoscale, index in buffer.autoscaled_spans():
                values = autoscale.state_dict()
                found.setdefault(name, []).append(torch.stack([values["mu"][index], values["seen"][index]]))
    return found


def set_autoscales(optimizer: FP8DistributedOptimizer, name: str, saved: Tensor) -> None:
    """Restore a parameter's auto-scaling state; `saved` is FP32 [2, buckets]."""
    part = 0
    for buffer in optimizer.buffers:
        if not isinstance(buffer, ShardedGradBuffer):
            continue
        for owner, autoscale, index in buffer.autoscaled_spans():
            if owner == name:
                values = autoscale.state_dict()
                values["mu"][index] = saved[0, part]
                values["seen"][index] = saved[1, part]
                part += 1


def below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under a prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in tensors.items()}
