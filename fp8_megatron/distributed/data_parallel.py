"""Data parallelism over flat gradient spaces."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.transformer.transformer_config import TransformerConfig

from ..config import PrecisionConfig
from ..formats import StorageDtype
from .grad_buffer import GradBuffer
from .partition import StorageClass, partition
from .topology import Topology


class FP8DataParallel(_BaseDataParallel):
    """A model chunk with its gradient buffers; gradients are averaged over replicas once a step.

    Linear weights write their gradients themselves (`main_grad.accumulate_`); the gradients that autograd leaves in
    ``.grad`` (embeddings, norms, biases) are moved to `main_grad` as soon as they are there.

    Args:
        named_params: the chunk's parameters with their names in the whole model (see `models.initialization`).
        num_micro_batches: gradients each parameter will receive per step.
    """

    def __init__(
        self,
        config: TransformerConfig,
        module: torch.nn.Module,
        *,
        named_params: dict[str, torch.nn.Parameter],
        precision: PrecisionConfig,
        topology: Topology,
        num_micro_batches: int,
    ) -> None:
        super().__init__(config=config, module=module)
        self.topology = topology
        self.grad_buffers = [
            GradBuffer(
                space,
                _grad_dtype(space.storage, precision, num_micro_batches),
                reduces_in_fp8=space.storage is StorageClass.LINEAR and precision.formats.main_grad is StorageDtype.FP8,
            )
            for space in partition(named_params.items(), topology.tp.rank())
        ]
        for buffer in self.grad_buffers:
            if buffer.space.storage is not StorageClass.LINEAR:
                for slot in buffer.space.slots:
                    slot.param.register_post_accumulate_grad_hook(_move_grad_to_main_grad)

    def zero_grad_buffer(self, *, measures_underflow: bool = False) -> None:
        """Start a step: the next gradients overwrite the last step's."""
        for buffer in self.grad_buffers:
            buffer.reset(measures_underflow=measures_underflow)

    def finish_grad_sync(self, *unused: Any, **unused_kwargs: Any) -> None:
        """Average the gradients over the data-parallel group."""
        for buffer in self.grad_buffers:
            buffer.zero_unwritten()
            buffer.all_reduce_mean(self.topology.dp)


def _grad_dtype(storage: StorageClass, precision: PrecisionConfig, num_micro_batches: int) -> StorageDtype:
    """Storage of one space's gradients."""
    main_grad = precision.formats.main_grad
    if storage is StorageClass.VECTOR or precision.precision != "fp8":
        return StorageDtype.FP32
    accumulator = StorageDtype(precision.grad_accumulation_dtype)
    if storage is StorageClass.MATRIX:
        return StorageDtype.BF16 if num_micro_batches == 1 else accumulator
    if main_grad is StorageDtype.FP8 and num_micro_batches > 1:
        return accumulator
    return main_grad


def _move_grad_to_main_grad(param: torch.Tensor) -> None:
    param.main_grad.accumulate_(param.grad)  # type: ignore[attr-defined]
    param.grad = None
