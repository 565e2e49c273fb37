"""Adapts a data-parallel model chunk to megatron-core's schedules, and finishes its gradients."""

from __future__ import annotations

from typing import Any

from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.transformer.transformer_config import TransformerConfig

from ..collectives.turns import Turns
from ..moe.megatron.layer import Experts
from ..moe.megatron.router import routers_of, update_expert_biases
from ..sharding.data_parallel import DataParallelModule, finish_gradients
from ..sharding.gradient import GradBuffer


class FP8DataParallel(_BaseDataParallel):
    """A model chunk with its gradient buffers, behind the methods that megatron-core calls.

    Attributes:
        data_parallel: does the work.
        routers: of its layers with experts.
        turns: of a forward and a backward, where its experts wait for an exchange.
    """

    def __init__(self, config: TransformerConfig, data_parallel: DataParallelModule) -> None:
        super().__init__(config=config, module=data_parallel.module)
        self.data_parallel = data_parallel
        self.routers = routers_of(data_parallel.module)
        self.turns = Turns()
        for child in data_parallel.module.modules():
            if isinstance(child, Experts):
                child.turns = self.turns

    @property
    def grad_buffers(self) -> list[GradBuffer]:
        """One gradient buffer for each space of the chunk."""
        return self.data_parallel.grad_buffers

    def zero_grad_buffer(self, *, measures_underflow: bool = False, num_micro_batches: int | None = None) -> None:
        """Start a step: the next gradients overwrite the last step's."""
        for router in self.routers:
            router.start_step()
        self.data_parallel.reset(measures_underflow=measures_underflow, num_micro_batches=num_micro_batches)

    def finish_grad_sync(self, *unused: Any, **unused_kwargs: Any) -> None:
        """Called after a step's last backward: each buffer then holds this rank's shard of the mean over replicas."""
        self.data_parallel.finish_reductions()

    def before_recording(self) -> None:
        """Called before a forward and backward that are recorded into a CUDA graph."""
        self.data_parallel.before_recording()

    def wait_for_weights(self) -> None:
        """Wait for all weights. Code that reads weights outside a forward pass calls this first."""
        self.data_parallel.wait_for_weights()


def finalize_model_grads(model: list[FP8DataParallel], num_tokens: object = None, **unused: object) -> None:
    """Finish the gradients of this rank's model chunks, after the last backward of a step.

    Args:
        num_tokens: unused, like megatron-core's groups and ``force_all_reduce``; it is for losses per token.
    """
    finish_gradients([chunk.data_parallel for chunk in model])
    update_expert_biases([router for chunk in model for router in chunk.routers])
