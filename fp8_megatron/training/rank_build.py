"""The memory of one rank of any cluster, counted while the rank is built and trains, on a CPU without the cluster.

Everything is the run's own: megatron-core's groups, the model, the buffers, the optimizer and megatron-core's schedule.
Tensors lie on the meta device and have no values, and a fake process group stands for the other ranks. Each storage is
counted from its first use until it is freed.

Operators count by their outputs. Memory that a GPU's kernel takes inside of it is not seen, nor are the CUDA context,
NCCL's buffers and the fragments between the allocator's blocks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..config.checks import ConfigError
from ..config.schema import Config
from ..data.document_bounds import NUM_TOKENS
from ..dtypes import GradReduceMode
from ..mcore.runtime import runtime, seed_everything
from ..mcore.topology import initialized
from ..planning.memory import padded_vocab_size, vocab_size
from ..quantization.scaled_tensor import ScaledTensor
from ..reporting.memory_report import StorageBytes
from .batches import Batch
from .build import TrainingState, build_training_state, measured_storage
from .train_step import run_schedule, train_step

_META = torch.device("meta")
#: The second step also waits for the weights that the first one sent.
_NUM_STEPS = 2


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank.

    Attributes:
        stage: its pipeline stage.
        state: weights, gradients, optimizer state and their scales.
        wire_buffers: send and receive buffers of gradients.
        peak: the most that is held within a step.
        validation: the most that a step of validation holds beside what is held between two steps.
    """

    stage: int
    state: StorageBytes
    wire_buffers: int
    peak: int
    validation: int


def check_buildable(config: Config) -> None:
    """Raise `ConfigError` for what cannot be built without a GPU or other ranks."""
    if config.precision.precision == "te":
        raise ConfigError("precision(te) builds Transformer Engine's layers, which need a GPU; choose bf16 or fp8")
    mode = config.parallel.fp8_grad_reduce
    if mode is GradReduceMode.HIERARCHICAL:
        raise ConfigError(f"fp8_grad_reduce({mode.value}) asks other ranks for their nodes; choose all_to_all")


def build_rank(config: Config, *, world_size: int, stage: int) -> RankMemory:
    """Build the first rank of a pipeline stage, train two steps, run one of validation, and count.

    A step has as many micro-batches as fill the pipeline, if the run's has more.

    Args:
        config: a configuration that passed its checks for `world_size` ranks.

    Raises:
        ConfigError: as `check_buildable`.
    """
    check_buildable(config)
    num_micro_batches = min(config.num_micro_batches(world_size), _micro_batches_that_fill(config))
    rows, tokens = padded_vocab_size(config), vocab_size(config)
    live = LiveBytes()
    with (
        _stand_in_for_a_gpu(),
        initialized(
            config.parallel, config.model.num_layers, _META, join=_joining(config, world_size, stage)
        ) as topology,
        live,
    ):
        state = build_training_state(config, rows, topology, _META, unpadded_vocab_size=tokens)
        seed_everything(config.training.seed, _META, tensor_parallel_rank=0, pipeline_rank=stage)
        live.peak = 0
        for _ in range(_NUM_STEPS):
            batches = iter([_batch(config)] * num_micro_batches)
            train_step(state, batches, num_micro_batches=num_micro_batches)
        held, peak = measured_storage(state), live.peak
        return RankMemory(stage, held.linear + held.rest, state.staging.nbytes, peak, _validation_bytes(state, live))


@torch.no_grad()
def _validation_bytes(state: TrainingState, live: LiveBytes) -> int:
    """`RankMemory.validation`."""
    for chunk in state.model:
        chunk.eval()
    before = live.peak = live.now
    run_schedule(state, [_batch(state.config)] * 2, None, forward_only=True)
    return live.peak - before


def _micro_batches_that_fill(config: Config) -> int:
    """Micro-batches with which the first stage holds as many as it ever does (`planning.activations`)."""
    layout = config.pipeline_layout
    group = config.parallel.microbatch_group_size_per_virtual_pipeline_stage or layout.num_stages
    return 2 * group if layout.is_interleaved else max(layout.num_stages, 2)


def _batch(config: Config) -> Batch:
    context = config.parallel.context_parallel_size
    shape = (config.training.micro_batch_size, config.model.seq_length // context)
    tokens = torch.empty(shape, dtype=torch.int64, device=_META)
    num_tokens = {} if context == 1 else {NUM_TOKENS: torch.empty(1, device=_META)}
    return num_tokens | {
        "tokens": tokens,
        "labels": tokens,
        "position_ids": tokens,
        "loss_mask": torch.empty(shape, device=_META),
    }


def _joining(config: Config, world_size: int, stage: int) -> Callable[[timedelta], None]:
    """What makes a process group of `world_size` ranks in this process alone. Collectives do nothing."""
    # Imported here: they register fake collectives for the whole process.
    import torch.distributed._tools.fake_collectives
    from torch.testing._internal.distributed.fake_pg import FakeStore

    rank = config.parallel.first_rank_of(stage, world_size)

    def join(timeout: timedelta) -> None:
        torch.distributed.init_process_group(
            "cpu:fake,meta:fake", store=FakeStore(), rank=rank, world_size=world_size, timeout=timeout
        )

    return join


@contextmanager
def _stand_in_for_a_gpu() -> Iterator[None]:
    """Let the meta device keep the tensors that a GPU would keep."""
    with ExitStack() as stack:
        # megatron-core compiles its fused functions; run by Python they keep the same tensors.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(runtime(_META))
        stack.enter_context(_flash_attention())
        stack.enter_context(_fused_rms_norm())
        yield


@contextmanager
def _flash_attention() -> Iterator[None]:
    """Attention as a GPU computes it. PyTorch would choose the matrix of all scores on the meta device.

    A function mode would not reach layers that backward runs again.
    """
    functional: Any = torch.nn.functional
    replaced = functional.scaled_dot_product_attention

    def attend(*args: Tensor, dropout_p: float, is_causal: bool, scale: float, **unused: Any) -> Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention(*args, dropout_p, is_causal, scale=scale)[0]

    functional.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = replaced


@contextmanager
def _fused_rms_norm() -> Iterator[None]:
    """RMSNorm as a GPU computes it. PyTorch would take several operators on the meta device, and keep their results."""
    functional: Any = torch.nn.functional
    replaced = functional.rms_norm

    def norm(x: Tensor, shape: tuple[int, ...], weight: Tensor, eps: float) -> Tensor:
        result: Tensor = _RMSNorm.apply(x, weight)
        return result

    functional.rms_norm = norm
    try:
        yield
    finally:
        functional.rms_norm = replaced


class _RMSNorm(torch.autograd.Function):
    """What RMSNorm on a GPU keeps and makes: its input and a deviation for each token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the meta device's storages that operators make inside the block.

    Attributes:
        now: bytes of all storages that are alive.
        peak: the most that `now` has been.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            # A scaled tensor wraps others, which have the bytes.
            if isinstance(leaf, Tensor) and leaf.is_meta and not isinstance(leaf, ScaledTensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._alive:
            return
        self._alive.add(key)
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, key, num_bytes)

    def _free(self, key: int, num_bytes: int) -> None:
        self._alive.discard(key)
        self.now -= num_bytes
